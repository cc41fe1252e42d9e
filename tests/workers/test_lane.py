"""What a lane counts as waiting, whatever becomes of jobs of many rows."""

from __future__ import annotations

import random
import threading
import time

import pytest

from batching import Limits, Row
from broker import Broker, Lease
from broker.message import Message
from inference import Encoded, Model, ModelSpec
from workers.jobs import Job, Served
from workers.lane import Lane, LaneKind, RowRef
from workers.outbox import Outbox

LIMITS = Limits(max_batch_size=16, max_batch_tokens=8192, max_wait_s=0.0)


class Worker:
    """A lane, with the steps of feeder, stager and keeper; nothing here speaks to the broker."""

    def __init__(self) -> None:
        self.revoked: set[str] = set()
        kind = LaneKind("infer.x", "sheaf.infer", Served("x", "1", Outbox("callbacks", "webhooks")), LIMITS, 600.0)
        model = Model.load(ModelSpec("x", handler="inference.handlers.echo:Echo"), "cpu")
        broker = Broker("redis://127.0.0.1:1/0", "session")
        self.lane = Lane(kind, model, broker, threading.Condition(), self.revoked.__contains__)
        self.sent = 0

    def add(self, rows: int) -> Job:
        self.sent += 1
        job_id = f"job-{self.sent}"
        lease = Lease(str(self.sent).encode(), 1, 0, b"")
        message = Message(job_id, "sheaf.infer", [], {}, {}, {}, None, None, None, True, False, None, "")
        job = Job(job_id, lease, message, [], rows > 1, 0.0, outputs=[None] * rows, rows_left=rows, rows_waiting=rows)
        self.lane.hold([lease])
        waiting = [Row(RowRef(job, index, Encoded(0)), 1, 0.0, 0, job.flow) for index in range(rows)]
        self.lane.add([job], waiting, 0.0)
        return job

    def stage(self) -> None:
        batch = self.lane.batcher.due(1.0)
        if batch is not None:
            taken = [row.payload for row in batch.rows]
            self.lane.taken(taken)
            claim = self.lane.claim(taken, time.time())
            self.lane.forget([ending.job.lease.tag for ending in claim.endings])

    def keep(self) -> None:
        self.lane.forget([ending.job.lease.tag for ending in self.lane.drop_unstarted(time.time())])


@pytest.mark.parametrize("seed", range(30))
def test_nothing_counts_as_waiting_once_the_batcher_is_empty(seed: int) -> None:
    randoms = random.Random(seed)
    worker = Worker()
    jobs: list[Job] = []
    for _ in range(60):
        match randoms.choice(["add", "stage", "keep", "revoke", "lose"]):
            case "add":
                jobs.append(worker.add(randoms.choice([1, 3, 50, 200])))
            case "stage":
                worker.stage()
            case "keep":
                worker.keep()
            case "revoke" if jobs:
                worker.revoked.add(randoms.choice(jobs).id)
            case "lose" if jobs:
                worker.lane.forget([randoms.choice(jobs).lease.tag])
    while len(worker.lane.batcher):
        worker.stage()
    assert [worker.lane.ahead(level) for level in range(4)] == [0] * 4
    assert not any(job.rest for job in jobs)
