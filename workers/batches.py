"""Runs batches in the io worker: leases their messages, has `bulk.batches` run each, and settles it with its webhook.

What is held is renewed by a thread of its own, so a batch may take days; one whose io worker dies comes back with its
attempt counted, and goes on from its checkpoint. A batch that is stopped with its worker is given back, and goes on
where the next one leases it.

Threads: `batches` runs an event loop, in which all batches of the process run; `batches keeper` renews, takes back what
others lost, and brings what was put off.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from broker import (
    AsyncBroker,
    BadMessage,
    BatchEnded,
    BatchFault,
    BatchRecord,
    BatchStatus,
    BatchWishes,
    Broker,
    BrokerUnavailable,
    FollowUp,
    Lease,
    LeaseLost,
    Priority,
    Settlement,
    told_of_end,
)
from broker.keys import PRIORITY_STEPS
from broker.message import BATCHES, WEBHOOKS, Message, decode
from broker.results import Failure, RunFacts, encode_failure, encode_success
from broker.sync import MAX_MOVED
from bulk.batches import BatchRunner
from bulk.client import open_broker
from bulk.patience import patiently
from bulk.store import FileStore
from configs import Settings
from workers.duty import Duty, perform_until
from workers.events import TaskEvents, lost_before
from workers.forgotten import Forgotten
from workers.portions import Portions
from workers.threads import core_thread

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds between looks for batches to run.
LOOK_EVERY_S = 0.5
#: Seconds between looks for what others lost, and for what is due.
SWEEP_EVERY_S = 1.0
#: Batches that are looked at together, and seconds after which one that finds no place for its owner comes again.
LEASED_TOGETHER = 64
PUT_OFF_S = 2.0
#: Seconds between looks whether a paused batch is to go on.
PAUSED_LOOK_S = 2.0
#: After a fault of ours a batch is put off for so long, seconds.
FAULT_PAUSE_S = 60.0
#: A batch may outlast many restarts of its worker, so it takes more of them than a job does to blame it for them.
MAX_ATTEMPTS = 10
#: Threads for calls of the broker.
_BROKER_THREADS = 2


class BatchWorker:
    """Runs until it is stopped. `broker` is its own; `events` and `is_revoked` (of a task's id) are the process's."""

    def __init__(
        self, broker: Broker, settings: Settings, events: TaskEvents, is_revoked: Callable[[str], bool]
    ) -> None:
        self._broker = broker
        self._settings = settings
        self._events = events
        self._is_revoked = is_revoked
        self._webhooks = broker.keys.queue(WEBHOOKS).waiting[0]
        #: Of each lease that is in hand: the task that runs its batch.
        self._held: dict[bytes, asyncio.Task[None]] = {}
        #: Leases that have had all their attempts, to be ended.
        self._exhausted: list[Lease] = []
        self._forgotten = Forgotten()
        #: Places of batches that run, shared between owners.
        self._portions = Portions(settings.batches.max_running)
        self._threads = ThreadPoolExecutor(_BROKER_THREADS, "batches broker")
        self._loop = asyncio.new_event_loop()
        self._wake = asyncio.Event()
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._duties = (
            Duty("renew batches' leases", broker.lease_s / 3, self._renew),
            Duty("look for lost batches", SWEEP_EVERY_S, self._reclaim),
            Duty("bring batches that are due", SWEEP_EVERY_S, self._bring_due),
            # Longer than an answer may be on its way, so that what is unknown at two looks is not about to come in.
            Duty("look for forgotten batches", 2 * broker.read_timeout_s, self._release_forgotten),
        )
        self._thread = core_thread("batches", self._run, in_background=True)
        self._keeper = core_thread("batches keeper", self._keep)

    def start(self) -> None:
        self._thread.start()
        self._keeper.start()

    def stop(self, grace_s: float) -> None:
        """Save how far each batch is and give it back; within `grace_s`."""
        self._stopping.set()
        self._loop.call_soon_threadsafe(self._wake.set)
        self._thread.join(grace_s)
        self._ended.set()
        self._keeper.join(self._broker.read_timeout_s)
        self._broker.close()

    def hurry(self) -> None:
        """Nothing is waited for that could be cut short."""

    # The event loop.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()
            self._threads.shutdown(wait=False)

    async def _serve(self) -> None:
        async with open_broker(self._settings) as broker:
            runner = BatchRunner(broker, FileStore(self._settings.files.storage), self._settings)
            try:
                while not self._stopping.is_set():
                    self._wake.clear()
                    try:
                        await self._lease(broker, runner)
                    except BrokerUnavailable as error:
                        log.warning("The broker is away; batches wait for it.", extra={"cause": str(error)})
                    await self._sleep(LOOK_EVERY_S)
            finally:
                await self._finish()

    async def _lease(self, broker: AsyncBroker, runner: BatchRunner) -> None:
        while self._exhausted:
            lease = self._exhausted.pop()
            self._begin(lease, self._give_up(broker, lease), None)
        if not self._portions.free:
            return
        # More than there may be room for: behind one owner's, others' are found.
        rooms = [LEASED_TOGETHER] + [0] * (len(PRIORITY_STEPS) - 1)
        leased = await self._ask(lambda: self._broker.lease(BATCHES, rooms, together=True))
        later: list[tuple[bytes, float]] = []
        for lease in leased.leases:
            message = self._decoded(lease)
            owner = message.owner if isinstance(message, Message) else ""
            if self._portions.has_one_for(owner):
                self._portions.take(owner)
                self._begin(lease, self._carry(broker, runner, lease, message), owner)
            else:
                later.append((lease.tag, time.time() + PUT_OFF_S))
        if later:
            await self._ask(lambda: self._broker.schedule(BATCHES, later))

    def _begin(self, lease: Lease, carry: Coroutine[None, None, None], owner: str | None) -> None:
        """`owner` has a place for it; None for what needs none."""
        task = self._held[lease.tag] = asyncio.create_task(carry)
        task.add_done_callback(partial(self._left, lease, owner))

    def _left(self, lease: Lease, owner: str | None, _: asyncio.Task[None]) -> None:
        del self._held[lease.tag]
        if owner is not None:
            self._portions.give_back(owner)

    async def _finish(self) -> None:
        held = dict(self._held)
        if not held:
            return
        for task in held.values():
            task.cancel()
        await asyncio.wait(held.values())
        try:
            await self._ask(lambda: self._broker.release(BATCHES, sorted(held, key=int)))
        except BrokerUnavailable as error:
            log.warning("Batches could not be given back; their leases run out.", extra={"cause": str(error)})

    def _decoded(self, lease: Lease) -> Message | BadMessage:
        try:
            return decode(lease.message, self._broker.max_message_bytes)
        except BadMessage as error:
            return error

    async def _carry(
        self, broker: AsyncBroker, runner: BatchRunner, lease: Lease, message: Message | BadMessage
    ) -> None:
        """See one leased batch through. Raises nothing; what could not be ended comes again."""
        batch = await self._known(broker, lease, message)
        if batch is None:
            return
        assert isinstance(message, Message)
        try:
            if not batch.ended:
                if not batch.rests:
                    self._events.told(batch.id, *_begun(lease, message))
                batch = await runner.run(batch, partial(self._report, broker, lease))
            if batch.ended:
                await self._settle(lease, batch, message)
            else:
                await self._put_off(lease, PAUSED_LOOK_S)
        except LeaseLost:
            log.warning("The lease of a batch was lost; whoever has it goes on.", extra={"batch_id": batch.id})
        except Exception:
            log.exception("A batch failed by a fault of ours; it is put off.", extra={"batch_id": batch.id})
            if time.time() > batch.expires_at:
                await self._fail(broker, lease, batch, message, _FAULT)
            else:
                await self._put_off(lease, FAULT_PAUSE_S)

    async def _report(self, broker: AsyncBroker, lease: Lease, batch: BatchRecord) -> BatchWishes:
        """As `BatchRunner` wants it. Celery's `revoke` is a cancel."""
        if not batch.ended and self._is_revoked(batch.id):
            with suppress(BatchEnded):
                await broker.batches.cancel(batch.id)
        return await broker.batches.report(self._broker.session, lease.tag, batch)

    async def _give_up(self, broker: AsyncBroker, lease: Lease) -> None:
        """End a batch whose workers were lost each time."""
        message = self._decoded(lease)
        batch = await self._known(broker, lease, message)
        if batch is not None and isinstance(message, Message):
            log.error("A batch has had all its attempts.", extra={"batch_id": batch.id, "attempt": lease.attempt})
            await self._fail(broker, lease, batch, message, _LOST)

    async def _known(self, broker: AsyncBroker, lease: Lease, message: Message | BadMessage) -> BatchRecord | None:
        """The batch that a message means; one that means none is settled as failed."""
        if isinstance(message, BadMessage):
            job_id, reason = message.job_id, message.reason
        else:
            job_id, named = message.id, message.kwargs.get("batch_id")
            batch = await patiently(lambda: broker.batches.get(named)) if isinstance(named, str) else None
            if batch is not None:
                return batch
            reason = f"there is no batch {named!r:.80}: batches are made by POST /v1/batches"
        log.error("A message that means no batch was dropped.", extra={"job_id": job_id, "cause": reason})
        result = encode_failure(job_id or "", Failure("BadMessage", reason), _facts(lease, None, None))
        settlement = Settlement(lease.tag, job_id or "", result if job_id else None, recorded=False)
        await patiently(lambda: self._ask(lambda: self._broker.settle(BATCHES, [settlement])))
        return None

    async def _fail(
        self, broker: AsyncBroker, lease: Lease, batch: BatchRecord, message: Message, fault: BatchFault
    ) -> None:
        failed = replace(batch, errors=(fault,)).become(BatchStatus.FAILED)
        try:
            await patiently(lambda: broker.batches.report(self._broker.session, lease.tag, failed))
        except LeaseLost:
            return
        await self._settle(lease, failed, message)

    async def _settle(self, lease: Lease, batch: BatchRecord, message: Message) -> None:
        """Let the message go; with the end for Celery's clients, and what its webhook is told."""
        outcome = {
            "batch_id": batch.id,
            "status": batch.status.value,
            "output_file_id": batch.output_file_id,
            "error_file_id": batch.error_file_id,
        }
        facts = _facts(lease, batch, message)
        event: tuple[str, dict[str, object]]
        if batch.status is BatchStatus.FAILED:
            reason = batch.errors[0].message
            result = encode_failure(batch.id, Failure("BatchFailed", reason), facts)
            exception = f"BatchFailed({reason!r})"
            event = "task-failed", {"exception": exception, "traceback": exception}
        else:
            result = encode_success(batch.id, outcome, facts)
            runtime = time.time() - (batch.in_progress_at or batch.created_at)
            event = "task-succeeded", {"result": repr(outcome), "runtime": runtime}
        told = told_of_end(batch)
        follow_ups = () if told is None else (FollowUp(self._webhooks, told.encode()),)
        settlement = Settlement(
            lease.tag, batch.id, result, recorded=False, follow_ups=follow_ups, if_revoked=follow_ups
        )
        await patiently(lambda: self._ask(lambda: self._broker.settle(BATCHES, [settlement])))
        self._events.told(batch.id, event)

    async def _put_off(self, lease: Lease, seconds: float) -> None:
        due = [(lease.tag, time.time() + seconds)]
        await patiently(lambda: self._ask(lambda: self._broker.schedule(BATCHES, due)))

    async def _sleep(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    def _ask(self, call: Callable[[], T]) -> Awaitable[T]:
        """Run a call of the broker in a thread."""
        return self._loop.run_in_executor(self._threads, call)

    # The keeper's thread.

    def _keep(self) -> None:
        perform_until(self._ended, self._duties)

    def _renew(self) -> None:
        [renewed] = self._broker.renew([BATCHES])
        if not renewed and self._held:
            log.warning("Batches' leases had run out before they were renewed; others may go on with them.")

    def _reclaim(self) -> bool:
        if self._stopping.is_set():
            return False
        reclaimed = self._broker.reclaim(BATCHES)
        self._exhausted += reclaimed.exhausted
        if reclaimed.returned:
            log.warning("Took back batches whose worker was lost.", extra={"count": reclaimed.returned})
        return reclaimed.returned >= MAX_MOVED

    def _bring_due(self) -> bool:
        return self._broker.due(BATCHES) >= MAX_MOVED

    def _release_forgotten(self) -> None:
        """Give back what the server holds for this worker though it knew of it neither now nor at the last look."""
        known = {*self._held, *(lease.tag for lease in self._exhausted)}
        unknown = set(self._broker.held_tags(BATCHES)) - known
        forgotten = self._forgotten.among(unknown)
        if count := self._broker.release(BATCHES, sorted(forgotten, key=int)):
            log.warning("Gave back batches whose lease was lost on the way.", extra={"count": count})


_FAULT = BatchFault("server_error", "the service failed to run this batch; its log says why")
_LOST = BatchFault("worker_lost", f"the worker that ran this batch was lost {MAX_ATTEMPTS} times")


def _begun(lease: Lease, message: Message) -> list[tuple[str, dict[str, object]]]:
    """The task events of a batch that a worker begins or goes on with."""
    again: list[tuple[str, dict[str, object]]] = []
    if lease.attempt > 1:
        again.append(("task-retried", lost_before(lease.attempt)))
    received: dict[str, object] = {
        "name": BATCHES,
        "args": "()",
        "kwargs": repr(message.kwargs),
        "root_id": message.id,
        "parent_id": None,
        "retries": lease.attempt - 1,
        "eta": None,
        "expires": None,
    }
    return [*again, ("task-received", received), ("task-started", {})]


def _facts(lease: Lease, batch: BatchRecord | None, message: Message | None) -> RunFacts:
    return RunFacts(
        model=batch.model or "" if batch else "",
        version=None,
        priority=int(Priority.LOW),
        attempt=lease.attempt,
        many=False,
        enqueued_at=message.enqueued_at if message else None,
        started_at=batch.in_progress_at if batch else None,
        finished_at=time.time(),
        timings=None,
    )
