"""The log of deliveries: how each event's way to its webhook went, what was sent, and when it is tried next.

A record begins with its first attempt. The courier alone writes it, by the verb `note`; people who want a delivery sent
again begin another round of it, and what the courier knows of an earlier one is void from then on. That a delivery was
put off, by the verb `put_off`, is kept beside the record, for as long as it may be of interest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum, StrEnum
from typing import Any, Self, cast

import orjson
import redis
import redis.asyncio

from broker.batches import BatchRecord
from broker.connect import connect
from broker.faults import translated, translated_async, tried_twice
from broker.jobs import EVENTS, BatchEvent, Event, JobEvent, JobState
from broker.keys import Keys
from broker.lua import script_text
from broker.message import WEBHOOKS
from broker.results import job_state
from broker.webhook_secrets import Secrets, WebhookSecrets
from broker.webhooks import Notification, delivery_id

#: Deliveries that can be listed, the newest.
MAX_LISTED = 10_000
#: Seconds for which that list is kept without a new one.
LISTING_TTL_S = 30 * 86_400
#: Deliveries that one command reads.
AT_A_TIME = 200
#: Bytes of a result that is not read together with others.
LARGE = 262_144
#: Seconds for which it is kept that a delivery was put off once its pause is over: it is then called, or put off anew.
PUT_OFF_TTL_S = 60


class DeliveryState(StrEnum):
    PENDING = "pending"
    DELIVERED = "delivered"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One call. `status` is None where there was no answer; `error` says why it is no success, in our words."""

    at: float
    duration_ms: float
    status: int | None
    error: str | None
    #: What the receiver or the system said of it. For operators: whoever submits may call what they cannot read.
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class PutOff:
    """That a delivery which was due is not made before this time, Unix seconds, and why, in words."""

    until: float
    reason: str


@dataclass(frozen=True, slots=True)
class Delivery:
    """One event's way to one webhook. Times are Unix seconds."""

    notification: Notification
    state: DeliveryState
    #: What is sent, byte for byte the same each time; "" while that was not made.
    payload: str
    attempts: tuple[Attempt, ...] = ()
    #: How many of the attempts were made in this round.
    tries: int = 0
    next_attempt_at: float | None = None
    #: What readers are told beside the record; None when it was not put off since that was written.
    put_off: PutOff | None = None

    @property
    def id(self) -> str:
        return self.notification.id

    def encode(self) -> bytes:
        return orjson.dumps({name: getattr(self, name) for name in RECORDED})

    @classmethod
    def decode(cls, raw: bytes) -> Self:
        record: dict[str, Any] = orjson.loads(raw)
        told = record["notification"]
        known = {
            "notification": Notification(**(told | {"event": EVENTS[told["event"]]})),
            "state": DeliveryState(record["state"]),
            "attempts": tuple(Attempt(**attempt) for attempt in record["attempts"]),
        }
        return cls(**(record | known))

    def seen(self, put_off: PutOff | None) -> Delivery:
        """As readers see it. What was put off before its last attempt tells nothing any more."""
        over = self.state is not DeliveryState.PENDING
        if put_off is None or over or put_off.until <= (self.next_attempt_at or 0.0):
            return self
        return replace(self, next_attempt_at=put_off.until, put_off=put_off)


#: The fields of a delivery that its record holds.
RECORDED = tuple(field.name for field in fields(Delivery) if field.name != "put_off")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What an attempt needs. The job or batch, as it is kept, is read for a delivery without a payload only."""

    delivery: Delivery | None
    subject: JobState | BatchRecord | None
    secrets: Secrets


@dataclass(frozen=True, slots=True)
class Note:
    """How a leased message's delivery stands now. `keep_s` is how long that is kept."""

    tag: bytes
    delivery: Delivery
    keep_s: int


@dataclass(frozen=True, slots=True)
class Postponed:
    """A leased message that comes again at a time, Unix seconds. `delivery_id` is None where it is none of ours."""

    tag: bytes
    delivery_id: str | None
    until: float
    reason: str


class NoteAnswer(IntEnum):
    LOST = 0
    NOTED = 1
    #: Another round has begun meanwhile.
    SUPERSEDED = 2


