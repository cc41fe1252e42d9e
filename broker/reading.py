"""Jobs that are read together are read in one round trip: a batch that ends wakes all its waiters at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import redis.asyncio

from broker.faults import translated_async, tried_twice
from broker.keys import Keys

#: Most jobs in one round trip; results may be large.
MAX_TOGETHER = 64

#: What is stored of a job: its record, its start, its result.
Stored = tuple[bytes | None, bytes | None, bytes | None]
_Entry = tuple[str, "asyncio.Future[Stored]"]


class Reader:
    """Collects reads while one is under way and sends them with the next one."""

    def __init__(self, client: redis.asyncio.Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self._pending: list[_Entry] = []
        self._flusher: asyncio.Task[None] | None = None

    async def read(self, job_id: str) -> Stored:
        """What is stored of a job now. Raises `BrokerUnavailable`."""
        future: asyncio.Future[Stored] = asyncio.get_running_loop().create_future()
        self._pending.append((job_id, future))
        if self._flusher is None:
            self._flusher = asyncio.create_task(self._flush())
        return await future

    async def _flush(self) -> None:
        try:
            while self._pending:
                together, self._pending = self._pending[:MAX_TOGETHER], self._pending[MAX_TOGETHER:]
                await self._answer([entry for entry in together if not entry[1].done()])
        finally:
            self._flusher = None

    async def _answer(self, entries: Sequence[_Entry]) -> None:
        if not entries:
            return
        keys = self._keys
        names = [key(job_id) for job_id, _ in entries for key in (keys.record, keys.started, keys.result)]
        try:
            async with translated_async(self._client):
                found = cast("list[bytes | None]", await tried_twice(lambda: self._client.mget(names)))
        except Exception as error:
            # Whatever it was, those who wait must hear of it.
            for _, future in entries:
                if not future.done():
                    future.set_exception(error)
            return
        for place, (_, future) in enumerate(entries):
            if not future.done():
                record, started, result = found[3 * place : 3 * place + 3]
                future.set_result((record, started, result))
