"""What Celery's own tools see of a worker: inspection by name, counters, heartbeats."""

from __future__ import annotations

import socket
from typing import Any

from tests.conftest import wait_until
from tests.workers.conftest import Shop, collected_events

#: A device's process is named after the device and its number, and after the machine.
NODE = f"sheaf-cpu0@{socket.gethostname()}"


def test_a_worker_is_inspected_by_its_name(shop: Shop) -> None:
    named = shop.app.control.inspect(destination=[NODE], timeout=5)
    assert named.ping() == {NODE: {"ok": "pong"}}
    assert "sheaf.infer" in (named.registered() or {})[NODE]
    assert shop.app.control.inspect(destination=["another@host"], timeout=0.5).ping() is None


def test_stats_count_the_jobs_that_have_ended(shop: Shop) -> None:
    def stats() -> dict[str, Any]:
        return dict((shop.app.control.inspect(destination=[NODE], timeout=5).stats() or {})[NODE])

    def total() -> int:
        return int(stats()["total"].get("sheaf.infer", 0))

    before = total()
    for result in [shop.call(n) for n in range(7)]:
        result.get(timeout=10)
    wait_until(lambda: total() == before + 7, description="seven more are counted")
    assert stats()["broker"]["transport"] == "redis"
    assert stats()["uptime"] >= 0


def test_a_worker_tells_that_it_lives(shop: Shop) -> None:
    with collected_events(shop.app) as events:

        def heartbeats() -> list[dict[str, object]]:
            return [event for event in list(events) if event["type"] == "worker-heartbeat"]

        wait_until(lambda: len(heartbeats()) >= 2, description="two heartbeats came")
    first, second = heartbeats()[:2]
    assert first["hostname"] == second["hostname"] == NODE
    assert float(str(second["timestamp"])) - float(str(first["timestamp"])) < 5
    assert isinstance(first["processed"], int)
