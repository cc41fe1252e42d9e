"""One model's queue inside a worker: what it holds, and the thread that leases, reads and encodes.

A lane keeps at most `prefetch_batches` batches of rows ahead of the device, so a slow device hoards no work. Every
lease that a lane took is in `held` until it was settled, released or put aside; what is in `held` is renewed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from batching import Batcher, Limits, Row, RowTooLong
from broker import BadMessage, Broker, BrokerUnavailable, FollowUp, JobStatus, Lease
from broker.dead import DeadLetter
from broker.keys import PRIORITY_STEPS
from broker.message import decode
from inference import Encoded, RowError
from workers.backoff import Backoff
from workers.executor import Executor
from workers.jobs import Burial, Ending, Job, Served, buried, dropped, finished, parse
from workers.threads import core_thread

log = logging.getLogger(__name__)

#: Longest the feeder sleeps on an empty queue, seconds. Messages given back by other workers wake nobody, so it looks.
IDLE_LOOK_S = 1.0
#: How long a waiter blocks on its list; longer than the feeder sleeps, so that no moment is left unwatched.
WAIT_S = 1.5 * IDLE_LOOK_S


@dataclass(slots=True, eq=False)
class RowRef:
    """One row of a job, encoded."""

    job: Job
    index: int
    encoded: Encoded


@dataclass(frozen=True, slots=True)
class LanePorts:
    """Where a lane hands on what it has made; each may be called from the lane's threads."""

    rows_ready: Callable[[], None]
    received: Callable[[Sequence[Job]], None]
    endings: Callable[[Lane, Sequence[Ending]], None]
    burials: Callable[[Lane, Sequence[Burial]], None]
    is_revoked: Callable[[str], bool]


