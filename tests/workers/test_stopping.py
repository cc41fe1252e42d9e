"""How a worker ends: in order, in a hurry, or because a step of it never comes back."""

from __future__ import annotations

import signal
import time

import pytest
import redis
from celery import Celery

from tests.conftest import wait_until
from tests.workers.conftest import StartWorker, held

SLOW, FREEZER = "infer.slow", "infer.freezer"


def given_back(url: str, queue: str) -> list[bytes]:
    """Attempts of the messages at the front of the queue."""
    with redis.Redis.from_url(url) as client:
        return [entry.partition(b":")[0] for entry in client.lrange(f"sheaf:returned:{queue}:0", 0, -1)]


@pytest.mark.parametrize("signals", [[signal.SIGTERM, signal.SIGTERM], [signal.SIGQUIT]])
def test_a_second_sigterm_or_a_sigquit_gives_everything_back_at_once(
    start_worker: StartWorker, celery_client: Celery, valkey_url: str, signals: list[signal.Signals]
) -> None:
    worker = start_worker(valkey_url)
    for _ in range(6):
        celery_client.send_task("sheaf.infer", args=[30], queue=SLOW)
    wait_until(lambda: held(valkey_url, SLOW) == 6, description="a batch runs and others wait")
    for number in signals:
        worker.service.send(number)
        time.sleep(0.5)
    worker.service.wait(10)
    assert held(valkey_url, SLOW) == 0
    # Nobody but the operator is to blame, so no attempt is counted.
    assert given_back(valkey_url, SLOW) == [b"1"] * 6


@pytest.mark.parametrize("step", ["infer", "preprocess", "postprocess"])
def test_a_frozen_step_ends_its_worker_and_its_jobs_come_back(
    start_worker: StartWorker, celery_client: Celery, valkey_url: str, step: str
) -> None:
    models: dict[str, object] = {
        "echo": None,
        "freezer": {
            "handler": "tests.workers.handlers:Freezer",
            "max_batch_size": 1,
            "max_wait_ms": 0,
            "step_timeout_s": 1.0,
        },
    }
    frozen = start_worker(valkey_url, lease_s=1.0, models=models)
    cause = celery_client.send_task("sheaf.infer", args=[step], queue=FREEZER)
    wait_until(lambda: held(valkey_url, FREEZER) >= 1, description="it is held")
    innocent = celery_client.send_task("sheaf.infer", args=["x"], queue=FREEZER)
    assert frozen.service.wait(15) == 70
    assert "A step is frozen" in frozen.service.log()
    # The cause comes back alone, and may come before the innocent one; then it ends this worker too.
    second = start_worker(valkey_url, lease_s=1.0, models=models, ready=False)
    wait_until(lambda: innocent.ready() or second.service.process.poll() == 70, description="either", timeout_s=30)
    if not innocent.ready():
        start_worker(valkey_url, lease_s=1.0, models=models, ready=False)
    assert innocent.get(timeout=20) == "x"
    assert not cause.ready()
