"""One queue inside a worker: what it holds of it, and the rows that wait for the device.

Every lease that the worker took is in `held` until it was settled, released or put aside; what is in `held` is renewed.
The lane is where the worker's threads meet: the feeder adds jobs, the device claims them, the keeper drops those whose
time is over, the settler's answers take them out. Its invariant: a job is either claimed by the device or dropped.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from batching import LEVELS, Batcher, Limits, Row
from broker import BadMessage, Broker, BrokerUnavailable, FollowUp, JobStatus, Lease, TrafficRow
from broker.dead import DeadLetter
from broker.keys import PRIORITY_STEPS
from broker.message import Message, decode
from inference import Encoded
from workers.executor import Executor
from workers.forgotten import Forgotten
from workers.jobs import Burial, Ending, Job, Served, buried, dropped
from workers.traffic import TrafficSample


@dataclass(slots=True, eq=False)
class RowRef:
    """One row of a job, encoded."""

    job: Job
    index: int
    encoded: Encoded


@dataclass(frozen=True, slots=True)
class LaneKind:
    """What a lane serves: the task of its queue's messages, by which model, and how long one step of it may take."""

    queue: str
    task: str
    served: Served
    limits: Limits
    step_timeout_s: float
    #: Failed jobs go to the dead letters too: nobody waits for their results.
    buries_failures: bool = False
    #: What comes is noted on the broker, for `sheaf tune`.
    notes_traffic: bool = True


@dataclass(frozen=True, slots=True)
class HeldJob:
    """A job that a worker holds: it runs once the device has claimed it."""

    queue: str
    job: Job


@dataclass(frozen=True, slots=True)
class Claim:
    """What became of jobs whose rows the device took."""

    #: They begin now.
    fresh: list[Job] = field(default_factory=list)
    #: Of those that were revoked or have expired.
    endings: list[Ending] = field(default_factory=list)
    #: The same call, sent twice: its id is running already.
    twins: list[Job] = field(default_factory=list)


