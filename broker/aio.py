"""The queue's verbs for the API: submit, read and wait, on one event loop.

Submits that arrive together share one round trip, and each returns only after the server accepted its job; so do reads.
All waiters of a process share one pub/sub connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Self

import redis.asyncio

from broker import pidbox
from broker.access import AccessKeys
from broker.batches import Batches
from broker.bulk_runs import BulkRuns
from broker.connect import check_server_info, connect_async
from broker.deliveries import DeliveryReader
from broker.draining import DrainRates
from broker.errors import JobEnded
from broker.faults import translated_async, tried_twice
from broker.files import Files
from broker.jobs import (
    JobState,
    JobStatus,
    NewJob,
    Priority,
    Submitted,
)
from broker.keys import PROBE_TTL_S, Keys
from broker.lua import script_text
from broker.message import WEBHOOKS
from broker.overview import Overview
from broker.reading import Reader
from broker.results import RunFacts, encode_dropped, job_state
from broker.submitting import Submitter
from broker.waiting import ResultListener, Waiter
from broker.webhooks import told_of_drop

#: How long, and how many, jobs that were cancelled or revoked are remembered; as long as their messages may wait.
REVOKED_TTL_S = 7 * 86400
MAX_REVOKED = 50_000
#: How long whoever watches a job is told of its start, seconds.
WATCHED_S = 60
#: Jobs whose time is over that are looked at together.
MAX_DUE = 256
#: After a job's deadline, before it is looked at: clocks of two machines never agree.
EXPIRY_MARGIN_S = 0.02


class AsyncBroker:
    """One API process' way to the queues. Made by `open`; needs no server until it is used."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: Keys,
        *,
        max_queue_depth: int,
        result_ttl_s: int,
        queues: Sequence[str] = (),
    ) -> None:
        self.keys = keys
        self._client = client
        self._result_ttl_s = result_ttl_s
        self._cancel = client.register_script(script_text("cancel"))
        self._forget = client.register_script(script_text("forget"))
        self._reader = Reader(client, keys)
        self.overview = Overview(client, keys)
        drain_rates = DrainRates(queues, self.overview.leased)
        self._submitter = Submitter(client, keys, max_queue_depth=max_queue_depth, drain_rates=drain_rates)
        self.access = AccessKeys(client, keys)
        self._watching = asyncio.create_task(drain_rates.run()) if queues else None
        self.deliveries = DeliveryReader(client, keys)
        self.bulk_runs = BulkRuns(client, keys)
        self.batches = Batches(client, keys)
        self.files = Files(client, keys)
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
        queues: Sequence[str] = (),
    ) -> Self:
        """`max_queue_depth` 0 means no limit. How fast `queues` are drained is watched from now on."""
        client = connect_async(url, read_timeout_s)
        return cls(client, Keys(key_prefix), max_queue_depth=max_queue_depth, result_ttl_s=result_ttl_s, queues=queues)

    async def submit(self, job: NewJob) -> Submitted:
        """Return the job as the server holds it, after it was accepted.

        That is the submitted one, or the first one when it repeats that: by an idempotency key that was used before, or
        by an id of the caller's choice, with the same payload. Raises `QueueFull`, `TooFast`, `TooManyOpen`,
        `IdempotencyConflict`, `IdTaken`, or `BrokerUnavailable` (then the job may be queued all the same, if only the
        answer was lost).
        """
        return await self._submitter.submit(job)

    async def fetch(self, job_id: str) -> JobState | None:
        """The job's state now; None for an id that is unknown or whose result has passed its TTL."""
        now = time.time()
        state = job_state(job_id, *await self._reader.read(job_id))
        if state is None or state.status is not JobStatus.QUEUED or (state.expires_at or now) >= now:
            return state
        return await self._expire(state)

    async def expire_due(self) -> None:
        """End the jobs whose time is over before anybody has begun them; without it that is seen when they are read."""
        expiring = self.keys.expiring
        over: list[bytes] = []

        def look() -> Any:
            return self._client.zrangebyscore(expiring, 0, int(time.time() * 1000), 0, MAX_DUE)

        def drop() -> Any:
            return self._client.zrem(expiring, *over)

        while True:
            due: list[bytes] = await self._read(look)
            found = await asyncio.gather(*(self.fetch(job_id.decode()) for job_id in due))
            # One that runs will not expire any more; one that is not kept was lost with the server's last writes.
            over = [job_id for job_id, state in zip(due, found, strict=True) if not _waits(state)]
            if over:
                await self._read(drop)
            if len(over) < MAX_DUE:
                return

    def waiter(self, job_id: str) -> Waiter:
        """Woken when there is news of the job; one that was there before the job was submitted misses nothing."""
        return self._listener.waiter(job_id)

    def wake_waiters(self) -> None:
        """Let every waiter look up: at its job, and at whatever else it waits on."""
        self._listener.wake_all()

    async def wait(
        self,
        job_id: str,
        timeout_s: float,
        waiter: Waiter | None = None,
        expires_at: float | None = None,
        given_up: Callable[[], bool] = lambda: False,
    ) -> JobState | None:
        """The job's state as soon as it has ended, or its state at the timeout; None for an unknown id.

        A `waiter` was made before the job was known not to have ended. None, too, when it is woken and `given_up()`. A
        job that waits ends when its time is over, at `expires_at` as far as the caller knows.
        """
        if waiter is None:
            with self.waiter(job_id) as waiter:
                # It may have ended before we listened.
                waiter.wake()
                return await self.wait(job_id, timeout_s, waiter, expires_at, given_up)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while (left := deadline - loop.time()) > 0:
            if expires_at is not None:
                left = min(left, max(0.0, expires_at - time.time()) + EXPIRY_MARGIN_S)
            await waiter.wait(left)
            if given_up():
                return None
            state = await self.fetch(job_id)
            if state is None or state.ended:
                return state
            # One that has begun does not expire any more.
            expires_at = state.expires_at if state.status is JobStatus.QUEUED else None
            # Thousands may wait on.
            del state
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

    async def forget_repeat(self, idempotency_key: tuple[str, str], job_id: str) -> None:
        """Let a submit with this key be a new job, if the key still stands for this one."""
        async with translated_async(self._client):
            await self._forget(keys=[self.keys.idempotency(*idempotency_key)], args=[job_id])

    async def forget(self, owner: str, job_id: str) -> None:
        """Keep nothing more of a job that has ended, for callers who have read its result and would fill the server."""
        keys = self.keys
        async with translated_async(self._client), self._client.pipeline(transaction=False) as pipe:
            pipe.delete(keys.result(job_id), keys.record(job_id), keys.started(job_id))
            pipe.zrem(keys.listed(owner), job_id)
            await pipe.execute()

    async def watch(self, job_id: str) -> None:
        """For `WATCHED_S` a waiter of this job is woken when it begins too. Those who watch on say so again."""
        now = time.time()

        async def say() -> None:
            async with self._client.pipeline(transaction=False) as pipe:
                pipe.zadd(self.keys.watched, {job_id: now + WATCHED_S})
                pipe.zremrangebyscore(self.keys.watched, "-inf", now)
                pipe.expire(self.keys.watched, WATCHED_S)
                await pipe.execute()

        await self._read(say)

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
                    keys.open_jobs(state.counted_by if state else ""),
                    keys.queue(WEBHOOKS).waiting[0],
                    keys.expiring,
                ],
                args=[
                    encode_dropped(job_id, status, reason, facts),
                    self._result_ttl_s,
                    keys.news,
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

    async def probe(self) -> None:
        """Raises `BrokerUnavailable` when a submit would be refused now, `UnsupportedServer` for too old a server.

        It writes: a server that is full, read-only or loading answers questions as ever.
        """
        await self._read(lambda: self._client.set(self.keys.probe, b"", ex=PROBE_TTL_S))
        check_server_info(await self._read(lambda: self._client.info("server")))

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching
        await self._listener.close()
        await self._client.aclose()

    async def _read(self, command: Callable[[], Any]) -> Any:
        """Run a command that may be run twice."""
        async with translated_async(self._client):
            return await tried_twice(command)


def _waits(state: JobState | None) -> bool:
    return state is not None and state.status is JobStatus.QUEUED
