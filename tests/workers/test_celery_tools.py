"""What Celery's own tools see of a worker: inspection by name, counters, heartbeats."""

from __future__ import annotations

from tests.conftest import wait_until
from tests.workers.conftest import Shop, collected_events


def test_a_worker_is_inspected_by_its_name(shop: Shop) -> None:
    [node] = shop.app.control.inspect(timeout=1).ping() or {}
    assert node.startswith("sheaf-cpu0@")
    named = shop.app.control.inspect(destination=[node], timeout=1)
    assert named.ping() == {node: {"ok": "pong"}}
    assert "sheaf.infer" in (named.registered() or {})[node]
    assert shop.app.control.inspect(destination=["another@host"], timeout=0.5).ping() is None


def test_stats_count_the_jobs_that_have_ended(shop: Shop) -> None:
    def total() -> int:
        [stats] = (shop.app.control.inspect(timeout=1).stats() or {}).values()
        count: int = stats["total"].get("sheaf.infer", 0)
        return count

    before = total()
    for result in [shop.call(n) for n in range(7)]:
        result.get(timeout=10)
    wait_until(lambda: total() == before + 7, description="seven more are counted")
    [stats] = (shop.app.control.inspect(timeout=1).stats() or {}).values()
    assert stats["broker"]["transport"] == "redis"
    assert stats["uptime"] >= 0


def test_a_worker_tells_that_it_lives(shop: Shop) -> None:
    with collected_events(shop.app) as events:

        def heartbeats() -> list[dict[str, object]]:
            return [event for event in list(events) if event["type"] == "worker-heartbeat"]

        wait_until(lambda: len(heartbeats()) >= 2, description="two heartbeats came")
    first, second = heartbeats()[:2]
    assert str(first["hostname"]).startswith("sheaf-cpu0@")
    assert second["hostname"] == first["hostname"]
    assert float(str(second["timestamp"])) - float(str(first["timestamp"])) < 5
    assert isinstance(first["processed"], int)
