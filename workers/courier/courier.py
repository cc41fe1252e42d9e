"""The courier: one thread with an event loop that makes the calls, and three that keep its leases and wake it.

It holds a delivery from its lease to its note (`broker.deliveries`), and what it holds is renewed; so a courier that
dies loses none: another makes the call again under the same `webhook-id`. Nothing that is to be done later is kept
here: retries, and what is put off, wait in the broker.

Threads: `courier` leases, calls and notes; `courier waiter` blocks on the queue; `courier keeper` takes back what other
couriers lost and brings what is due; `courier renewer` renews. They meet in the loop's wake-up, and in the snapshot of
what is held.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from broker import Broker, BrokerUnavailable, Lease
from broker.deliveries import Deliveries
from broker.keys import PRIORITY_STEPS
from broker.message import WEBHOOKS
from broker.sync import MAX_MOVED
from configs.webhooks import WebhookSettings
from telemetry.metrics import CourierMetrics
from workers.backoff import Backoff
from workers.courier.calling import Caller
from workers.courier.carrying import TOGETHER, Carrier
from workers.duty import Duty, perform_until
from workers.forgotten import Forgotten
from workers.threads import Grace, core_thread

log = logging.getLogger(__name__)

#: Longest sleep on an empty queue, seconds. Messages that other couriers give back wake nobody, so it looks.
IDLE_LOOK_S = 1.0
#: Least time between two leases that empty the queue, seconds.
BREATH_S = 0.01
#: How long the waiter blocks on the queue, and so holds up a stop at most, seconds.
WAIT_S = 0.5
#: Seconds between looks for expired leases of other couriers, and for what is due.
SWEEP_EVERY_S = 1.0
DUE_EVERY_S = 0.1
#: A courier that is lost costs an attempt of all it held, and a delivery must not be lost for that.
NO_LIMIT = 1_000_000_000


class Courier:
    """Delivers until it is stopped. `broker` and `deliveries` are its own; `broker` buries nothing."""

    def __init__(
        self,
        broker: Broker,
        deliveries: Deliveries,
        settings: WebhookSettings,
        metrics: CourierMetrics,
        *,
        public_url: str,
    ) -> None:
        assert broker.max_attempts >= NO_LIMIT
        self._broker = broker
        self._deliveries = deliveries
        self._settings = settings
        self._metrics = metrics
        self._carrier = Carrier(broker, deliveries, settings, metrics, public_url=public_url, giving_up=self._is_over)
        #: Of each lease that is in hand: the task that delivers it.
        self._held: dict[bytes, asyncio.Task[None]] = {}
        #: Whether a lease waits for a place.
        self._full = False
        self._forgotten = Forgotten()
        self._loop = asyncio.new_event_loop()
        self._wake = asyncio.Event()
        self._empty = threading.Event()
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._grace = Grace()
        self._renewal = Duty("renew webhooks' leases", broker.lease_s / 3, self._renew)
        self._duties = (
            Duty("look for lost couriers", SWEEP_EVERY_S, self._reclaim),
            Duty("bring webhooks that are due", DUE_EVERY_S, self._bring_due),
            # Longer than an answer may be on its way, so that what is unknown at two looks is not about to come in.
            Duty("look for forgotten webhooks", 2 * broker.read_timeout_s, self._release_forgotten),
        )
        self._thread = core_thread("courier", self._run, in_background=True)
        self._helpers = (
            core_thread("courier renewer", self._keep_renewing),
            core_thread("courier keeper", self._keep),
            core_thread("courier waiter", self._wait),
        )

    def start(self) -> None:
        for thread in (self._thread, *self._helpers):
            thread.start()

    def stop(self, grace_s: float) -> None:
        """Take no more, let calls end, give the rest back; within `grace_s`."""
        self._grace.begin(grace_s)
        self._stopping.set()
        self._rouse()
        # Notes that the broker does not take end soon after the grace.
        self._thread.join(grace_s + self._broker.read_timeout_s)
        self._ended.set()
        for thread in self._helpers:
            thread.join(self._broker.read_timeout_s)
        self._broker.close()
        self._deliveries.close()

    def hurry(self) -> None:
        """Called from a signal handler: no time is left for stopping in order."""
        self._grace.cut()

    # The event loop.

    def _run(self) -> None:
        # Look-ups of names; one may hang for longer than its delivery has a place.
        self._loop.set_default_executor(ThreadPoolExecutor(self._settings.max_in_flight, "courier lookup"))
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._deliver())
        finally:
            self._loop.close()
            self._carrier.close()

    async def _deliver(self) -> None:
        async with Caller(self._settings.policy, self._settings.timeout_s) as caller:
            backoff = Backoff()
            while not self._stopping.is_set():
                self._wake.clear()
                try:
                    if not await self._lease(caller):
                        # What comes in a stream is taken together; what comes alone, at once.
                        await asyncio.sleep(BREATH_S)
                        await self._sleep(IDLE_LOOK_S)
                    backoff.reset()
                except BrokerUnavailable as error:
                    log.warning("The broker is away; webhooks wait for it.", extra={"cause": str(error)})
                    await self._sleep(backoff.pause_s())
            await self._finish()

    async def _lease(self, caller: Caller) -> bool:
        """Take some, begin what has a place, and put the rest off; False when nothing more can be taken now."""
        self._full = self._carrier.is_full
        if self._full:
            return False
        # More than there may be room for: behind one owner's flood, others are found that have places left.
        rooms = [TOGETHER] + [0] * (len(PRIORITY_STEPS) - 1)
        leased = await self._carrier.ask(lambda: self._broker.lease(WEBHOOKS, rooms, together=True))
        admitted, postponed = self._carrier.admit(leased.leases)
        for lease in admitted:
            task = self._held[lease.tag] = asyncio.create_task(self._carrier.carry(caller, lease))
            task.add_done_callback(partial(self._left, lease))
        await self._carrier.put_off(postponed)
        self._metrics.set_in_flight(len(self._held))
        if not leased.waiting[0]:
            self._empty.set()
            return False
        return True

    def _left(self, lease: Lease, _: asyncio.Task[None]) -> None:
        self._carrier.left(lease)
        del self._held[lease.tag]
        self._metrics.set_in_flight(len(self._held))
        if self._full:
            self._wake.set()

    async def _finish(self) -> None:
        """Let calls end within the grace; give back the rest, those that did not end too: they are made again."""
        idle = [tag for tag in self._held if tag not in self._carrier.calling]
        await self._give_back(idle)
        while self._held and self._grace.left_s() > 0:
            await asyncio.wait(list(self._held.values()), timeout=0.05)
        await self._give_back(list(self._held))

    async def _give_back(self, tags: Sequence[bytes]) -> None:
        tasks = [self._held[tag] for tag in tags]
        for task in tasks:
            task.cancel()
        if not tasks:
            return
        await asyncio.wait(tasks)
        try:
            await self._carrier.ask(lambda: self._broker.release(WEBHOOKS, sorted(tags, key=int)))
        except BrokerUnavailable as error:
            log.warning("Webhooks could not be given back; their leases run out.", extra={"cause": str(error)})

    async def _sleep(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    def _is_over(self) -> bool:
        return self._stopping.is_set() and not self._grace.left_s()

    # The other threads.

    def _rouse(self) -> None:
        """Wake the loop, if it still runs."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._wake.set)

    def _keep_renewing(self) -> None:
        while not self._ended.wait(self._renewal.due_in()):
            self._renewal.perform_when_due()

    def _keep(self) -> None:
        perform_until(self._stopping, self._duties)

    def _wait(self) -> None:
        """Wake the loop when something is pushed to a queue that was empty."""
        backoff = Backoff()
        while not self._stopping.is_set():
            if not self._empty.wait(WAIT_S):
                continue
            try:
                if self._broker.wait(WEBHOOKS, PRIORITY_STEPS[0], WAIT_S):
                    self._empty.clear()
                    self._rouse()
                backoff.reset()
            except BrokerUnavailable:
                # The loop reports it; it also looks by itself.
                backoff.wait(self._stopping)

    def _renew(self) -> None:
        [renewed] = self._broker.renew([WEBHOOKS])
        if not renewed and self._held:
            log.warning("Webhooks' leases had run out before they were renewed; they may be called twice.")

    def _reclaim(self) -> bool:
        reclaimed = self._broker.reclaim(WEBHOOKS)
        assert not reclaimed.exhausted
        if reclaimed.returned:
            log.warning("Took back webhooks whose courier was lost.", extra={"count": reclaimed.returned})
            self._rouse()
        return reclaimed.returned >= MAX_MOVED

    def _bring_due(self) -> bool:
        moved = self._broker.due(WEBHOOKS)
        if moved:
            self._rouse()
        return moved >= MAX_MOVED

    def _release_forgotten(self) -> None:
        """Give back what the server holds for this courier though it knew of it neither now nor at the last look."""
        known = set(self._held)
        unknown = set(self._broker.held_tags(WEBHOOKS)) - known
        forgotten = self._forgotten.among(unknown)
        if count := self._broker.release(WEBHOOKS, sorted(forgotten, key=int)):
            log.warning("Gave back webhooks whose lease was lost on the way.", extra={"count": count})
            self._rouse()