class Lane:
    """Owns a queue's batcher and leases. `lock` guards `batcher` and `held`."""

    def __init__(
        self,
        queue: str,
        served: Served,
        executor: Executor,
        limits: Limits,
        prefetch_batches: int,
        broker: Broker,
        lock: threading.Condition,
        ports: LanePorts,
    ) -> None:
        self.queue = queue
        self.served = served
        self.executor = executor
        self.held: dict[bytes, Job | None] = {}
        #: When the device last took a batch of this lane; the device loop keeps it.
        self.served_at = float("-inf")
        self.batcher: Batcher[RowRef] = Batcher(limits)
        self._limits = limits
        self._depth_rows = prefetch_batches * limits.max_batch_size
        self._broker = broker
        self._lock = lock
        self._ports = ports
        self._stopping = threading.Event()
        self._work = threading.Event()
        self._room = threading.Event()
        self._fewer = threading.Event()
        self._in_hand: Sequence[Lease] = ()
        self._unknown: set[bytes] = set()
        self._waiters = [_Waiter(self, step) for step in PRIORITY_STEPS]
        self._feeder = core_thread(f"feeder {queue}", self._feed)

    def start(self) -> None:
        self._feeder.start()
        for waiter in self._waiters:
            waiter.thread.start()

    def stop_leasing(self, timeout_s: float) -> None:
        """Take no more; returns when the feeder has handed on what it had in its hands."""
        self._stopping.set()
        self._work.set()
        self._room.set()
        self._fewer.set()
        self._feeder.join(timeout_s)

    def release_unstarted(self) -> int:
        """Give back everything that is still held; only after the device and the settler have ended."""
        with self._lock:
            self.batcher.drain()
            tags = sorted(self.held, key=int)
            self.held.clear()
        return self._broker.release(self.queue, tags)

    def drop_lost(self) -> int:
        """Forget what another worker has taken over; returns how many jobs that were. Their results will be refused."""
        with self._lock:
            known = set(self.held)
        lost = known.difference(self._broker.held_tags(self.queue))
        self.forget(lost)
        return len(lost)

    def release_forgotten(self) -> None:
        """Give back what the server holds for this worker though it knew of it neither now nor at the last look.

        A lease may be carried out after its caller has given it up, and after `_release_unknown`: by a network or a
        server that stood still. Renewed with all the rest, such messages would be held, and not run, for ever.
        """
        unknown = set(self._unknown_tags())
        forgotten = unknown & self._unknown
        self._release_tags(sorted(forgotten, key=int))
        self._unknown = unknown - forgotten

    def look(self) -> None:
        """Something was given back to the queue, which wakes no waiter."""
        self._work.set()

    def batch_taken(self) -> None:
        """The device took a batch: there is room for more rows."""
        self._room.set()

    def forget(self, tags: Iterable[bytes]) -> None:
        """These leases have ended."""
        with self._lock:
            for tag in tags:
                self.held.pop(tag, None)
        self._fewer.set()

    def wait_for_list(self, step: int) -> None:
        """Runs in a waiter's thread: wake the feeder when this list holds something."""
        if self._broker.wait(self.queue, step, WAIT_S):
            self._work.set()

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def _feed(self) -> None:
        backoff = Backoff()
        answer_lost = False
        while not self.stopping:
            try:
                if answer_lost:
                    self._release_unknown()
                    answer_lost = False
                self._feed_once()
                backoff.reset()
            except BrokerUnavailable as error:
                answer_lost = True
                # What could not be put aside is given back with what an answer that was lost may have brought.
                self.forget([lease.tag for lease in self._unread()])
                log.warning("The broker is away; leasing goes on when it is back.", extra={"cause": str(error)})
                backoff.wait(self._stopping)
            except Exception:
                log.exception("The feeder failed; it goes on.", extra={"queue": self.queue})
                self._bury_in_hand()
                backoff.wait(self._stopping)

    def _feed_once(self) -> None:
        room = self._depth_rows - len(self.batcher)
        # Small change is not worth a round trip: lease by whole batches while the device has work.
        if room < min(self._limits.max_batch_size, self._depth_rows):
            self._room.clear()
            if self._depth_rows - len(self.batcher) < min(self._limits.max_batch_size, self._depth_rows):
                self._room.wait(IDLE_LOOK_S)
            return
        self._work.clear()
        leased = self._broker.lease(self.queue, room)
        if leased.leases and leased.leases[0].attempt > 1:
            self._take_alone(leased.leases[0])
        elif leased.leases:
            self._take_in(leased.leases)
        if not leased.waiting:
            for waiter in self._waiters:
                waiter.arm()
            self._work.wait(IDLE_LOOK_S)

    def _take_alone(self, lease: Lease) -> None:
        """Serve a message whose worker was lost with nothing else in hand: if it was the cause, it falls alone."""
        with self._lock:
            self.held[lease.tag] = None
        self._wait_until(lambda: self.held.keys() <= {lease.tag})
        if not self.stopping:
            self._take_in([lease])
            self._wait_until(lambda: lease.tag not in self.held)

    def _wait_until(self, done: Callable[[], bool]) -> None:
        """Wait for leases to end, or for the lane to stop."""
        while not self.stopping:
            self._fewer.clear()
            if done():
                return
            self._fewer.wait(IDLE_LOOK_S)

    def _unread(self) -> list[Lease]:
        """What was in hand when reading it failed."""
        with self._lock:
            return [lease for lease in self._in_hand if self.held.get(lease.tag, self) is None]

    def _bury_in_hand(self) -> None:
        """A fault of ours while reading these messages would only come again; they wait with the dead letters."""
        burials = []
        for lease in self._unread():
            reason = "the worker failed while it read this message; its log says why"
            burials.append(self._burial(lease, BadMessage(reason, job_id=_job_id(lease)), "WorkerError"))
        self._ports.burials(self, burials)

    def _take_in(self, leases: Sequence[Lease]) -> None:
        self._in_hand = leases
        self._read_in(leases)
        self._in_hand = ()

    def _read_in(self, leases: Sequence[Lease]) -> None:
        now, now_wall = time.monotonic(), time.time()
        with self._lock:
            for lease in leases:
                self.held[lease.tag] = None
        jobs: list[Job] = []
        endings: list[Ending] = []
        burials: list[Burial] = []
        delayed: list[tuple[bytes, float]] = []
        for lease in leases:
            try:
                message = decode(lease.message)
                age = max(0.0, now_wall - message.enqueued_at) if message.enqueued_at is not None else 0.0
                job = parse(lease, message, now - age)
            except BadMessage as error:
                burials.append(self._burial(lease, error, "BadMessage"))
                continue
            if message.eta is not None and message.eta > now_wall:
                delayed.append((lease.tag, message.eta))
            elif (ending := self.not_to_run(job, now_wall)) is not None:
                endings.append(ending)
            else:
                jobs.append(job)
        if delayed:
            self._broker.schedule(self.queue, delayed)
            self.forget([tag for tag, _ in delayed])
        if burials:
            self._ports.burials(self, burials)
        if jobs:
            self._ports.received(jobs)
            endings += self._encode(jobs)
        if endings:
            self._ports.endings(self, endings)

    def not_to_run(self, job: Job, now_wall: float) -> Ending | None:
        """The ending of a job that was cancelled or has expired; None when it may run."""
        expires_at = job.message.expires_at
        if expires_at is not None and expires_at <= now_wall:
            return dropped(job, self.served, JobStatus.EXPIRED, "expired")
        if self._ports.is_revoked(job.id):
            return dropped(job, self.served, JobStatus.CANCELLED, "revoked")
        return None

    def _encode(self, jobs: Sequence[Job]) -> list[Ending]:
        """Encode all rows of these jobs and queue them for the device; returns the jobs that ended already."""
        begin = time.monotonic()
        encoded = iter(self.executor.encode([row for job in jobs for row in job.inputs]))
        now = time.monotonic()
        rows: list[Row[RowRef]] = []
        ended: list[Ending] = []
        longest = self._limits.max_batch_tokens
        for job in jobs:
            job.encode_s = now - begin
            for index in range(len(job.inputs)):
                row = next(encoded)
                if isinstance(row, Encoded) and row.tokens > longest:
                    row = RowError("RowTooLong", str(RowTooLong(row.tokens, longest)))
                if isinstance(row, RowError):
                    job.outputs[index] = row
                    job.rows_left -= 1
                else:
                    job.tokens = max(job.tokens, row.tokens)
                    rows.append(Row(RowRef(job, index, row), row.tokens, job.queued))
            # The inputs are not needed any more, and may be large.
            job.inputs = []
            if job.rows_left == 0:
                ended.append(self.ending(job, time.time()))
        with self._lock:
            for job in jobs:
                self.held[job.lease.tag] = job
            for ready in rows:
                self.batcher.add(ready, now)
        self._ports.rows_ready()
        return ended

    def ending(self, job: Job, now: float) -> Ending:
        """The ending, at Unix time `now`, of a job whose rows all have an outcome."""
        return finished(job, self.served, now)

    def bury_exhausted(self, leases: Sequence[Lease]) -> None:
        """Settle messages that ran out of attempts; the broker holds them for this worker."""
        burials = []
        for lease in leases:
            error = BadMessage(f"its worker was lost {lease.attempt} times", job_id=_job_id(lease))
            burials.append(self._burial(lease, error, "worker_lost"))
        if burials:
            with self._lock:
                self.held.update((lease.tag, None) for lease in leases)
            self._ports.burials(self, burials)

    def burials_of(self, jobs: Iterable[Job], reason: str) -> list[Burial]:
        """For jobs that cannot be ended in any other way."""
        return [self._burial(job.lease, BadMessage(reason, job_id=job.id), "WorkerError") for job in jobs]

    def _burial(self, lease: Lease, error: BadMessage, kind: str) -> Burial:
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
        return buried(lease, error, self.served, dead_letter, kind)

    def _release_unknown(self) -> None:
        """Give back what the server handed us in an answer that never arrived."""
        self._release_tags(self._unknown_tags())

    def _unknown_tags(self) -> list[bytes]:
        """What the server holds for this worker and this lane does not know of, oldest first."""
        with self._lock:
            known = set(self.held)
        return [tag for tag in self._broker.held_tags(self.queue) if tag not in known]

    def _release_tags(self, tags: Sequence[bytes]) -> None:
        if tags:
            count = self._broker.release(self.queue, tags)
            log.warning("Gave back messages whose lease was lost on the way.", extra={"count": count})


def _job_id(lease: Lease) -> str | None:
    try:
        return decode(lease.message).id
    except BadMessage as unreadable:
        return unreadable.job_id


class _Waiter:
    """A thread that waits, when armed, for one of the queue's priority lists to hold a message."""

    def __init__(self, lane: Lane, step: int) -> None:
        self._lane = lane
        self._step = step
        self._armed = threading.Event()
        self.thread = core_thread(f"waiter {lane.queue} {step}", self._run)

    def arm(self) -> None:
        self._armed.set()

    def _run(self) -> None:
        backoff = Backoff()
        while not self._lane.stopping:
            if not self._armed.wait(IDLE_LOOK_S):
                continue
            self._armed.clear()
            try:
                self._lane.wait_for_list(self._step)
                backoff.reset()
            except BrokerUnavailable:
                # The feeder reports it; it also looks by itself while no waiter can.
                backoff.wait(threading.Event())