class Lane:
    """Owns a queue's batcher and leases. `lock` guards both; `is_revoked` is Celery's memory of `revoke`."""

    def __init__(
        self,
        kind: LaneKind,
        executor: Executor,
        broker: Broker,
        lock: threading.Condition,
        is_revoked: Callable[[str], bool],
    ) -> None:
        self.kind = kind
        self.queue = kind.queue
        self.served = kind.served
        self.executor = executor
        #: None for a message that has not been read yet, or cannot be.
        self.held: dict[bytes, Job | None] = {}
        self.batcher: Batcher[RowRef] = Batcher(kind.limits)
        self.traffic: TrafficSample[Row[RowRef]] = TrafficSample()
        #: Share of its batches, lately, that ended when they were expected to; the device loop keeps it.
        self.foreseen = 0.0
        #: Set when there may be something for the feeder to do: rows have left, a list holds messages.
        self.feed = threading.Event()
        #: Set when leases have ended.
        self.fewer = threading.Event()
        #: By priority. A job counts no more than a quarter of a batch: others' must be leased beside a long one.
        self._ahead = [0] * LEVELS
        self._most_of_one = max(1, kind.limits.max_batch_size // 4)
        #: Rows of one job that are in the batcher at once: it looks at all of them for each batch.
        self._window = 2 * kind.limits.max_batch_size
        self._broker = broker
        self._lock = lock
        self._is_revoked = is_revoked
        #: What the server held for this worker at the last look, and nobody here knew of.
        self._forgotten = Forgotten()
        #: Ids of the jobs that the device has claimed and that are not settled yet.
        self._claimed_ids: set[str] = set()

    def hold(self, leases: Iterable[Lease]) -> None:
        """These messages are ours from now on."""
        with self._lock:
            self.held.update((lease.tag, None) for lease in leases)

    def add(self, jobs: Sequence[Job], rows: Sequence[Row[RowRef]], now: float) -> None:
        """Jobs that were read, and their rows that wait for the device."""
        with self._lock:
            for job in jobs:
                self.held[job.lease.tag] = job
                self._ahead[job.level] += min(job.rows_waiting, self._most_of_one)
            given: Counter[Job] = Counter()
            for row in rows:
                job = row.payload.job
                if job.many:
                    given[job] += 1
                    if given[job] > self._window:
                        job.rest.append(row)
                        continue
                self.batcher.add(row, now)
            self._lock.notify_all()

    def ahead(self, level: int) -> int:
        """Rows of this priority that wait for the device, for whoever leases more; of a long job not all count."""
        return self._ahead[level]

    def taken(self, rows: Sequence[RowRef]) -> None:
        """The device takes these rows. Called with the lanes' lock held."""
        for row in rows:
            job = row.job
            job.rows_waiting -= 1
            if job.rows_waiting < self._most_of_one:
                self._ahead[job.level] -= 1
            if job.rest:
                self.batcher.add(job.rest.popleft(), time.monotonic())
        self.feed.set()

    def drop(self, jobs: Iterable[Job]) -> None:
        """These jobs will not run, nor will what is left of them."""
        with self._lock:
            for job in jobs:
                job.dropped = True
            self._remove_rows(jobs)

    def _remove_rows(self, jobs: Iterable[Job]) -> None:
        """The rows of these jobs that wait leave the batcher. Called with the lanes' lock held."""
        gone = {job for job in jobs if job.rows_waiting}
        if not gone:
            return
        self.batcher.remove(lambda row: row.job in gone)
        for job in gone:
            self._ahead[job.level] -= min(job.rows_waiting, self._most_of_one)
            job.rows_waiting = 0
            job.rest.clear()
        self.feed.set()

    def note_traffic(self) -> None:
        """Tell the broker what came since the last time."""
        since_epoch_s = time.time() - time.monotonic()

        def noted(row: Row[RowRef], stands_for: int) -> TrafficRow:
            level = PRIORITY_STEPS.index(row.payload.job.lease.step)
            return TrafficRow(int((row.enqueued_at + since_epoch_s) * 1e3), row.tokens, level, stands_for)

        if rows := self.traffic.take(noted):
            self._broker.note_traffic(self.queue, rows)

    def claim(self, rows: Sequence[RowRef], now_wall: float) -> Claim:
        """For the device, before these rows run. Which of them may run then is told by `runs`."""
        claim = Claim()
        with self._lock:
            for job in dict.fromkeys(row.job for row in rows):
                if job.claimed or job.dropped or job.lease.tag not in self.held:
                    continue
                ending = self.not_to_run(job, now_wall)
                if ending is not None:
                    self.drop([job])
                    claim.endings.append(ending)
                elif job.id in self._claimed_ids:
                    claim.twins.append(job)
                else:
                    job.claimed = True
                    self._claimed_ids.add(job.id)
                    claim.fresh.append(job)
        return claim

    def runs(self, job: Job) -> bool:
        """Whether rows of this job may run now."""
        return job.started_at is not None and not job.dropped and job.lease.tag in self.held

    def drop_unstarted(self, now_wall: float) -> list[Ending]:
        """End the jobs that were revoked or have expired while they waited; their rows leave the batcher."""
        endings: list[Ending] = []
        with self._lock:
            for job in self._waiting():
                ending = self.not_to_run(job, now_wall)
                if ending is not None:
                    endings.append(ending)
            self.drop([ending.job for ending in endings])
        return endings

    def not_to_run(self, job: Job, now_wall: float) -> Ending | None:
        """The ending of a job that was revoked or has expired; None when it may run."""
        expires_at = job.message.expires_at
        if expires_at is not None and expires_at <= now_wall:
            return dropped(job, self.served, JobStatus.EXPIRED, "expired")
        if self._is_revoked(job.id):
            return self.revoked(job)
        return None

    def revoked(self, job: Job) -> Ending:
        """The ending of a job that somebody cancelled."""
        return dropped(job, self.served, JobStatus.CANCELLED, "revoked")

    def forget(self, tags: Iterable[bytes]) -> None:
        """These leases have ended."""
        with self._lock:
            jobs = [job for tag in tags if (job := self.held.pop(tag, None)) is not None]
            for job in jobs:
                if job.claimed:
                    self._claimed_ids.discard(job.id)
            self._remove_rows(jobs)
        self.fewer.set()

    def drop_lost(self) -> int:
        """Forget what another worker has taken over; returns how many jobs that were. Their results will be refused."""
        with self._lock:
            known = set(self.held)
        lost = known.difference(self._broker.held_tags(self.queue))
        self.forget(lost)
        return len(lost)

    def release_waiting(self) -> int:
        """Give back the jobs that have not begun, to the front of the queue; returns how many. Nothing runs after."""
        with self._lock:
            jobs = [job for job in self.held.values() if job is not None]
            tags = [job.lease.tag for job in jobs if not job.begun and not job.dropped]
            self.batcher.remove(lambda row: not row.job.begun)
        return self._release(tags)

    def release_all(self) -> int:
        """Give back everything that is held; what may still run of it will not be settled."""
        with self._lock:
            self.batcher.drain()
            tags = list(self.held)
        return self._release(tags)

    def let_wait(self, twins: Iterable[Job]) -> None:
        """Give back calls whose id runs already: once the other has ended, its result will be theirs too.

        What the broker cannot take now is found by `release_forgotten`.
        """
        tags = [job.lease.tag for job in twins]
        self.forget(tags)
        with suppress(BrokerUnavailable):
            self._broker.release(self.queue, sorted(tags, key=int))

    def release_unknown(self) -> int:
        """Give back what the server handed us in an answer that never arrived; returns how much."""
        return self._release(self._unknown_tags())

    def release_forgotten(self) -> int:
        """Give back what the server holds for this worker though it knew of it neither now nor at the last look.

        A lease may be carried out after its caller has given it up, and after `release_unknown`: by a network or a
        server that stood still. Renewed with all the rest, such messages would be held, and not run, for ever.
        """
        return self._release(self._forgotten.among(self._unknown_tags()))

    def _unknown_tags(self) -> set[bytes]:
        """What the server holds for this worker and this lane does not know of."""
        with self._lock:
            known = set(self.held)
        return set(self._broker.held_tags(self.queue)) - known

    def snapshot(self) -> list[HeldJob]:
        """The jobs that are held now, as far as they were read."""
        with self._lock:
            return [HeldJob(self.queue, job) for job in self.held.values() if job is not None and not job.dropped]

    def bury(self, lease: Lease, error: BadMessage, kind: str, message: Message | None = None) -> Burial:
        """The end of a message that cannot be run, or has failed for good, as its queue's dead letter."""
        letter = DeadLetter.encode(
            number=lease.tag.decode(),
            queue=self.queue,
            reason=error.reason,
            job_id=error.job_id,
            priority=lease.step,
            attempts=lease.attempt,
            buried_at=time.time(),
            message=lease.message,
        )
        dead_letter = FollowUp(self._broker.keys.queue(self.queue).dead, letter)
        return buried(lease, error, self.served, dead_letter, kind, message)

    def bury_exhausted(self, leases: Sequence[Lease]) -> list[Burial]:
        """Burials of messages that ran out of attempts; the broker holds them for this worker."""
        self.hold(leases)
        return [
            self._bury_unread(lease, f"its worker was lost {lease.attempt} times", "worker_lost") for lease in leases
        ]

    def bury_unread(self, leases: Iterable[Lease]) -> list[Burial]:
        """Burials of messages in whose reading the worker failed: they would only make it fail again."""
        reason = "the worker failed while it read this message; its log says why"
        return [self._bury_unread(lease, reason, "WorkerError") for lease in leases]

    def bury_jobs(self, jobs: Iterable[Job], reason: str) -> list[Burial]:
        """Burials of jobs that cannot be ended in any other way."""
        return [self.bury(job.lease, BadMessage(reason, job_id=job.id), "WorkerError", job.message) for job in jobs]

    def _bury_unread(self, lease: Lease, reason: str, kind: str) -> Burial:
        try:
            message = decode(lease.message)
        except BadMessage as unreadable:
            return self.bury(lease, BadMessage(reason, job_id=unreadable.job_id), kind)
        return self.bury(lease, BadMessage(reason, job_id=message.id), kind, message)

    def _release(self, tags: Iterable[bytes]) -> int:
        oldest_first = sorted(tags, key=int)
        released = self._broker.release(self.queue, oldest_first)
        self.forget(oldest_first)
        return released

    def _waiting(self) -> list[Job]:
        return [job for job in self.held.values() if job is not None and not job.claimed and not job.dropped]
