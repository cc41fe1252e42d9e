"""The queue's verbs for the API: submit, read and wait, on one event loop.

Submits that arrive together share one round trip, and each returns only after the server accepted its job. All waiters
of a process share one pub/sub connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import orjson
import redis
import redis.asyncio

from broker.connect import check_server_info, connect_async
from broker.errors import JobEnded
from broker.faults import lost_transports, translated
from broker.jobs import JobState, JobStatus, ModelInfo, NewJob, QueueDepth, WorkerInfo
from broker.keys import PRIORITY_STEPS, Keys
from broker.lua import script_text
from broker.results import RunFacts, encode_dropped, job_state
from broker.submitting import Submitter
from broker.waiting import ResultListener, Waiter


class AsyncBroker:
    """One API process' way to the queues. Made by `open`; needs no server until it is used."""

    def __init__(self, client: redis.asyncio.Redis, keys: Keys, *, max_queue_depth: int, result_ttl_s: int) -> None:
        self.keys = keys
        self._client = client
        self._result_ttl_s = result_ttl_s
        self._cancel = client.register_script(script_text("cancel"))
        self._submitter = Submitter(client, keys, max_queue_depth=max_queue_depth)
        self._listener = ResultListener(client, keys)

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
        keys = self.keys
        record, started, meta = await self._read(
            lambda: self._client.mget(keys.record(job_id), keys.started(job_id), keys.result(job_id))
        )
        return job_state(job_id, record, started, meta)

    def waiter(self, job_id: str) -> AbstractContextManager[Waiter]:
        """For `wait`: a waiter that was there before the job was submitted saves a look for its result."""
        return self._listener.waiter(job_id)

    async def wait(self, job_id: str, timeout_s: float, waiter: Waiter | None = None) -> JobState | None:
        """The job's state as soon as it has ended, or its state at the timeout; None for an unknown id."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        if waiter is not None:
            return await self._wait(job_id, deadline, waiter)
        state = await self.fetch(job_id)
        if state is None or state.ended or timeout_s <= 0:
            return state
        with self._listener.waiter(job_id) as waiter:
            # It may have ended before we listened.
            waiter.wake()
            return await self._wait(job_id, deadline, waiter)

    async def _wait(self, job_id: str, deadline: float, waiter: Waiter) -> JobState | None:
        loop = asyncio.get_running_loop()
        while await waiter.wait(deadline - loop.time()):
            state = await self.fetch(job_id)
            if state is None or state.ended:
                return state
        return await self.fetch(job_id)

    async def cancel(self, job_id: str) -> JobState | None:
        """End a job that has not ended; its waiters are told at once, and it does not run if it has not begun.

        Returns its state, None for an unknown id. Raises `JobEnded` for a job that has ended: nothing is changed.
        """
        state = await self.fetch(job_id)
        if state is None:
            return None
        if not state.ended:
            facts = RunFacts(
                model=state.model,
                version=state.version,
                priority=int(state.priority),
                attempt=state.attempt,
                many=state.many,
                enqueued_at=state.created_at,
                started_at=state.started_at,
                finished_at=time.time(),
                timings=None,
            )
            meta = encode_dropped(job_id, JobStatus.CANCELLED, "cancelled", facts)
            keys = [self.keys.result(job_id), self.keys.record(job_id)]
            with translated():
                cancelled = await self._cancel(keys=keys, args=[meta, self._result_ttl_s, self.keys.ended])
            if cancelled:
                return await self.fetch(job_id)
            state = await self.fetch(job_id)
        raise JobEnded(job_id, state.status if state else JobStatus.SUCCEEDED)

    @property
    def waiters(self) -> int:
        """How many waits are open in this process."""
        return len(self._listener)

    async def queue_depths(self, queues: Sequence[str]) -> list[QueueDepth]:
        """Messages not yet leased, per queue and priority step; given-back ones count with their priority."""
        keys = [self.keys.queue(queue) for queue in queues]
        with translated():
            async with self._client.pipeline(transaction=False) as pipe:
                for queue in keys:
                    for waiting, returned in zip(queue.waiting, queue.returned, strict=True):
                        pipe.llen(waiting)
                        pipe.llen(returned)
                lengths: list[int] = await pipe.execute()
        pairs = iter(zip(lengths[::2], lengths[1::2], strict=True))
        return [QueueDepth(queue, step, sum(next(pairs))) for queue in queues for step in PRIORITY_STEPS]

    async def workers(self) -> list[WorkerInfo]:
        """The workers that live now, as they announced themselves."""
        sessions = await self._read(lambda: self._client.zrange(self.keys.workers, 0, -1))
        if not sessions:
            return []
        announcements = await self._read(
            lambda: self._client.mget([self.keys.worker(session.decode()) for session in sessions])
        )
        return [_worker_info(orjson.loads(text)) for text in announcements if text is not None]

    async def ping(self) -> None:
        """Raises `BrokerUnavailable` when the server does not serve, `UnsupportedServer` when it is too old."""
        check_server_info(await self._read(lambda: self._client.info("server")))

    async def close(self) -> None:
        await self._listener.close()
        await self._client.aclose()

    async def _read(self, command: Callable[[], Any]) -> Any:
        """Run a command that changes nothing; once more on a new connection when the pooled one was dead."""
        with translated():
            try:
                with lost_transports():
                    return await command()
            except redis.ConnectionError:
                return await command()


def _worker_info(announced: dict[str, Any]) -> WorkerInfo:
    models = tuple(ModelInfo(**model) for model in announced.pop("models"))
    return WorkerInfo(models=models, **announced)
