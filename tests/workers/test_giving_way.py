"""A long batch of the lowest priority beside callers: theirs run in the middle of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from celery import Celery
from celery.exceptions import TimeoutError as NotInTime
from celery.result import AsyncResult

from tests.conftest import wait_until
from tests.workers.conftest import RunningWorker, StartWorker, held

LAYERED = {"handler": "tests.workers.handlers:Layered", "max_batch_size": 4, "max_wait_ms": 0}
LOWEST, HIGHEST = 9, 0


@pytest.fixture
def worker(start_worker: StartWorker, valkey_url: str, celery_client: Celery) -> RunningWorker:
    models: dict[str, object] = {
        "layered": LAYERED | {"step_timeout_s": 3.5},
        "other": {"handler": "tests.workers.handlers:Sleeper", "max_batch_size": 4, "max_wait_ms": 0},
    }
    worker = start_worker(valkey_url, models=models)
    # What a batch takes is learned; the share of the lowest priority is counted in batches.
    send(celery_client, 1.0, LOWEST).get(timeout=20)
    return worker


def send(client: Celery, row: float, priority: int, model: str = "layered") -> AsyncResult[object]:
    return client.send_task("sheaf.infer", args=[row], queue=f"infer.{model}", priority=priority)


def begins(url: str) -> None:
    wait_until(lambda: held(url, "infer.layered"), description="it is leased")
    # It has the device to itself.
    time.sleep(0.2)


@contextmanager
def running_low(client: Celery, url: str, seconds: float) -> Iterator[AsyncResult[object]]:
    """A batch that nobody waits for is on the device."""
    low = send(client, seconds, LOWEST)
    begins(url)
    yield low


def test_callers_run_in_the_middle_of_it_whatever_their_model_and_it_ends_as_ever(
    worker: RunningWorker, celery_client: Celery, valkey_url: str
) -> None:
    with running_low(celery_client, valkey_url, 3.0) as low:
        for model in ("layered", "other", "layered"):
            assert send(celery_client, 0.1, HIGHEST, model).get(timeout=1.5) == 0.1
        # The row's own failure, and not that of the batch around it.
        with pytest.raises(ValueError, match="a negative row"):
            send(celery_client, -1.0, HIGHEST).get(timeout=1.5)
        with pytest.raises(NotInTime):
            low.get(timeout=0.01)
        assert low.get(timeout=20) == 3.0


def test_standing_aside_is_no_time_of_its_own(worker: RunningWorker, celery_client: Celery, valkey_url: str) -> None:
    """With it the step would be longer than it may be, and the worker would end."""
    before = worker.metric("sheaf_inference_seconds_sum", model="layered")
    with running_low(celery_client, valkey_url, 3.0) as low:
        assert send(celery_client, 2.0, HIGHEST, "other").get(timeout=10) == 2.0
        assert low.get(timeout=20) == 3.0
    assert 3.0 <= worker.metric("sheaf_inference_seconds_sum", model="layered") - before < 4.0


def test_a_flood_of_callers_leaves_it_its_share(worker: RunningWorker, celery_client: Celery, valkey_url: str) -> None:
    with running_low(celery_client, valkey_url, 0.5) as low:
        begin = time.monotonic()
        callers = [send(celery_client, 0.1, HIGHEST, "other") for _ in range(400)]
        assert low.get(timeout=30) == 0.5
        assert time.monotonic() - begin < 9, "it got less than a tenth of the time"
        assert held(valkey_url, "infer.other"), "the callers were served before it"
        for caller in callers:
            caller.forget()


def test_one_that_is_cancelled_meanwhile_does_not_hold_the_callers(
    worker: RunningWorker, celery_client: Celery, valkey_url: str
) -> None:
    with running_low(celery_client, valkey_url, 2.0) as low:
        low.revoke()
        assert send(celery_client, 0.1, HIGHEST).get(timeout=1.5) == 0.1


def test_a_batch_with_a_callers_row_gives_way_to_nobody(
    worker: RunningWorker, celery_client: Celery, valkey_url: str
) -> None:
    first = send(celery_client, 1.0, 3)
    begins(valkey_url)
    second = send(celery_client, 0.1, HIGHEST, "other")
    second.get(timeout=10)
    assert first.ready()
