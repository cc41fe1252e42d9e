"""Jobs that are read together are read in one round trip: a batch that ends wakes all its waiters at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import redis.asyncio

from broker.faults import translated_async, tried_twice
from broker.keys import Keys
from broker.together import Together, fail

#: Most jobs in one round trip; results may be large.
MAX_TOGETHER = 64

#: What is stored of a job: its record, its start, its result.
Stored = tuple[bytes | None, bytes | None, bytes | None]
_Entry = tuple[str, "asyncio.Future[Stored]"]


class Reader:
    """One process' reads of jobs."""

    def __init__(self, client: redis.asyncio.Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self._together: Together[str, Stored] = Together(MAX_TOGETHER, self._answer)

    async def read(self, job_id: str) -> Stored:
        """What is stored of a job now. Raises `BrokerUnavailable`."""
        return await self._together.ask(job_id)

    async def _answer(self, asked: Sequence[_Entry]) -> None:
        entries = [entry for entry in asked if not entry[1].done()]
        if not entries:
            return
        keys = self._keys
        names = [key(job_id) for job_id, _ in entries for key in (keys.record, keys.started, keys.result)]
        try:
            async with translated_async(self._client):
                found = cast("list[bytes | None]", await tried_twice(lambda: self._client.mget(names)))
        except Exception as error:
            fail(entries, error)
            return
        for place, (_, future) in enumerate(entries):
            if not future.done():
                record, started, result = found[3 * place : 3 * place + 3]
                future.set_result((record, started, result))
