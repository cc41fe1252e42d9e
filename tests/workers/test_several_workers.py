"""Workers that share a queue, and their replacement one after the other while calls come in."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import uuid
from collections import Counter
from typing import Any

import redis
from celery import Celery
from celery.result import AsyncResult

from broker import NewJob, Priority
from broker.aio import AsyncBroker
from tests.conftest import wait_until
from tests.workers.conftest import MODELS, RunningWorker, StartWorker

SLOW = "infer.slow"
ONLY_SLOW: dict[str, object] = {"echo": None, "slow": MODELS["slow"]}


def done_ids(worker: RunningWorker) -> list[str]:
    """Ids of the jobs that this worker says it has ended."""
    lines = [json.loads(line) for line in worker.service.log().splitlines()]
    return [line["job_id"] for line in lines if line["message"] == "Job done."]


def test_two_workers_share_a_queue_and_run_nothing_twice(
    start_worker: StartWorker, celery_client: Celery, valkey_url: str
) -> None:
    workers = [start_worker(valkey_url, models=ONLY_SLOW) for _ in range(2)]
    rows = [0.02 + n / 1e6 for n in range(200)]
    sent = [celery_client.send_task("sheaf.infer", args=[row], queue=SLOW) for row in rows]
    assert [result.get(timeout=30) for result in sent] == rows
    wait_until(lambda: sum(len(done_ids(worker)) for worker in workers) >= 200, description="all lines are written")
    shares = [done_ids(worker) for worker in workers]
    assert min(len(share) for share in shares) > 20, "one of them had next to nothing to do"
    assert Counter(job_id for share in shares for job_id in share) == Counter(result.id for result in sent)
    wait_until(
        lambda: sum(worker.metric("sheaf_batch_size_sum", model="slow") for worker in workers) == 200,
        description="each row was on a device once",
    )


class Load:
    """Calls that come in, from a Celery client and through the broker's own submit, until it is stopped."""

    #: Seconds between two calls of each kind; together they ask for less than one worker can do.
    PAUSE_S = 0.02

    def __init__(self, app: Celery, url: str) -> None:
        self._app = app
        self._url = url
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=run) for run in (self._send, lambda: asyncio.run(self._submit()))]
        self.sent: list[AsyncResult[Any]] = []
        self.submitted: list[str] = []

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _send(self) -> None:
        while not self._stopping.wait(self.PAUSE_S):
            self.sent.append(self._app.send_task("sheaf.infer", args=[0.01], queue=SLOW))

    async def _submit(self) -> None:
        broker = await AsyncBroker.open(self._url)
        try:
            while not self._stopping.is_set():
                job_id = str(uuid.uuid4())
                job = NewJob(job_id, "slow", SLOW, b'{"input":0.01}', Priority.NORMAL, time.time())
                self.submitted.append((await broker.submit(job)).id)
                await asyncio.sleep(self.PAUSE_S)
        finally:
            await broker.close()


def test_workers_are_replaced_one_by_one_under_load_and_no_call_notices(
    start_worker: StartWorker, celery_client: Celery, valkey_url: str
) -> None:
    old = [start_worker(valkey_url, models=ONLY_SLOW) for _ in range(2)]
    with Load(celery_client, valkey_url) as load:
        for worker in old:
            before = len(load.sent)
            wait_until(lambda before=before: len(load.sent) > before + 10, description="calls come in")  # type: ignore[misc]  # bound now
            assert worker.service.stop() == 0
            start_worker(valkey_url, models=ONLY_SLOW)
    ids = [result.id for result in load.sent] + load.submitted
    assert len(load.sent) > 100
    assert len(load.submitted) > 100
    assert [result.get(timeout=20) for result in load.sent] == [0.01] * len(load.sent)
    with redis.Redis.from_url(valkey_url) as client:

        def stored() -> list[bytes | None]:
            return list(client.mget([f"celery-task-meta-{job_id}" for job_id in ids]))

        wait_until(lambda: None not in stored(), description="every job has ended")
        ends = [json.loads(meta or b"") for meta in stored()]
        assert Counter((end["status"], end["sheaf"]["attempt"]) for end in ends) == {("SUCCESS", 1): len(ids)}
        assert client.llen(f"sheaf:dead:{SLOW}") == 0
        assert client.keys(f"sheaf:held:{SLOW}:*") == []
