"""The thread that owns the device: takes a due batch of each lane in turn, runs it, hands it on."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from batching import Batch
from broker import Broker, BrokerUnavailable, Start, StartAnswer
from workers.backoff import persist
from workers.handover import Endings, Handover, RunBatch
from workers.jobs import Job
from workers.lane import Lane, RowRef
from workers.threads import Grace, core_thread
from workers.watch import StepWatch

log = logging.getLogger(__name__)


class DeviceLoop:
    """Runs batches of all lanes of one device, one at a time. `lock` is the lanes' lock."""

    def __init__(
        self,
        broker: Broker,
        lock: threading.Condition,
        settling: Handover,
        started: Callable[[Sequence[Job]], None],
        lost: Callable[[str, int], None],
        watch: StepWatch,
    ) -> None:
        self._broker = broker
        self._lock = lock
        self._settling = settling
        self._started = started
        self._lost = lost
        self._watch = watch
        self._lanes: list[Lane] = []
        self._stopping = threading.Event()
        self._thread = core_thread("device", self._run)

    def start(self) -> None:
        self._thread.start()

    def serve(self, lane: Lane) -> None:
        """From now on run this lane's batches too."""
        with self._lock:
            self._lanes.append(lane)

    def stop(self, grace: Grace) -> bool:
        """Finish the running batch, take no other. False when it still runs after the grace."""
        self._stopping.set()
        with self._lock:
            self._lock.notify_all()
        return grace.join(self._thread)

    def _run(self) -> None:
        while not self._stopping.is_set():
            taken = self._take()
            if taken is not None:
                lane, batch = taken
                lane.room.set()
                self._run_batch(lane, batch)

    def _take(self) -> tuple[Lane, Batch[RowRef]] | None:
        """Wait for a due batch; None when told to stop, or woken for another look."""
        with self._lock:
            now = time.monotonic()
            wakeups = [(wakeup, lane) for lane in self._lanes if (wakeup := lane.batcher.next_wakeup(now)) is not None]
            if not wakeups or min(wakeup for wakeup, _ in wakeups) > now:
                self._lock.wait(min(wakeup for wakeup, _ in wakeups) - now if wakeups else None)
                return None
            due = [lane for wakeup, lane in wakeups if wakeup <= now]
            # In turn, so that one model's backlog holds no other model up by more than a batch.
            lane = min(due, key=lambda candidate: (candidate.served_at, candidate.batcher.oldest))
            lane.served_at = now
            batch = lane.batcher.due(now)
            return None if batch is None else (lane, batch)

    def _run_batch(self, lane: Lane, batch: Batch[RowRef]) -> None:
        rows = self._may_run(lane, [row.payload for row in batch.rows])
        if not rows:
            return
        begin = time.monotonic()
        with self._watch.step("infer", lane):
            inferred = lane.executor.infer([row.encoded for row in rows])
        infer_s = time.monotonic() - begin
        self._settling.put(RunBatch(lane, tuple(rows), inferred, infer_s, batch.longest, batch.reason))

    def _may_run(self, lane: Lane, rows: Sequence[RowRef]) -> list[RowRef]:
        """Those rows whose job is still ours, not ended, not cancelled and not expired; their jobs are now started."""
        now, now_wall = time.monotonic(), time.time()
        claim = lane.claim(rows, now_wall)
        endings = claim.endings
        if claim.fresh:
            running, revoked = self._start(lane, claim.fresh)
            for job in running:
                job.started, job.started_at = now, now_wall
            self._started(running)
            endings += [lane.revoked(job) for job in revoked]
        if endings:
            self._settling.put(Endings(lane, endings))
        if claim.twins:
            lane.let_wait(claim.twins)
        return [row for row in rows if lane.runs(row.job)]

    def _start(self, lane: Lane, jobs: Sequence[Job]) -> tuple[list[Job], list[Job]]:
        """The broker's last look: the jobs that run, and those that were revoked; neither for what is not ours now."""
        starts = [Start(job.lease.tag, job.id, job.message.recorded, job.lease.attempt) for job in jobs]
        try:
            answers = persist(
                lambda: self._broker.start(lane.queue, starts),
                self._stopping,
                log,
                "The broker is away; the batch waits for it.",
            )
        except BrokerUnavailable:
            return [], []
        by_answer: defaultdict[StartAnswer, list[Job]] = defaultdict(list)
        for job, answer in zip(jobs, answers, strict=True):
            by_answer[answer].append(job)
        lost, ended = by_answer[StartAnswer.LOST], by_answer[StartAnswer.ENDED]
        lane.forget([job.lease.tag for job in lost + ended])
        if ended:
            log.info(
                "Calls were dropped: their ids have results already.",
                extra={"count": len(ended), "queue": lane.queue, "job_id": ended[0].id},
            )
        if lost:
            log.warning("Leases were lost before their batch ran.", extra={"count": len(lost), "queue": lane.queue})
            self._lost(lane.served.model, len(lost))
        return by_answer[StartAnswer.RUN], by_answer[StartAnswer.REVOKED]
