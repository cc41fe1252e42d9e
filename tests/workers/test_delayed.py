"""Very many delayed calls: they live on the server, not in a worker, and survive whatever is restarted."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import psutil
import redis
from celery import Celery

from broker.embedded import EmbeddedServer
from broker.sync import MAX_MOVED
from tests.conftest import wait_until
from tests.workers.conftest import StartWorker, celery_app
from workers.keeper import DUE_EVERY_S

MANY = 100_000
#: Messages in one push.
TOGETHER = 5000
#: Bytes that a worker may grow by while it puts so many messages aside.
SLACK = 24 << 20
#: Seconds after its time within which a delayed call must have begun.
LATE_S = 1.0
DELAYED = "sheaf:delayed:infer.echo"
ONLY_ECHO: dict[str, object] = {"echo": {}}


def delayed_messages(app: Celery, client: redis.Redis, eta: datetime) -> Iterator[bytes]:
    """`MANY` messages as Celery writes them, each with an id of its own."""
    sent = app.send_task("sheaf.infer", args=["later"], queue="infer.parked", eta=eta)
    template = client.lpop("infer.parked")
    assert isinstance(template, bytes)
    return (template.replace(sent.id.encode(), b"delayed-%d" % number) for number in range(MANY))


def test_a_hundred_thousand_delayed_calls_cost_a_worker_nothing_and_survive_restarts(
    start_worker: StartWorker, new_valkey: EmbeddedServer
) -> None:
    worker = start_worker(new_valkey.url, models=ONLY_ECHO)
    process = psutil.Process(worker.service.pid)
    with celery_app(new_valkey.url) as app, redis.Redis.from_url(new_valkey.url) as client:
        app.send_task("sheaf.infer", args=["warm"], queue="infer.echo").get(timeout=10)
        before = process.memory_info().rss
        messages = list(delayed_messages(app, client, datetime.now(UTC) + timedelta(hours=1)))
        for first in range(0, MANY, TOGETHER):
            client.lpush("infer.echo", *messages[first : first + TOGETHER])
        peak = before

        def all_aside() -> bool:
            nonlocal peak
            peak = max(peak, process.memory_info().rss)
            return int(client.zcard(DELAYED)) == MANY

        wait_until(all_aside, description="all are put aside", timeout_s=60)
        assert peak - before < SLACK, f"the worker grew by {(peak - before) >> 20} MiB"
        assert client.keys("sheaf:held:*") == []
        worker.service.stop()
    new_valkey.stop()
    new_valkey.start()
    start_worker(new_valkey.url, models=ONLY_ECHO)
    with celery_app(new_valkey.url) as app, redis.Redis.from_url(new_valkey.url) as client:
        assert client.zcard(DELAYED) == MANY
        moments = [datetime.now(UTC) + timedelta(seconds=0.5 + n / 10) for n in range(5)]
        soon = [app.send_task("sheaf.infer", args=["soon"], queue="infer.echo", eta=moment) for moment in moments]
        assert [result.get(timeout=10) for result in soon] == ["soon"] * 5
        for result, moment in zip(soon, moments, strict=True):
            stored = json.loads(client.get(f"celery-task-meta-{result.id}") or b"")
            assert 0 <= stored["sheaf"]["started_at"] - moment.timestamp() < LATE_S
        assert client.zcard(DELAYED) == MANY


def test_calls_that_are_due_together_come_at_once(start_worker: StartWorker, new_valkey: EmbeddedServer) -> None:
    count = 10_000
    #: Seconds that they would take if the keeper paused after each call.
    patient_s = (count / MAX_MOVED - 1) * DUE_EVERY_S
    with celery_app(new_valkey.url) as app, redis.Redis.from_url(new_valkey.url) as client:
        messages = list(delayed_messages(app, client, datetime.now(UTC) - timedelta(seconds=1)))[:count]
        client.hset("sheaf:delayed-messages:infer.echo", mapping={f"{n}": b"1:1:" + m for n, m in enumerate(messages)})
        client.zadd(DELAYED, {f"{n}": 1.0 for n in range(count)})
        start_worker(new_valkey.url, models=ONLY_ECHO, ready=False)
        wait_until(lambda: client.zcard(DELAYED) < count, description="the first come")
        begin = time.monotonic()
        wait_until(lambda: client.zcard(DELAYED) == 0, description="all have come")
        assert time.monotonic() - begin < 0.7 * patient_s
        ids = [f"celery-task-meta-delayed-{number}" for number in range(count)]
        wait_until(lambda: client.exists(*ids) == count, description="all have run", timeout_s=30)
