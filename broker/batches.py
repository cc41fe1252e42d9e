"""Batches of requests from a file: what is known of each, and the queue that has them run.

Whoever holds the lease of a batch's message writes its record (`report`, fenced by that lease). What people want of
it, that it be cancelled or pause, they write beside the record; the holder learns of it from the answer to a report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Self, cast

import orjson
import redis.asyncio

from broker.errors import BatchEnded, IdempotencyConflict, LeaseLost, TooManyBatches, UnknownBatch
from broker.faults import translated_async, tried_twice
from broker.jobs import BatchEvent, Webhook
from broker.keys import Keys
from broker.lua import script_text
from broker.message import BATCHES, encode_batch
from broker.webhooks import Notification

#: How long a batch is known after it was last written, seconds.
RECORD_TTL_S = 30 * 86_400
#: Batches that can be listed, of one owner and of all together, the newest.
MOST_LISTED = 10_000


class BatchStatus(StrEnum):
    """As OpenAI's API has them."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


ENDS = frozenset({BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED, BatchStatus.CANCELLED})


@dataclass(frozen=True, slots=True)
class BatchFault:
    """Why a batch cannot be run. `line` counts from 1; None where it is no line's fault."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class BatchWishes:
    """What people want of a batch."""

    #: Since when it is to be cancelled, Unix seconds; None when it is not.
    cancelling_at: float | None = None
    paused: bool = False

    @classmethod
    def of(cls, cancelling_at: bytes | None, paused: bytes | None) -> Self:
        return cls(None if cancelling_at is None else float(cancelling_at), paused is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """One batch at one moment. Times are Unix seconds."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: float
    expires_at: float
    metadata: dict[str, str] = field(default_factory=dict)
    request_id: str | None = None
    #: How long its output files are kept; None for as long as files are.
    output_ttl_s: int | None = None
    webhook: Webhook | None = None
    status: BatchStatus = BatchStatus.VALIDATING
    #: Whether people want it to pause, and whether a worker is at it all the same: it may not have heard of it yet.
    paused: bool = False
    held: bool = False
    #: Known once its lines were checked.
    model: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: tuple[BatchFault, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: float | None = None
    finalizing_at: float | None = None
    completed_at: float | None = None
    failed_at: float | None = None
    expired_at: float | None = None
    cancelling_at: float | None = None
    cancelled_at: float | None = None

    @property
    def ended(self) -> bool:
        return self.status in ENDS

    @property
    def rests(self) -> bool:
        """Whether it is paused, and nothing of it is under way."""
        return self.paused and not self.held and not self.ended

    @property
    def shown(self) -> BatchStatus:
        """The status as readers see it."""
        return self.status if self.ended or self.cancelling_at is None else BatchStatus.CANCELLING

    def become(self, status: BatchStatus) -> Self:
        """With this status from now on."""
        return replace(self, status=status, **{f"{status}_at": time.time()})  # type: ignore[arg-type]

    def wished(self, wishes: BatchWishes) -> Self:
        """With what is wanted of it now."""
        cancelling_at = self.cancelling_at if wishes.cancelling_at is None else wishes.cancelling_at
        return replace(self, cancelling_at=cancelling_at, paused=wishes.paused)

    def encode(self) -> bytes:
        return orjson.dumps(self)

    @classmethod
    def decode(cls, record: bytes, wishes: BatchWishes | None = None) -> Self:
        fields: dict[str, Any] = orjson.loads(record)
        found = cls(
            **fields
            | {
                "status": BatchStatus(fields["status"]),
                "errors": tuple(BatchFault(**fault) for fault in fields["errors"]),
                "webhook": Webhook.of_json(fields["webhook"]),
            }
        )
        return found.wished(wishes or BatchWishes())


class Batches:
    """The batches for one event loop. Every method raises `BrokerUnavailable`."""

    def __init__(self, client: redis.asyncio.Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self._queue = keys.queue(BATCHES)
        self._submit = client.register_script(script_text("submit_batch"))
        self._report = client.register_script(script_text("report_batch"))

    async def submit(
        self, batch: BatchRecord, *, max_open: int, fingerprint: str, idempotency_key: str = ""
    ) -> BatchRecord:
        """Have a new batch run; the earlier one for an id that is there with the same fingerprint.

        Raises:
            IdempotencyConflict: the id stands for another request.
            TooManyBatches: so many of its owner have not ended.
        """
        keys, owner = self._keys, batch.owner
        async with translated_async(self._client):
            answer: bytes = await tried_twice(
                lambda: self._submit(
                    keys=[
                        *(keys.batch(batch.id), keys.batches(owner), keys.open_batches(owner), keys.all_batches),
                        self._queue.waiting[0],
                    ],
                    args=[
                        *(batch.id, batch.encode(), fingerprint, int(batch.created_at * 1000)),
                        *(RECORD_TTL_S, max_open, MOST_LISTED),
                        encode_batch(batch.id, batch.created_at, batch.request_id, owner),
                    ],
                )
            )
        match answer:
            case b"other":
                raise IdempotencyConflict(idempotency_key, batch.id)
            case b"full":
                raise TooManyBatches(max_open)
            case b"new":
                return batch
        return BatchRecord.decode(answer)

    async def get(self, batch_id: str) -> BatchRecord | None:
        """None for an id that is unknown, or whose batch is not kept any more."""
        return (await self._read([batch_id]))[0]

    async def listed(self, owner: str, after: str | None, limit: int) -> list[BatchRecord]:
        """An owner's batches, the newest first; those behind the one with the id `after`.

        Raises `UnknownBatch` when `after` is none of them.
        """
        return await self._listed(self._keys.batches(owner), after, limit)

    async def reading(self, file_id: str, owners: Iterable[str]) -> list[BatchRecord]:
        """The batches of these owners that have not ended and have this file as their input."""

        async def read() -> list[set[bytes]]:
            async with self._client.pipeline(transaction=False) as pipe:
                for owner in set(owners):
                    pipe.smembers(self._keys.open_batches(owner))
                found: list[set[bytes]] = await pipe.execute()
            return found

        async with translated_async(self._client):
            ids = set().union(*await tried_twice(read))
        found = await self._read([name.decode() for name in ids])
        return [batch for batch in found if batch is not None and not batch.ended and batch.input_file_id == file_id]

    async def newest(self, limit: int) -> list[BatchRecord]:
        """Everybody's batches, the newest first."""
        return await self._listed(self._keys.all_batches, None, limit)

    async def _listed(self, listing: str, after: str | None, limit: int) -> list[BatchRecord]:

        async def read() -> list[bytes]:
            begin = 0
            if after is not None:
                rank = cast("int | None", await self._client.zrevrank(listing, after))
                if rank is None:
                    raise UnknownBatch(after)
                begin = rank + 1
            return cast("list[bytes]", await self._client.zrevrange(listing, begin, begin + limit - 1))

        async with translated_async(self._client):
            ids = await tried_twice(read)
        return [batch for batch in await self._read([name.decode() for name in ids]) if batch is not None]

    async def cancel(self, batch_id: str) -> BatchRecord | None:
        """Have it cancelled, if it has not ended; None for an unknown id. Raises `BatchEnded`."""
        at = str(time.time())
        return await self._want(batch_id, lambda pipe, name: pipe.hsetnx(name, "cancelling_at", at))

    async def pause(self, batch_id: str) -> BatchRecord | None:
        """Have it pause, until `resume`; None for an unknown id. Raises `BatchEnded`."""
        return await self._want(batch_id, lambda pipe, name: pipe.hset(name, "paused", "1"))

    async def resume(self, batch_id: str) -> BatchRecord | None:
        """Have it go on; None for an unknown id. Raises `BatchEnded`."""
        return await self._want(batch_id, lambda pipe, name: pipe.hdel(name, "paused"))

    async def _want(
        self, batch_id: str, write: Callable[[redis.asyncio.client.Pipeline, str], object]
    ) -> BatchRecord | None:
        """Write a wish down, if the batch has not ended, and return the batch with it."""
        found = await self.get(batch_id)
        if found is None:
            return None
        if found.ended:
            raise BatchEnded(batch_id, found.status)
        name = self._keys.batch(batch_id)

        async def wish() -> None:
            async with self._client.pipeline(transaction=True) as pipe:
                write(pipe, name)
                # A server that has just lost the batch must not keep the wish for ever.
                pipe.expire(name, RECORD_TTL_S)
                await pipe.execute()

        async with translated_async(self._client):
            await tried_twice(wish)
        return await self.get(batch_id)

    async def report(self, session: str, tag: bytes, batch: BatchRecord) -> BatchWishes:
        """Write down how far a batch is whose message `session` holds; returns what is wanted of it.

        Raises:
            LeaseLost: somebody else has it now, and nothing was written.
        """
        keys = self._keys
        async with translated_async(self._client):
            answer: bytes | list[bytes | None] = await tried_twice(
                lambda: self._report(
                    keys=[self._queue.held(session), keys.batch(batch.id), keys.open_batches(batch.owner)],
                    args=[tag, batch.encode(), RECORD_TTL_S, batch.id if batch.ended else ""],
                )
            )
        if isinstance(answer, bytes):
            raise LeaseLost(batch.id)
        return BatchWishes.of(*answer)

    async def _read(self, ids: Sequence[str]) -> list[BatchRecord | None]:
        async def read() -> list[list[bytes | None]]:
            async with self._client.pipeline(transaction=False) as pipe:
                for batch_id in ids:
                    pipe.hmget(self._keys.batch(batch_id), ["record", "cancelling_at", "paused"])
                found: list[list[bytes | None]] = await pipe.execute()
            return found

        async with translated_async(self._client):
            found = await tried_twice(read)
        return [
            None if record is None else BatchRecord.decode(record, BatchWishes.of(*wishes)) for record, *wishes in found
        ]


def told_of_end(batch: BatchRecord) -> Notification | None:
    """What is to be told of a batch that has ended; None where nobody asked for it."""
    event, webhook = BatchEvent(f"batch.{batch.status}"), batch.webhook
    if webhook is None or event not in webhook.events:
        return None
    at = getattr(batch, f"{batch.status}_at")
    return Notification(event, batch.id, batch.model or "", webhook.url, webhook.owner, batch.request_id, at)