class Deliveries:
    """The log for the courier and for people; for threads. Raises `BrokerUnavailable`."""

    def __init__(
        self, url: str, *, new_secret: Callable[[], str], key_prefix: str = "", read_timeout_s: float = 10.0
    ) -> None:
        self._keys = Keys(key_prefix)
        self._queue = self._keys.queue(WEBHOOKS)
        self._client = connect(url, read_timeout_s)
        self._note = self._client.register_script(script_text("note"))
        self._put_off = self._client.register_script(script_text("put_off"))
        self.secrets = WebhookSecrets(self._client, self._keys, new_secret)

    def load(self, told: Sequence[Notification]) -> list[Loaded]:
        """What is known of these, and the secrets that sign them."""
        deliveries = self._read([notification.id for notification in told])
        unknown = [place for place, delivery in enumerate(deliveries) if delivery is None or not delivery.payload]
        jobs = [place for place in unknown if isinstance(told[place].event, JobEvent)]
        batches = [place for place in unknown if isinstance(told[place].event, BatchEvent)]
        subjects: dict[int, JobState | BatchRecord | None] = {
            **dict(zip(jobs, self._jobs([told[place].job_id for place in jobs]), strict=True)),
            **dict(zip(batches, self._batches([told[place].job_id for place in batches]), strict=True)),
        }
        secrets = self.secrets.of([notification.owner for notification in told])
        return [
            Loaded(delivery, subjects.get(place), secret)
            for place, (delivery, secret) in enumerate(zip(deliveries, secrets, strict=True))
        ]

    def note(self, session: str, notes: Sequence[Note]) -> list[NoteAnswer]:
        """Write down how the deliveries stand whose messages `session` holds.

        Each message goes, or waits until its delivery's next attempt.
        """
        args: list[bytes | str | int] = [MAX_LISTED, LISTING_TTL_S]
        for note in notes:
            delivery, told = note.delivery, note.delivery.notification
            due = delivery.next_attempt_at
            args += (note.tag, delivery.id, self._keys.delivery(delivery.id), told.round, delivery.encode())
            args += (note.keep_s, int(told.at * 1000), "" if due is None else int(due * 1000))
        queue = self._queue
        keys = [queue.held(session), queue.delayed, queue.delayed_messages, self._keys.deliveries]
        with translated(self._client):
            return [NoteAnswer(answer) for answer in self._note(keys=keys, args=args)]

    def put_off(self, session: str, postponed: Sequence[Postponed]) -> int:
        """Put messages aside that `session` holds, without an attempt. Returns how many it held."""
        # Bytes: the client takes longest for everything else, and floods are put off.
        args = [b"%d" % (PUT_OFF_TTL_S * 1000)]
        for one in postponed:
            key = "" if one.delivery_id is None else self._keys.put_off(one.delivery_id)
            args += (one.tag, b"%d" % (one.until * 1000), key.encode(), one.reason.encode())
        queue = self._queue
        keys = [queue.held(session), queue.delayed, queue.delayed_messages]
        with translated(self._client):
            return int(self._put_off(keys=keys, args=args))

    def get(self, delivery_id: str) -> Delivery | None:
        """None for one of which nothing is known, or that waits for its first attempt and was not put off."""
        return self._seen([delivery_id])[0] or self._put_off_untried(delivery_id)

    def newest(self, limit: int) -> list[Delivery]:
        """At most `limit` deliveries, those of the newest events first."""
        with translated(self._client):
            ids = cast("list[bytes]", self._client.zrevrange(self._keys.deliveries, 0, limit - 1))
        parts = [ids[first : first + AT_A_TIME] for first in range(0, len(ids), AT_A_TIME)]
        return [one for part in parts for one in self._seen([name.decode() for name in part]) if one is not None]

    def resend(self, delivery_id: str, keep_s: int) -> Delivery | None:
        """Begin another round of a delivery, whatever became of the earlier ones; None for an unknown id."""
        name = self._keys.delivery(delivery_id)
        begun: list[Delivery] = []

        def begin(pipe: redis.client.Pipeline) -> None:
            begun.clear()
            found = cast("bytes | None", pipe.hget(name, "record"))
            pipe.multi()
            if found is None:
                return
            delivery = _next_round(Delivery.decode(found))
            told = delivery.notification
            begun.append(delivery)
            pipe.hset(name, mapping={"round": told.round, "record": delivery.encode()})
            pipe.expire(name, keep_s)
            pipe.delete(self._keys.put_off(delivery_id))
            pipe.lpush(self._queue.waiting[0], told.encode())

        with translated(self._client):
            # It comes again when the courier has noted an attempt meanwhile.
            self._client.transaction(begin, name)
        return begun[0] if begun else None

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, ids: Sequence[str]) -> list[Delivery | None]:
        with translated(self._client), self._client.pipeline(transaction=False) as pipe:
            for name in ids:
                pipe.hget(self._keys.delivery(name), "record")
            return [None if found is None else Delivery.decode(found) for found in pipe.execute()]

    def _seen(self, ids: Sequence[str]) -> list[Delivery | None]:
        """As readers see them."""
        with translated(self._client), self._client.pipeline(transaction=False) as pipe:
            for name in ids:
                pipe.hget(self._keys.delivery(name), "record")
                pipe.get(self._keys.put_off(name))
            found: list[bytes | None] = pipe.execute()
        pairs = zip(found[::2], found[1::2], strict=True)
        return [
            None if record is None else Delivery.decode(record).seen(_decoded(put_off)) for record, put_off in pairs
        ]

    def _put_off_untried(self, delivery_id: str) -> Delivery | None:
        """A delivery without a record, of the message that was put off."""
        with translated(self._client):
            known = cast("bytes | None", self._client.get(self._keys.put_off(delivery_id)))
            if known is None:
                return None
            tag = known.split(b":", 2)[1]
            entry = cast("bytes | None", self._client.hget(self._queue.delayed_messages, tag.decode()))
        if entry is None:
            return None
        told = Notification.decode(entry.split(b":", 2)[2])
        return Delivery(told, DeliveryState.PENDING, "").seen(_decoded(known))

    def _jobs(self, ids: Sequence[str]) -> list[JobState | None]:
        if not ids:
            return []
        with translated(self._client), self._client.pipeline(transaction=False) as pipe:
            for job_id in ids:
                pipe.strlen(self._keys.result(job_id))
            sizes: list[int] = pipe.execute()
        large = [job_id for job_id, size in zip(ids, sizes, strict=True) if size > LARGE]
        # One at a time: a few hundred megabytes of results would otherwise be here at once, for a word on each.
        parts = [[job_id for job_id in ids if job_id not in large], *([job_id] for job_id in large)]
        states = {job_id: state for part in parts for job_id, state in self._states(part)}
        return [states[job_id] for job_id in ids]

    def _batches(self, ids: Sequence[str]) -> list[BatchRecord | None]:
        if not ids:
            return []
        with translated(self._client), self._client.pipeline(transaction=False) as pipe:
            for batch_id in ids:
                pipe.hget(self._keys.batch(batch_id), "record")
            return [None if found is None else BatchRecord.decode(found) for found in pipe.execute()]

    def _states(self, ids: Sequence[str]) -> list[tuple[str, JobState | None]]:
        if not ids:
            return []
        keys = self._keys
        names = [key(job_id) for job_id in ids for key in (keys.record, keys.started, keys.result)]
        with translated(self._client):
            found = cast("list[bytes | None]", self._client.mget(names))
        return [(job_id, job_state(job_id, *found[3 * place : 3 * place + 3])) for place, job_id in enumerate(ids)]


