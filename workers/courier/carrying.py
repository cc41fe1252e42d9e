"""Sees leased messages through: each is called and noted, put off, or dropped.

What many of them ask of the broker at the same time shares a round trip.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from broker import BadMessage, Broker, BrokerUnavailable, Lease, Settlement
from broker.deliveries import Deliveries, Delivery, DeliveryState, Loaded, Note, NoteAnswer, Postponed
from broker.message import WEBHOOKS
from broker.together import Together, fail
from broker.webhooks import Notification
from configs.webhooks import WebhookSettings
from telemetry.metrics import CourierMetrics
from webhooks import Refused, host_of, signature
from workers.backoff import Backoff
from workers.courier.calling import Caller
from workers.courier.hosts import Hosts
from workers.courier.pause import Pause, PutOff, Reason
from workers.courier.payload import payload
from workers.courier.places import Places
from workers.courier.schedule import Answer, after, gives_up_at

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Most messages of one round trip.
TOGETHER = 64
#: After a fault of ours a delivery is put off for so long, seconds.
FAULT_PAUSE_S = 60.0
#: Threads for calls of the broker.
BROKER_THREADS = 4


class Carrier:
    """Lives in the courier's event loop. `giving_up` says whether it has no time left to wait for the broker."""

    def __init__(
        self,
        broker: Broker,
        deliveries: Deliveries,
        settings: WebhookSettings,
        metrics: CourierMetrics,
        *,
        public_url: str,
        giving_up: Callable[[], bool],
    ) -> None:
        self._broker = broker
        self._deliveries = deliveries
        self._settings = settings
        self._metrics = metrics
        self._public_url = public_url
        self._giving_up = giving_up
        self._hosts = Hosts(settings.max_per_host, settings.breaker_failures, settings.breaker_open_s)
        self._places = Places(settings.max_in_flight)
        self._threads = ThreadPoolExecutor(BROKER_THREADS, "courier broker")
        self._load: Together[Notification, Loaded] = Together(TOGETHER, self._load_all)
        self._note: Together[Note, NoteAnswer] = Together(TOGETHER, self._note_all)
        self._postpone: Together[Postponed, None] = Together(TOGETHER, self._postpone_all)
        #: Leases whose webhooks are being called.
        self.calling: set[bytes] = set()

    @property
    def is_full(self) -> bool:
        """There is no place for one more lease."""
        return self._places.free <= 0

    def admit(self, leases: Sequence[Lease]) -> tuple[list[Lease], list[Postponed]]:
        """Those of these leases that have a place now and are to be carried; and what is to be put off."""
        admitted, postponed = [], []
        now = time.time()
        for lease in leases:
            try:
                told = Notification.decode(lease.message)
            except BadMessage:
                told = None
            pause = self._admit(lease, told, now)
            if pause is None:
                admitted.append(lease)
            else:
                postponed.append(_postponed(lease, told, pause, now))
        return admitted, postponed

    def _admit(self, lease: Lease, told: Notification | None, now: float) -> Pause | None:
        """For how long it is to be put off; None when it got a place, as what is none of ours does too."""
        # What is over time is carried, to its end.
        if told is not None and now < gives_up_at(told.began_at, self._settings.retry_schedule_s):
            pause = self._hosts.pause(host_of(told.url), told.owner)
            if pause is not None:
                return pause
        seconds = self._places.take(lease.tag, "" if told is None else told.owner)
        return None if seconds is None else Pause(seconds, Reason.OWNER_BUSY)

    async def put_off(self, postponed: Sequence[Postponed]) -> None:
        """Back to the broker, all together. Raises `BrokerUnavailable`."""
        if postponed:
            await self.ask(lambda: self._deliveries.put_off(self._broker.session, postponed))

    def left(self, lease: Lease) -> None:
        """This lease is carried no more, however that ended: its place is free."""
        self._places.leave(lease.tag)

    async def carry(self, caller: Caller, lease: Lease) -> None:
        """See one leased message through. Raises nothing; what could not be ended stays held for this session."""
        try:
            told = Notification.decode(lease.message)
            try:
                await self._attempt(caller, lease, told)
            except PutOff as put_off:
                await self._put_off(lease, told, put_off.pause)
            except BrokerUnavailable:
                raise
            except Exception:
                log.exception("A delivery failed by a fault of ours; it is put off.", extra=_fields(told))
                await self._put_off(lease, told, Pause(FAULT_PAUSE_S, Reason.FAULT))
        except BadMessage as error:
            log.error("A message that is none of ours was dropped.", extra={"queue": WEBHOOKS, "cause": str(error)})
            await self._drop(lease)
        except BrokerUnavailable as error:
            # What is held is found and given back once the broker is there again.
            log.warning("The broker is away; a delivery comes again.", extra={"cause": str(error)})
        finally:
            self._metrics.set_breakers_open(self._hosts.open)

    async def _attempt(self, caller: Caller, lease: Lease, told: Notification) -> None:
        try:
            async with self._hosts.turn(host_of(told.url), told.owner) as ended:
                loaded = await self._load.ask(told)
                delivery = self._to_send(told, loaded)
                if delivery is None:
                    await self._drop(lease)
                    return
                self.calling.add(lease.tag)
                answer = await self._send(caller, delivery, loaded)
                ended(answer)
            await self._write_down(lease, after(delivery, answer, self._settings.retry_schedule_s, time.time()))
        finally:
            self.calling.discard(lease.tag)

    def _to_send(self, told: Notification, loaded: Loaded) -> Delivery | None:
        """The delivery that this message means; None when it is over, or goes on in a later round."""
        known = loaded.delivery
        if known is None:
            return Delivery(told, DeliveryState.PENDING, payload(told, loaded.subject, self._public_url))
        if known.notification.round > told.round or known.state is not DeliveryState.PENDING:
            return None
        return known

    async def _send(self, caller: Caller, delivery: Delivery, loaded: Loaded) -> Answer:
        told, body = delivery.notification, delivery.payload.encode()
        now = time.time()
        secrets = loaded.secrets.in_use(now, self._settings.previous_secret_s)
        headers = {
            "webhook-id": told.id,
            "webhook-timestamp": str(int(now)),
            "webhook-signature": signature(secrets, told.id, int(now), body),
        }
        try:
            target = self._settings.policy.target(told.url)
        except Refused as error:
            answer = Answer(now, 0.0, None, f"the URL is refused: {error}")
        else:
            answer = await caller.call(target, headers, body)
        self._metrics.called(succeeded=answer.error is None, seconds=answer.duration_s)
        return answer

    async def _write_down(self, lease: Lease, delivery: Delivery) -> None:
        delivered = delivery.state is DeliveryState.DELIVERED
        keep_s = self._settings.keep_delivered_s if delivered else self._settings.keep_s
        noted = await self._note.ask(Note(lease.tag, delivery, keep_s))
        attempt = delivery.attempts[-1]
        extra = _fields(delivery.notification) | {
            "state": delivery.state.value,
            "attempt": delivery.tries,
            "status": attempt.status,
            "error": attempt.error,
            "duration_ms": attempt.duration_ms,
            "next_attempt_at": delivery.next_attempt_at,
        }
        failed = delivery.state is DeliveryState.FAILED
        log.log(logging.WARNING if failed else logging.INFO, "A webhook was called.", extra=extra)
        # What a receiver answers may repeat the job's content: that is for the delivery alone.
        if attempt.status is None and attempt.detail is not None:
            log.debug("A webhook did not answer.", extra=_fields(delivery.notification) | {"detail": attempt.detail})
        if noted is NoteAnswer.LOST:
            log.warning("The lease of a delivery was lost; it is made again.", extra=_fields(delivery.notification))
        elif delivery.state is not DeliveryState.PENDING:
            self._metrics.ended(delivery.state.value)

    async def _put_off(self, lease: Lease, told: Notification, pause: Pause) -> None:
        """Back to the broker, with no attempt counted; one that was put off for too long has failed."""
        now = time.time()
        if now < gives_up_at(told.began_at, self._settings.retry_schedule_s):
            await self._postpone.ask(_postponed(lease, told, pause, now))
            return
        [loaded] = await self.ask(lambda: self._deliveries.load([told]))
        delivery = self._to_send(told, loaded)
        if delivery is None:
            await self._drop(lease)
            return
        answer = Answer(now, 0.0, None, "not called any more: its host failed all the time")
        await self._write_down(lease, after(delivery, answer, (), now))

    async def _drop(self, lease: Lease) -> None:
        settlement = Settlement(lease.tag, "", None, recorded=False)
        await self.ask(lambda: self._broker.settle(WEBHOOKS, [settlement]))

    async def _load_all(self, asked: Sequence[tuple[Notification, asyncio.Future[Loaded]]]) -> None:
        await self._persist(asked, lambda: self._deliveries.load([told for told, _ in asked]))

    async def _note_all(self, asked: Sequence[tuple[Note, asyncio.Future[NoteAnswer]]]) -> None:
        await self._persist(asked, lambda: self._deliveries.note(self._broker.session, [note for note, _ in asked]))

    async def _postpone_all(self, asked: Sequence[tuple[Postponed, asyncio.Future[None]]]) -> None:
        def postpone() -> list[None]:
            self._deliveries.put_off(self._broker.session, [postponed for postponed, _ in asked])
            return [None] * len(asked)

        await self._persist(asked, postpone)

    async def _persist(
        self, asked: Sequence[tuple[object, asyncio.Future[T]]], carry_out: Callable[[], Sequence[T]]
    ) -> None:
        """Answer those who asked, however long the broker is away."""
        backoff = Backoff()
        while True:
            try:
                answers = await self.ask(carry_out)
                break
            except BrokerUnavailable as error:
                if self._giving_up():
                    fail(asked, error)
                    return
                log.warning("The broker is away; webhooks wait for it.", extra={"cause": str(error)})
                await asyncio.sleep(backoff.pause_s())
            except Exception as error:
                fail(asked, error)
                return
        for (_, future), answer in zip(asked, answers, strict=True):
            if not future.done():
                future.set_result(answer)

    def ask(self, call: Callable[[], T]) -> Awaitable[T]:
        """Run a call of the broker in a thread."""
        return asyncio.get_running_loop().run_in_executor(self._threads, call)

    def close(self) -> None:
        self._threads.shutdown(wait=False)


def _postponed(lease: Lease, told: Notification | None, pause: Pause, now: float) -> Postponed:
    return Postponed(lease.tag, None if told is None else told.id, now + pause.seconds, pause.reason)


def _fields(told: Notification) -> dict[str, object]:
    """For log lines. Of the URL only the host: the rest may hold a secret."""
    return {
        "delivery": told.id,
        "event": told.event.value,
        "job_id": told.job_id,
        "request_id": told.request_id,
        "host": host_of(told.url),
    }
