"""The queue's verbs for the API: submit, read and wait, on one event loop.

Submits that arrive together share one round trip, and each returns only after the server accepted its job; so do reads.
All waiters of a process share one pub/sub connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import orjson
import redis.asyncio

from broker import pidbox
from broker.connect import check_server_info, connect_async
from broker.deliveries import DeliveryReader
from broker.errors import JobEnded
from broker.faults import translated_async, tried_twice
from broker.jobs import JobState, JobStatus, ModelInfo, NewJob, Priority, QueueDepth, WorkerInfo
from broker.keys import PRIORITY_STEPS, PROBE_TTL_S, Keys
from broker.lua import script_text
from broker.message import WEBHOOKS
from broker.reading import Reader
from broker.results import RunFacts, encode_dropped, job_state
from broker.submitting import Submitter
from broker.waiting import ResultListener, Waiter
from broker.webhooks import told_of_drop

#: How long, and how many, jobs that were cancelled or revoked are remembered; as long as their messages may wait.
REVOKED_TTL_S = 7 * 86400
MAX_REVOKED = 50_000
#: After a job's deadline, before it is looked at: clocks of two machines never agree.
EXPIRY_MARGIN_S = 0.02


class AsyncBroker:
    """One API process' way to the queues. Made by `open`; needs no server until it is used."""

    def __init__(self, client: redis.asyncio.Redis, keys: Keys, *, max_queue_depth: int, result_ttl_s: int) -> None:
        self.keys = keys
        self._client = client
        self._result_ttl_s = result_ttl_s
        self._cancel = client.register_script(script_text("cancel"))
        self._reader = Reader(client, keys)
        self.deliveries = DeliveryReader(client, keys)
        self._submitter = Submitter(client, keys, max_queue_depth=max_queue_depth)
        db = client.connection_pool.connection_kwargs.get("db") or 0
        self._listener = ResultListener(client, keys, pidbox.channel(keys.prefix, db), self._revoke)

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        key_prefix: str = "",
        max_queue_depth: int = 100_000,
        result_ttl_s: int = 86_400,
        read_timeout_s: float = 10.0,
    ) -> Self:
        """`max_queue_depth` 0 means no limit."""
        client = connect_async(url, read_timeout_s)
        return cls(client, Keys(key_prefix), max_queue_depth=max_queue_depth, result_ttl_s=result_ttl_s)

    async def submit(self, job: NewJob) -> str:
        """Return the id under which the job is queued, after the server accepted it.

        That is the job's own id, or the first job's when its idempotency key was used before with the same payload.
        Raises `QueueFull`, `IdempotencyConflict`, or `BrokerUnavailable` (then the job may be queued all the same, if
        only the answer was lost).
        """
        return await self._submitter.submit(job)

    async def fetch(self, job_id: str) -> JobState | None:
        """The job's state now; None for an id that is unknown or whose result has passed its TTL."""
        now = time.time()
        state = job_state(job_id, *await self._reader.read(job_id))
        if state is None or state.status is not JobStatus.QUEUED or (state.expires_at or now) >= now:
            return state
        return await self._expire(state)

    def waiter(self, job_id: str) -> AbstractContextManager[Waiter]:
        """For `wait`: a waiter that was there before the job was submitted saves a look for its result."""
        return self._listener.waiter(job_id)

    async def wait(
        self, job_id: str, timeout_s: float, waiter: Waiter | None = None, expires_at: float | None = None
    ) -> JobState | None:
        """The job's state as soon as it has ended, or its state at the timeout; None for an unknown id.

        `expires_at` is when a job that was submitted after its `waiter` was made expires.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        if waiter is not None:
            return await self._wait(job_id, deadline, waiter, expires_at)
        state = await self.fetch(job_id)
        if state is None or state.ended or timeout_s <= 0:
            return state
        with self._listener.waiter(job_id) as waiter:
            # It may have ended before we listened.
            waiter.wake()
            return await self._wait(job_id, deadline, waiter, None)

    async def _wait(self, job_id: str, deadline: float, waiter: Waiter, expires_at: float | None) -> JobState | None:
        loop = asyncio.get_running_loop()
        while (left := deadline - loop.time()) > 0:
            if expires_at is not None:
                left = min(left, max(0.0, expires_at - time.time()) + EXPIRY_MARGIN_S)
            await waiter.wait(left)
            state = await self.fetch(job_id)
            if state is None or state.ended:
                return state
            # One that has begun does not expire any more.
            expires_at = state.expires_at if state.status is JobStatus.QUEUED else None
        return await self.fetch(job_id)

    async def cancel(self, job_id: str) -> JobState | None:
        """End a job that has not ended; its waiters are told at once, and it does not run if it has not begun.

        Returns its state, None for an unknown id. Raises `JobEnded` for a job that has ended: nothing is changed.
        """
        state = await self.fetch(job_id)
        if state is None:
            return None
        if not state.ended:
            dropped = await self._drop(job_id, JobStatus.CANCELLED, "cancelled", state)
            state = await self.fetch(job_id)
            if dropped:
                return state
        raise JobEnded(job_id, state.status if state else JobStatus.SUCCEEDED)

    def listen(self) -> None:
        """Hear of ended jobs and of Celery's `revoke` from now on, not only from the first wait on."""
        self._listener.start()

    async def _revoke(self, job_ids: Sequence[str]) -> None:
        """Celery's `revoke`, heard by this process: what a worker of Celery 5.7 does too, when there is none."""
        for job_id in job_ids:
            state = await self.fetch(job_id)
            if state is None or not state.ended:
                await self._drop(job_id, JobStatus.CANCELLED, "revoked", state)

    async def _expire(self, state: JobState) -> JobState:
        """Its time is over and nobody has begun it: it ends now, whether or not a worker is there to see it."""
        if await self._drop(state.id, JobStatus.EXPIRED, "expired", state):
            return await self.fetch(state.id) or state
        return state

    async def _drop(self, job_id: str, status: JobStatus, reason: str, state: JobState | None) -> bool:
        """Store that the job was dropped; False when it had ended before, or (an expiry) has begun."""
        facts = RunFacts(
            model=state.model if state else "",
            version=state.version if state else None,
            priority=int(state.priority if state else Priority.NORMAL),
            attempt=state.attempt if state else 0,
            many=bool(state and state.many),
            enqueued_at=state.created_at if state else None,
            started_at=state.started_at if state else None,
            finished_at=time.time(),
            timings=None,
        )
        keys = self.keys
        async with translated_async(self._client):
            dropped = await self._cancel(
                keys=[
                    *(keys.result(job_id), keys.record(job_id), keys.started(job_id), keys.revoked),
                    keys.queue(WEBHOOKS).waiting[0],
                ],
                args=[
                    encode_dropped(job_id, status, reason, facts),
                    self._result_ttl_s,
                    keys.ended,
                    int(status is JobStatus.EXPIRED),
                    job_id,
                    REVOKED_TTL_S,
                    MAX_REVOKED,
                    told_of_drop(state, status, facts.finished_at),
                ],
            )
        return bool(dropped)

    @property
    def waiters(self) -> int:
        """How many waits are open in this process."""
        return len(self._listener)

    async def queue_depths(self, queues: Sequence[str]) -> list[QueueDepth]:
        """Messages not yet leased, per queue and priority step; given-back and owners' ones count too."""
        levels = [str(level) for level, _ in enumerate(PRIORITY_STEPS, 1)]
        async with translated_async(self._client), self._client.pipeline(transaction=False) as pipe:
            for keys in map(self.keys.queue, queues):
                for key in (*keys.waiting, *keys.returned):
                    pipe.llen(key)
                pipe.hmget(keys.owned_depths, levels)
            answers = iter(await pipe.execute())
        depths: list[QueueDepth] = []
        for queue in queues:
            waiting, returned = ([next(answers) for _ in levels] for _ in range(2))
            owned = [int(count or 0) for count in next(answers)]
            of_levels = zip(PRIORITY_STEPS, waiting, returned, owned, strict=True)
            depths += [QueueDepth(queue, step, sum(counts)) for step, *counts in of_levels]
        return depths

    async def dead_letters(self, queues: Sequence[str]) -> dict[str, int]:
        """How many dead letters each queue has."""
        lengths = await self._lengths([self.keys.queue(queue).dead for queue in queues])
        return dict(zip(queues, lengths, strict=True))

    async def _lengths(self, keys: Sequence[str]) -> list[int]:
        async with translated_async(self._client), self._client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.llen(key)
            lengths: list[int] = await pipe.execute()
        return lengths

    async def workers(self) -> list[WorkerInfo]:
        """The workers that live now, as they announced themselves."""
        sessions = await self._read(lambda: self._client.zrange(self.keys.workers, 0, -1))
        if not sessions:
            return []
        announcements = await self._read(
            lambda: self._client.mget([self.keys.worker(session.decode()) for session in sessions])
        )
        return [_worker_info(orjson.loads(text)) for text in announcements if text is not None]

    async def probe(self) -> None:
        """Raises `BrokerUnavailable` when a submit would be refused now, `UnsupportedServer` for too old a server.

        It writes: a server that is full, read-only or loading answers questions as ever.
        """
        await self._read(lambda: self._client.set(self.keys.probe, b"", ex=PROBE_TTL_S))
        check_server_info(await self._read(lambda: self._client.info("server")))

    async def close(self) -> None:
        await self._listener.close()
        await self._client.aclose()

    async def _read(self, command: Callable[[], Any]) -> Any:
        """Run a command that may be run twice."""
        async with translated_async(self._client):
            return await tried_twice(command)


def _worker_info(announced: dict[str, Any]) -> WorkerInfo:
    models = tuple(ModelInfo(**model) for model in announced.pop("models"))
    return WorkerInfo(models=models, **announced)