class DeliveryReader:
    """The log for one event loop."""

    def __init__(self, client: redis.asyncio.Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    async def of(self, job_id: str, events: Iterable[Event], to_come: Notification | None = None) -> list[Delivery]:
        """The deliveries of these events of a job or batch that have begun; where none has, the one of `to_come`, which
        waits for its first attempt. Raises `BrokerUnavailable`.
        """
        names = [delivery_id(job_id, event) for event in events]

        async def read() -> list[bytes | None]:
            async with self._client.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.hget(self._keys.delivery(name), "record")
                    pipe.get(self._keys.put_off(name))
                found: list[bytes | None] = await pipe.execute()
            return found

        async with translated_async(self._client):
            found = await tried_twice(read)
        put_off = dict(zip(names, found[1::2], strict=True))
        begun = [Delivery.decode(record) for record in found[::2] if record is not None]
        if not begun and to_come is not None:
            begun = [Delivery(to_come, DeliveryState.PENDING, "")]
        return [delivery.seen(_decoded(put_off[delivery.id])) for delivery in begun]


def _decoded(raw: bytes | None) -> PutOff | None:
    if raw is None:
        return None
    until_ms, _, reason = raw.decode().split(":", 2)
    return PutOff(int(until_ms) / 1e3, reason)


def _next_round(delivery: Delivery) -> Delivery:
    told = replace(delivery.notification, round=delivery.notification.round + 1, asked_at=time.time())
    return replace(delivery, notification=told, state=DeliveryState.PENDING, tries=0, next_attempt_at=None)
