"""The threads that bring a lane its jobs: one leases, reads and encodes; four wait for the queue's lists.

A feeder keeps at most `prefetch_batches` batches of rows of each priority ahead of the device: a slow device hoards no
work, a full backlog of low priority does not keep high ones out, and the batcher has rows to choose from.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from batching import LEVELS, Row, RowTooLong
from broker import BadMessage, Broker, BrokerUnavailable, Lease
from broker.keys import PRIORITY_STEPS
from broker.message import decode
from inference import Encoded, RowError
from workers.backoff import Backoff
from workers.jobs import Burial, Ending, Job, finished, parse
from workers.lane import Lane, RowRef
from workers.threads import Grace, core_thread
from workers.watch import StepWatch

log = logging.getLogger(__name__)

#: Longest the feeder sleeps on an empty queue, seconds. Messages given back by other workers wake nobody, so it looks.
IDLE_LOOK_S = 1.0
#: How long a waiter blocks on its list; longer than the feeder sleeps, so that no moment is left unwatched.
WAIT_S = 1.5 * IDLE_LOOK_S

assert len(PRIORITY_STEPS) == LEVELS


@dataclass(frozen=True, slots=True)
class FeederPorts:
    """Where a feeder hands on what it has made of messages; each may be called from its thread."""

    received: Callable[[Sequence[Job]], None]
    endings: Callable[[Lane, Sequence[Ending]], None]
    burials: Callable[[Lane, Sequence[Burial]], None]


class Feeder:
    """Serves one lane."""

    def __init__(self, lane: Lane, prefetch_batches: int, broker: Broker, ports: FeederPorts, watch: StepWatch) -> None:
        self.lane = lane
        self._limits = lane.kind.limits
        self._depth_rows = prefetch_batches * self._limits.max_batch_size
        self._broker = broker
        self._ports = ports
        self._watch = watch
        self._stopping = threading.Event()
        self._in_hand: Sequence[Lease] = ()
        #: Of each priority: whether its lists may hold messages.
        self._may_hold = [True] * len(PRIORITY_STEPS)
        #: When to look at all lists whatever is known of them; what other workers give back wakes nobody.
        self._look_at = 0.0
        #: Rows of a message, lately: leases are counted in messages. None while that is to be found out.
        self._rows_per_message: float | None = None
        self._waiters = [_Waiter(self, level) for level in range(len(PRIORITY_STEPS))]
        self._thread = core_thread(f"feeder {lane.queue}", self._run)

    def start(self) -> None:
        self._thread.start()
        for waiter in self._waiters:
            waiter.thread.start()

    def stop(self, grace: Grace) -> None:
        """Take no more; returns when the feeder has handed on what it had in its hands."""
        self._stopping.set()
        self.lane.feed.set()
        self.lane.fewer.set()
        grace.join(self._thread)

    def look(self) -> None:
        """Something was given back to the queue, which wakes no waiter."""
        self._look_at = 0.0
        self.lane.feed.set()

    def wait_for_list(self, level: int) -> bool:
        """Runs in a waiter's thread: wake the feeder when this priority's list holds something; False after a while."""
        if not self._broker.wait(self.lane.queue, PRIORITY_STEPS[level], WAIT_S):
            return False
        self._may_hold[level] = True
        self.lane.feed.set()
        return True

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def _run(self) -> None:
        backoff = Backoff()
        answer_lost = False
        while not self.stopping:
            try:
                if answer_lost:
                    if count := self.lane.release_unknown():
                        log.warning("Gave back messages whose lease was lost on the way.", extra={"count": count})
                    answer_lost = False
                self._feed_once()
                backoff.reset()
            except BrokerUnavailable as error:
                answer_lost = True
                # What could not be put aside is given back with what an answer that was lost may have brought.
                self.lane.forget([lease.tag for lease in self._unread()])
                log.warning("The broker is away; leasing goes on when it is back.", extra={"cause": str(error)})
                backoff.wait(self._stopping)
            except Exception:
                log.exception("The feeder failed; it goes on.", extra={"queue": self.lane.queue})
                self._ports.burials(self.lane, self.lane.bury_unread(self._unread()))
                backoff.wait(self._stopping)

    def _feed_once(self) -> None:
        self.lane.feed.clear()
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + IDLE_LOOK_S
            self._may_hold = [True] * len(PRIORITY_STEPS)
        rooms = [room if may_hold else 0 for room, may_hold in zip(self._rooms(), self._may_hold, strict=True)]
        if not any(rooms):
            self.lane.feed.wait(self._look_at - now)
            return
        leased = self._broker.lease(self.lane.queue, rooms)
        self._note_waiting(rooms, leased.waiting)
        if leased.leases and leased.leases[0].attempt > 1:
            self._take_alone(leased.leases[0])
        elif leased.leases:
            self._take_in(leased.leases)

    def _rooms(self) -> list[int]:
        """How many messages of each priority may be leased now; none where there is room for less than a batch.

        Small change is not worth a round trip while the device has work.
        """
        rows_per_message = self._rows_per_message or self._limits.max_batch_size
        rooms = [self._depth_rows - self.lane.ahead(level) for level in range(len(PRIORITY_STEPS))]
        return [math.ceil(room / rows_per_message) if room >= self._limits.max_batch_size else 0 for room in rooms]

    def _note_waiting(self, rooms: Sequence[int], waiting: Sequence[int]) -> None:
        """A list that is empty now is watched until it holds something."""
        for level, waiter in enumerate(self._waiters):
            if rooms[level] and not waiting[level]:
                self._may_hold[level] = False
                waiter.arm()

    def _take_alone(self, lease: Lease) -> None:
        """Serve a message whose worker was lost with nothing else in hand: if it was the cause, it falls alone."""
        held = self.lane.held
        self.lane.hold([lease])
        self._wait_until(lambda: held.keys() <= {lease.tag})
        if not self.stopping:
            self._take_in([lease])
            self._wait_until(lambda: lease.tag not in held)

    def _wait_until(self, done: Callable[[], bool]) -> None:
        """Wait for leases to end, or for the feeder to stop."""
        fewer = self.lane.fewer
        while not self.stopping:
            fewer.clear()
            if done():
                return
            fewer.wait(IDLE_LOOK_S)

    def _unread(self) -> list[Lease]:
        """What was in hand when reading it failed."""
        held = self.lane.held
        return [lease for lease in self._in_hand if held.get(lease.tag, self) is None]

    def _take_in(self, leases: Sequence[Lease]) -> None:
        self._in_hand = leases
        self.lane.hold(leases)
        self._read_in(leases)
        self._in_hand = ()

    def _read_in(self, leases: Sequence[Lease]) -> None:
        now, now_wall = time.monotonic(), time.time()
        jobs: list[Job] = []
        endings: list[Ending] = []
        burials: list[Burial] = []
        delayed: list[tuple[bytes, float]] = []
        for lease in leases:
            job = self._read(lease, now, now_wall)
            if isinstance(job, Burial):
                burials.append(job)
            elif job.message.eta is not None and job.message.eta > now_wall:
                delayed.append((lease.tag, job.message.eta))
            elif (ending := self.lane.not_to_run(job, now_wall)) is not None:
                endings.append(ending)
            else:
                jobs.append(job)
        if delayed:
            self._broker.schedule(self.lane.queue, delayed)
            self.lane.forget([tag for tag, _ in delayed])
        if burials:
            self._ports.burials(self.lane, burials)
        # Monitors learn a job's name from this event, so it comes for jobs that end at once too.
        self._ports.received([*jobs, *(ending.job for ending in endings)])
        if jobs:
            endings += self._encode(jobs)
        if endings:
            self._ports.endings(self.lane, endings)

    def _read(self, lease: Lease, now: float, now_wall: float) -> Job | Burial:
        message = None
        try:
            message = decode(lease.message, self._broker.max_message_bytes)
            age = max(0.0, now_wall - message.enqueued_at) if message.enqueued_at is not None else 0.0
            return parse(lease, message, self.lane.kind.task, now - age)
        except BadMessage as error:
            return self.lane.bury(lease, error, "BadMessage", message)
        except Exception:
            # A fault of ours; it takes no other message of this lease along.
            log.exception("A message could not be read.", extra={"queue": self.lane.queue})
            [burial] = self.lane.bury_unread([lease])
            return burial

    def _encode(self, jobs: Sequence[Job]) -> list[Ending]:
        """Encode all rows of these jobs and queue them for the device; returns the jobs that ended already."""
        begin = time.monotonic()
        with self._watch.step("encode", self.lane):
            encoded = iter(self.lane.executor.encode([row for job in jobs for row in job.inputs]))
        now, now_wall = time.monotonic(), time.time()
        rows: list[Row[RowRef]] = []
        ended: list[Ending] = []
        longest = self._limits.max_batch_tokens
        for job in jobs:
            job.encode_s = now - begin
            level, flow = job.level, job.flow
            expires_at = job.message.expires_at
            deadline = None if expires_at is None else now + expires_at - now_wall
            for index in range(len(job.inputs)):
                row = next(encoded)
                if isinstance(row, Encoded) and row.tokens > longest:
                    row = RowError("RowTooLong", str(RowTooLong(row.tokens, longest)))
                if isinstance(row, RowError):
                    job.outputs[index] = row
                    job.row_tokens.append(0)
                    job.rows_left -= 1
                else:
                    job.tokens = max(job.tokens, row.tokens)
                    job.row_tokens.append(row.tokens)
                    rows.append(Row(RowRef(job, index, row), row.tokens, job.queued, level, flow, deadline))
            job.rows_waiting = job.rows_left
            # The inputs are not needed any more, and may be large.
            job.inputs = []
            if job.rows_left == 0:
                job.claimed = job.begun = True
                ended.append(finished(job, self.lane.served, now_wall))
        rows_per_message = max(1.0, len(rows) / len(jobs))
        before = self._rows_per_message or rows_per_message
        self._rows_per_message = before + 0.2 * (rows_per_message - before)
        self.lane.add(jobs, rows, now)
        if self.lane.kind.notes_traffic:
            self.lane.traffic.add(rows)
        return ended


class _Waiter:
    """A thread that waits, once armed, until the list of one of the queue's priorities holds a message."""

    def __init__(self, feeder: Feeder, level: int) -> None:
        self._feeder = feeder
        self._level = level
        self._armed = threading.Event()
        self.thread = core_thread(f"waiter {feeder.lane.queue} {PRIORITY_STEPS[level]}", self._run)

    def arm(self) -> None:
        self._armed.set()

    def _run(self) -> None:
        backoff = Backoff()
        while not self._feeder.stopping:
            if not self._armed.wait(IDLE_LOOK_S):
                continue
            self._armed.clear()
            try:
                if not self._feeder.wait_for_list(self._level):
                    self._armed.set()
                backoff.reset()
            except BrokerUnavailable:
                # The feeder reports it; it also looks by itself while no waiter can.
                backoff.wait(threading.Event())
