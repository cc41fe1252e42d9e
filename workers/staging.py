"""Makes a lane's due batch ready for the device: forms it, takes a last look at its jobs, collates its rows."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from batching import LOWEST, Batch, Scheduler
from broker import Broker, BrokerUnavailable, Start, StartAnswer
from workers.backoff import persist
from workers.handover import Endings, Handover
from workers.jobs import Job
from workers.lane import Lane, RowRef
from workers.watch import StepWatch

log = logging.getLogger(__name__)

#: After so many seconds the jobs of a staged batch are looked at again before it runs.
LOOK_AGAIN_S = 0.01


@dataclass(frozen=True, slots=True)
class Staged:
    """A batch that is ready to run: its jobs are claimed and started."""

    lane: Lane
    rows: tuple[RowRef, ...]
    #: Those whose first rows these are; they have not begun.
    fresh: tuple[Job, ...]
    #: What the lane's executor made of the rows, for its own `infer`; None for it to be made there.
    collated: Any
    #: Tokens of the longest row.
    longest: int
    #: As it was formed.
    batch: Batch[RowRef]
    #: When its jobs were looked at; `time.monotonic`.
    since: float

    @property
    def padded_tokens(self) -> int:
        return self.longest * len(self.rows)

    @property
    def is_callers(self) -> bool:
        """Whether somebody waits for any of its rows."""
        return any(row.job.level != LOWEST for row in self.rows)


class Stager:
    """Stages one batch after the other; called by one thread at a time. `lock` is the lanes' lock."""

    def __init__(
        self,
        broker: Broker,
        lock: threading.Condition,
        settling: Handover,
        started: Callable[[Sequence[Job]], None],
        lost: Callable[[str, int], None],
        watch: StepWatch,
    ) -> None:
        #: Set by whoever stops it: what waits for the broker then gives up.
        self.stopping = threading.Event()
        self._broker = broker
        self._lock = lock
        self._settling = settling
        self._started = started
        self._lost = lost
        self._watch = watch
        self._scheduler: Scheduler[RowRef] = Scheduler()
        self._lanes: dict[int, Lane] = {}

    def serve(self, lane: Lane) -> None:
        """From now on stage this lane's batches too."""
        with self._lock:
            self._lanes[id(lane.batcher)] = lane
            self._scheduler.serve(lane.batcher)
            self._lock.notify_all()

    def wait(self) -> None:
        """Until a batch may be due, or the lanes have changed."""
        with self._lock:
            if self.stopping.is_set():
                return
            now = time.monotonic()
            wakeup = self._scheduler.next_wakeup(now)
            if wakeup is None or wakeup > now:
                self._lock.wait(None if wakeup is None else wakeup - now)

    def callers_wait(self) -> bool:
        """Whether rows wait that a batch of the lowest level might stand aside for."""
        with self._lock:
            batchers = [lane.batcher for lane in self._lanes.values()]
            return any(len(batcher) and batcher.levels()[0] != LOWEST for batcher in batchers)

    def stage(self, *, callers_only: bool = False) -> Staged | None:
        """The batch that is due, ready to run; None when none is due, or none of its jobs may run any more.

        With `callers_only`: the one that should go first while one of the lowest level runs.
        """
        with self._lock:
            due = self._scheduler.due(time.monotonic(), callers_only=callers_only)
            if due is None:
                return None
            lane, batch = self._lanes[id(due[0])], due[1]
            taken = [row.payload for row in batch.rows]
            lane.taken(taken)
        now = time.monotonic()
        fresh = self._started_now(lane, taken, now)
        rows = [row for row in taken if lane.runs(row.job)]
        if not rows:
            self.ended(lane, batch, 0.0)
            return None
        encoded = [row.encoded for row in rows]
        with self._watch.step("collate", lane):
            collated = lane.executor.collate(encoded)
        longest = max(row.tokens for row in encoded)
        return Staged(lane, tuple(rows), tuple(fresh), collated, longest, batch, now)

    def ended(self, lane: Lane, batch: Batch[RowRef], seconds: float) -> None:
        """A batch that was due has taken so many seconds; 0 when none of it was run."""
        with self._lock:
            self._scheduler.ended(lane.batcher, batch, seconds)

    def looked_over(self, staged: Staged) -> Staged | None:
        """The batch as it may run now: one that was staged for long loses the jobs that nobody wants any more."""
        if time.monotonic() - staged.since < LOOK_AGAIN_S:
            return staged
        lane, now_wall = staged.lane, time.time()
        endings = [ending for job in staged.fresh if (ending := lane.not_to_run(job, now_wall)) is not None]
        if not endings:
            return staged
        lane.drop([ending.job for ending in endings])
        self._settling.put_at_once(Endings(lane, endings))
        rows = tuple(row for row in staged.rows if lane.runs(row.job))
        if not rows:
            self.ended(lane, staged.batch, 0.0)
            return None
        return replace(staged, rows=rows, collated=None, longest=max(row.encoded.tokens for row in rows))

    def _started_now(self, lane: Lane, rows: Sequence[RowRef], now: float) -> list[Job]:
        """Start those of the rows' jobs that are new, still ours, not ended, not cancelled and not expired."""
        now_wall = time.time()
        running: list[Job] = []
        claim = lane.claim(rows, now_wall)
        endings = claim.endings
        if claim.fresh:
            running, revoked = self._start(lane, claim.fresh)
            for job in running:
                job.started, job.started_at = now, now_wall
            self._started(running)
            lane.drop(revoked)
            endings += [lane.revoked(job) for job in revoked]
        if endings:
            self._settling.put_at_once(Endings(lane, endings))
        if claim.twins:
            lane.let_wait(claim.twins)
        return running

    def _start(self, lane: Lane, jobs: Sequence[Job]) -> tuple[list[Job], list[Job]]:
        """The broker's last look: the jobs that run, and those that were revoked; neither for what is not ours now."""
        starts = [Start(job.lease.tag, job.id, job.message.recorded, job.lease.attempt) for job in jobs]
        try:
            answers = persist(
                lambda: self._broker.start(lane.queue, starts),
                self.stopping,
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
