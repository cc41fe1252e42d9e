"""Jobs that end before they run: cancelled, revoked, expired; whoever waits for them is told at once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from tests.conftest import free_port, wait_until
from tests.services import Service, answers
from tests.workers.conftest import RunningWorker, StartWorker, held, wait_until_controllable

SLOW, ECHO = "infer.slow", "infer.echo"


@pytest.fixture
def busy(worker: RunningWorker, celery_client: Celery) -> AsyncResult[object]:
    """The device runs one batch of the slow model for longer than any of these tests."""
    wait_until_controllable(celery_client)
    running = celery_client.send_task("sheaf.infer", args=[8], queue=SLOW)
    wait_until(lambda: held(worker.url, SLOW), description="the device is busy")
    return running


@pytest.fixture
def api(valkey_url: str, tmp_path: Path) -> Iterator[httpx.Client]:
    config = {
        "broker": {"url": valkey_url},
        "api": {"port": (port := free_port())},
        "models": {"minilm": None, "slow": {"handler": "tests.workers.handlers:Sleeper"}},
    }
    with Service("api", config=config, folder=tmp_path / "api") as service:
        base = f"http://127.0.0.1:{port}"
        wait_until(lambda: answers(f"{base}/livez"), description=f"the API is up: {service.log_path}")
        with httpx.Client(base_url=base, timeout=20) as client:
            yield client


def test_a_deadline_fires_at_the_deadline_while_the_device_is_busy_for_longer(
    busy: AsyncResult[object], worker: RunningWorker, celery_client: Celery
) -> None:
    begin = time.monotonic()
    late = celery_client.send_task("sheaf.infer", args=[0], queue=SLOW, expires=0.7)
    with pytest.raises(TaskRevokedError, match="expired"):
        late.get(timeout=6)
    assert time.monotonic() - begin >= 0.6
    assert not busy.ready()
    wait_until(
        lambda: worker.metric("sheaf_jobs_total", model="slow", status="expired") == 1, description="it is counted"
    )


def test_a_revoked_job_that_waits_behind_a_busy_device_ends_at_once_and_never_runs(
    busy: AsyncResult[object], worker: RunningWorker, celery_client: Celery
) -> None:
    waiting = celery_client.send_task("sheaf.infer", args=[0], queue=SLOW)
    waiting.revoke()
    with pytest.raises(TaskRevokedError, match="revoked"):
        waiting.get(timeout=6)
    assert not busy.ready()
    wait_until(
        lambda: worker.metric("sheaf_jobs_total", model="slow", status="cancelled") == 1, description="it is counted"
    )


def test_an_http_job_expires_at_its_deadline_although_no_worker_is_there(api: httpx.Client) -> None:
    begin = time.monotonic()
    answer = api.post("/v1/jobs", json={"model": "slow", "input": 0, "timeout_s": 0.5}, headers={"Prefer": "wait=10"})
    assert answer.json()["status"] == "expired", answer.text
    assert 0.4 < time.monotonic() - begin < 8
    other = api.post("/v1/jobs", json={"model": "slow", "input": 0, "timeout_s": 0.2}).json()
    wait_until(lambda: api.get(other["urls"]["self"]).json()["status"] == "expired", description="a poller sees it too")


def test_a_revoke_while_all_workers_are_down_is_not_forgotten(
    api: httpx.Client, celery_client: Celery, start_worker: StartWorker, valkey_url: str
) -> None:
    revoked = celery_client.send_task("sheaf.infer", args=[0], queue=SLOW)
    wanted = celery_client.send_task("sheaf.infer", args=[0.01], queue=SLOW)
    submitted = api.post("/v1/jobs", json={"model": "slow", "input": 0}).json()
    celery_client.control.revoke([revoked.id, submitted["id"]])
    # Both are told before any worker is there.
    with pytest.raises(TaskRevokedError, match="revoked"):
        revoked.get(timeout=5)
    assert api.get(submitted["urls"]["self"], params={"wait": 5}).json()["status"] == "cancelled"
    worker = start_worker(valkey_url)
    assert wanted.get(timeout=10) == 0.01
    wait_until(
        lambda: worker.metric("sheaf_jobs_total", model="slow", status="cancelled") == 2, description="both dropped"
    )
    assert worker.metric("sheaf_batch_size_sum", model="slow") == 1


def test_a_cancelled_http_job_is_counted_and_shown_as_revoked(
    api: httpx.Client, busy: AsyncResult[object], worker: RunningWorker
) -> None:
    waiting = api.post("/v1/jobs", json={"model": "slow", "input": 0}).json()
    assert api.post(waiting["urls"]["cancel"]).json()["status"] == "cancelled"
    busy.get(timeout=20)
    wait_until(
        lambda: worker.metric("sheaf_jobs_total", model="slow", status="cancelled") == 1, description="it is counted"
    )
    assert worker.metric("sheaf_batch_size_sum", model="slow") == 1


def test_a_job_that_is_revoked_while_it_runs_ends_at_once_as_that_and_is_counted(
    worker: RunningWorker, celery_client: Celery
) -> None:
    wait_until_controllable(celery_client)
    running = celery_client.send_task("sheaf.infer", args=[3], queue=SLOW)
    wait_until(lambda: held(worker.url, SLOW), description="it runs")
    begin = time.monotonic()
    running.revoke()
    with pytest.raises(TaskRevokedError, match="revoked"):
        running.get(timeout=6)
    assert time.monotonic() - begin < 2.5
    wait_until(
        lambda: worker.metric("sheaf_jobs_total", model="slow", status="cancelled") == 1, description="it is counted"
    )
    assert worker.metric("sheaf_jobs_total", model="slow", status="succeeded") == 0
