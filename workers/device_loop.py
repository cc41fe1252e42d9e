"""The thread that owns the device: takes a due batch of each lane in turn, runs it, hands it on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from batching import Batch
from broker import Broker, BrokerUnavailable, Start, StartAnswer
from workers.backoff import Backoff
from workers.handover import Endings, Handover, RunBatch
from workers.jobs import Ending, Job
from workers.lane import Lane, RowRef
from workers.threads import core_thread

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
    ) -> None:
        self._broker = broker
        self._lock = lock
        self._settling = settling
        self._started = started
        self._lost = lost
        self._lanes: list[Lane] = []
        self._stopping = threading.Event()
        self._thread = core_thread("device", self._run)

    def start(self) -> None:
        self._thread.start()

    def serve(self, lane: Lane) -> None:
        """From now on run this lane's batches too."""
        with self._lock:
            self._lanes.append(lane)

    def stop(self, timeout_s: float) -> bool:
        """Finish the running batch, take no other. False when it still runs after `timeout_s`."""
        self._stopping.set()
        with self._lock:
            self._lock.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping.is_set():
            taken = self._take()
            if taken is not None:
                lane, batch = taken
                lane.batch_taken()
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
        inferred = lane.executor.infer([row.encoded for row in rows])
        infer_s = time.monotonic() - begin
        self._settling.put(RunBatch(lane, tuple(rows), inferred, infer_s, batch.longest, batch.reason))

    def _may_run(self, lane: Lane, rows: Sequence[RowRef]) -> list[RowRef]:
        """Those rows whose job is still ours, not ended, not cancelled and not expired; their jobs are now started."""
        now, now_wall = time.monotonic(), time.time()
        fresh: list[Job] = []
        refused: set[Job] = set()
        endings: list[Ending] = []
        twins: list[Job] = []
        running_ids = lane.running_ids()
        for job in dict.fromkeys(row.job for row in rows):
            if job.lease.tag not in lane.held:
                refused.add(job)
            elif job.started_at is None:
                ending = lane.not_to_run(job, now_wall)
                if ending is not None:
                    endings.append(ending)
                elif job.id in running_ids:
                    # The same call, sent twice: the other's result will be this one's too.
                    twins.append(job)
                else:
                    running_ids.add(job.id)
                    fresh.append(job)
        refused.update(twins, (ending.job for ending in endings))
        if fresh:
            refused |= self._start(lane, fresh)
            running = [job for job in fresh if job not in refused]
            for job in running:
                job.started, job.started_at = now, now_wall
            self._started(running)
        if endings:
            self._settling.put(Endings(lane, endings))
        if twins:
            lane.give_back(twins)
        return [row for row in rows if row.job not in refused]

    def _start(self, lane: Lane, jobs: Sequence[Job]) -> set[Job]:
        """The broker's last look; returns the jobs that must not run."""
        starts = [Start(job.lease.tag, job.id, job.message.recorded, job.lease.attempt) for job in jobs]
        backoff = Backoff()
        while True:
            try:
                answers = self._broker.start(lane.queue, starts)
                break
            except BrokerUnavailable as error:
                if self._stopping.is_set():
                    return set(jobs)
                log.warning("The broker is away; the batch waits for it.", extra={"cause": str(error)})
                backoff.wait(self._stopping)
        refused = {job for job, answer in zip(jobs, answers, strict=True) if answer is not StartAnswer.RUN}
        if refused:
            lane.forget([job.lease.tag for job in refused])
            lost = sum(answer is StartAnswer.LOST for answer in answers)
            if lost:
                log.warning("Leases were lost before their batch ran.", extra={"count": lost, "queue": lane.queue})
                self._lost(lane.served.model, lost)
        return refused
