"""What runs together, and what runs first, in a real worker."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import pytest
import redis
from celery import Celery
from celery.result import AsyncResult

from tests.conftest import wait_until
from tests.workers.conftest import RunningWorker, StartWorker, held

HANDLERS = "tests.workers.handlers"
MODELS: dict[str, object] = {
    "echo": None,
    "single": {"handler": f"{HANDLERS}:Sleeper", "max_batch_size": 1, "max_wait_ms": 0},
    "four": {"handler": f"{HANDLERS}:Sleeper", "max_batch_size": 4, "max_wait_ms": 0},
    "patient": {"handler": f"{HANDLERS}:Sleeper", "max_batch_size": 4, "max_wait_ms": 20_000},
    "padded": {"handler": f"{HANDLERS}:Padded", "max_batch_size": 16, "max_batch_tokens": 4096, "max_wait_ms": 5},
}


@pytest.fixture
def worker(start_worker: StartWorker, valkey_url: str) -> RunningWorker:
    return start_worker(valkey_url, models=MODELS)


def send(app: Celery, model: str, row: object, **options: Any) -> AsyncResult[Any]:
    return app.send_task("sheaf.infer", args=[row], queue=f"infer.{model}", **options)


def started(url: str, results: Sequence[AsyncResult[Any]]) -> list[float]:
    """When each one's batch began, Unix seconds."""
    for result in results:
        result.get(timeout=60)
    with redis.Redis.from_url(url) as client:
        stored = client.mget([f"celery-task-meta-{result.id}" for result in results])
    return [json.loads(text)["sheaf"]["started_at"] for text in stored if text is not None]


def ended(url: str, result: AsyncResult[Any]) -> float:
    """When it ended, Unix seconds."""
    result.get(timeout=60)
    with redis.Redis.from_url(url) as client:
        stored = client.get(f"celery-task-meta-{result.id}")
    finished: str = json.loads(stored or "{}")["date_done"]
    return datetime.fromisoformat(finished).timestamp()


def test_a_high_call_overtakes_low_ones_that_the_worker_holds_already(
    worker: RunningWorker, celery_client: Celery, valkey_url: str
) -> None:
    low = [send(celery_client, "single", 0.05, priority=9) for _ in range(40)]
    wait_until(lambda: held(valkey_url, "infer.single") > 2, description="low calls are leased")
    low[0].get(timeout=60)
    high = send(celery_client, "single", 0.05, priority=0)
    [begun], lows = started(valkey_url, [high]), started(valkey_url, low)
    assert sum(moment < begun for moment in lows) <= 10, "it waited for more than what ran and what was ready"


def test_low_calls_get_their_share_while_high_ones_never_end(
    worker: RunningWorker, celery_client: Celery, valkey_url: str
) -> None:
    low = [send(celery_client, "single", 0.01, priority=9) for _ in range(3)]
    high = [send(celery_client, "single", 0.01, priority=0) for _ in range(80)]
    lows, highs = started(valkey_url, low), started(valkey_url, high)
    before = [sum(moment < begun for moment in highs) for begun in lows]
    assert before[-1] < 60, f"the low ones began after {before} of 80 high ones"


def test_a_call_of_many_rows_spans_batches_and_lets_others_in_between(
    worker: RunningWorker, celery_client: Celery, valkey_url: str
) -> None:
    rows = [0.02] * 100
    many = celery_client.send_task("sheaf.infer", kwargs={"inputs": rows}, queue="infer.four")
    singles = [send(celery_client, "four", 0.02) for _ in range(8)]
    assert max(started(valkey_url, singles)) + 0.2 < ended(valkey_url, many), "they waited for all of its rows"
    assert many.get(timeout=60) == [{"output": 0.02}] * 100
    assert worker.metric("sheaf_batch_size_sum", model="four") == 108


def test_one_models_flood_does_not_hold_up_anothers_trickle(
    worker: RunningWorker, celery_client: Celery, valkey_url: str
) -> None:
    flood = [send(celery_client, "single", 0.02) for _ in range(60)]
    flood[0].get(timeout=60)
    trickle = send(celery_client, "four", 0.0)
    [begun] = started(valkey_url, [trickle])
    assert sum(moment > begun for moment in started(valkey_url, flood)) > 30


def test_a_call_runs_before_it_expires_although_its_batch_may_wait_longer(
    worker: RunningWorker, celery_client: Celery
) -> None:
    begin = time.monotonic()
    assert send(celery_client, "patient", 0.0, expires=2).get(timeout=15) == 0.0
    assert time.monotonic() - begin < 10
    wait_until(
        lambda: worker.metric("sheaf_batches_total", model="patient", closed_by="deadline") == 1,
        description="the metrics say why",
    )


def test_texts_of_like_length_run_together(worker: RunningWorker, celery_client: Celery, valkey_url: str) -> None:
    texts = ["short", "x" * 200, "brief", "tiny!"] * 24
    with redis.Redis.from_url(valkey_url) as client:
        # All at once, so that there is a backlog to choose from.
        template = _message(celery_client, client)
        with client.pipeline() as pipe:
            for number, text in enumerate(texts):
                pipe.lpush("infer.padded", template.replace(b"the-id", b"job-%d" % number).replace(b"$", text.encode()))
            pipe.execute()
    answers: list[list[int]] = [
        AsyncResult(f"job-{number}", app=celery_client).get(timeout=60) for number in range(len(texts))
    ]
    computed = sum(padded / rows for rows, padded in answers)
    assert computed < 1.5 * sum(map(len, texts)), "most of what was computed was padding"
    assert worker.metric("sheaf_batches_total", model="padded", closed_by="full") > 0


def _message(app: Celery, client: redis.Redis) -> bytes:
    """A plain message with `the-id` and the row `$`, its body unencoded so that both can be replaced."""
    app.send_task("sheaf.infer", args=["$"], queue="parked", task_id="the-id", priority=0)
    raw = client.rpop("parked")
    assert isinstance(raw, bytes)
    message = json.loads(raw)
    message["body"] = '[["$"], {}, {}]'
    message["properties"]["body_encoding"] = None
    return json.dumps(message).encode()
