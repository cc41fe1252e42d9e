"""Looks at queues, listings and workers that change nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson
import redis.asyncio

from broker.faults import translated_async, tried_twice
from broker.jobs import JobState, ModelInfo, QueueDepth, WorkerInfo, queue_name
from broker.keys import PRIORITY_STEPS, Keys


class Overview:
    """One API process' looks. Each raises `BrokerUnavailable`."""

    def __init__(self, client: redis.asyncio.Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    async def queue_depths(self, queues: Sequence[str]) -> list[QueueDepth]:
        """Messages not yet leased, per queue and priority step; given-back and owners' ones count too."""
        levels = [str(level) for level, _ in enumerate(PRIORITY_STEPS, 1)]
        async with translated_async(self._client), self._client.pipeline(transaction=False) as pipe:
            for keys in map(self._keys.queue, queues):
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
        lengths = await self._lengths([self._keys.queue(queue).dead for queue in queues])
        return dict(zip(queues, lengths, strict=True))

    async def _lengths(self, keys: Sequence[str]) -> list[int]:
        async with translated_async(self._client), self._client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.llen(key)
            lengths: list[int] = await pipe.execute()
        return lengths

    async def workers(self) -> list[WorkerInfo]:
        """The workers that live now, as they announced themselves."""
        sessions = await self._read(lambda: self._client.zrange(self._keys.workers, 0, -1))
        if not sessions:
            return []
        announcements = await self._read(
            lambda: self._client.mget([self._keys.worker(session.decode()) for session in sessions])
        )
        return [_worker_info(orjson.loads(text)) for text in announcements if text is not None]

    async def position(self, state: JobState) -> int | None:
        """How many jobs, itself among them, are to be leased before a job that waits has been; None for another.

        Jobs of other callers may be leased in turn with it, so it is an estimate where the queue is long.
        """
        if state.ticket is None:
            return None
        keys = self._keys.queue(queue_name(state.model))
        levels = PRIORITY_STEPS.index(state.priority) + 1
        names = [str(level) for level in range(1, levels + 1)]
        async with translated_async(self._client), self._client.pipeline(transaction=False) as pipe:
            pipe.hget(keys.served, str(levels))
            pipe.hmget(keys.owned_depths, names)
            for key in (*keys.waiting[:levels], *keys.returned[:levels]):
                pipe.llen(key)
            served, owned, *lengths = await pipe.execute()
        waiting: list[int] = lengths[:levels]
        returned: list[int] = lengths[levels:]
        own = [waiting[level] + int(owned[level] or 0) for level in range(levels)]
        # Lists may have been emptied by hand, or the job been given back.
        place = min(state.ticket - int(served or 0), own[-1])
        return max(1, place + sum(own[:-1]) + sum(returned))

    async def listed(self, owner: str, before: tuple[int, str] | None, count: int) -> list[tuple[int, str]]:
        """At most `count` of an owner's jobs, the newest first, that come after `before`: pairs of Unix milliseconds
        and id. Only the newest `MOST_LISTED` are known.
        """
        found: list[tuple[int, str]] = []
        skipped = 0
        while len(found) < count:
            page = await self._page(owner, before, skipped, count)
            found += [entry for entry in page if before is None or entry < before]
            if len(page) < count:
                break
            skipped += count
        return found[:count]

    async def _page(
        self, owner: str, before: tuple[int, str] | None, skipped: int, count: int
    ) -> list[tuple[int, str]]:
        """So many of an owner's jobs from this millisecond back, without the newest `skipped` of them."""
        most = "+inf" if before is None else str(before[0])
        page = await self._read(
            lambda: self._client.zrevrangebyscore(
                self._keys.listed(owner), most, "-inf", start=skipped, num=count, withscores=True
            )
        )
        return [(int(score), job_id.decode()) for job_id, score in page]

    async def leased(self, queues: Sequence[str]) -> list[int]:
        """How many messages of each queue were ever leased."""
        names = [self._keys.queue(queue).lease_sequence for queue in queues]
        return [int(count or 0) for count in await self._read(lambda: self._client.mget(names))]

    async def _read(self, command: Callable[[], Any]) -> Any:
        """Run a command that may be run twice."""
        async with translated_async(self._client):
            return await tried_twice(command)


def _worker_info(announced: dict[str, Any]) -> WorkerInfo:
    models = tuple(ModelInfo(**model) for model in announced.pop("models"))
    return WorkerInfo(models=models, **announced)
