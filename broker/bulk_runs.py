"""The registry of files' bulk runs: each says every second how far it is, and hears what is wanted of it.

A run alone writes its record; people write what they want. How long a run has been silent is told by its record's TTL,
so that only the server's clock counts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Self, cast

import orjson
import redis.asyncio

from broker.faults import translated_async, tried_twice
from broker.keys import Keys

log = logging.getLogger(__name__)

#: Seconds between the reports of a run.
REPORT_EVERY_S = 1.0
#: After so many seconds without a report a run is told to have stopped.
SILENT_AFTER_S = 15.0
#: Seconds for which a run is kept after its last report.
KEEP_S = 7 * 86_400
#: Runs that can be listed, those that reported last.
MAX_LISTED = 1000


class RunState(StrEnum):
    RUNNING = "running"
    #: It lives, and nothing of it is under way.
    PAUSED = "paused"
    CANCELLING = "cancelling"
    #: All rows are done; some of them may have failed.
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    #: By a signal, or its process is gone.
    STOPPED = "stopped"
    CANCELLED = "cancelled"


class Wanted(StrEnum):
    """What people want of a run."""

    RUN = "run"
    PAUSE = "pause"
    CANCEL = "cancel"


#: States that a run reports while it lives, and what it takes to be wanted of it in each.
_LIVE = {RunState.RUNNING: Wanted.RUN, RunState.PAUSED: Wanted.PAUSE, RunState.CANCELLING: Wanted.CANCEL}


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkRun:
    """One run, as it told of itself last. Times are Unix seconds of its own clock."""

    id: str
    model: str
    #: Where the rows come from and go, without credentials.
    input: str
    output: str
    host: str
    pid: int
    created_at: float
    updated_at: float
    state: RunState = RunState.RUNNING
    succeeded: int = 0
    failed: int = 0
    rows_per_second: float = 0.0
    #: How much of the input is done, 0 to 1, about; None where its size is unknown.
    ratio: float | None = None
    #: Why it ended before all was done.
    error: str | None = None

    @property
    def rows(self) -> int:
        return self.succeeded + self.failed

    @property
    def ended(self) -> bool:
        """Whether its process does nothing more for it; one that was silent for long may come back all the same."""
        return self.state not in _LIVE

    def encode(self) -> bytes:
        return orjson.dumps(self)

    @classmethod
    def decode(cls, raw: bytes) -> Self:
        """Raises `ValueError`, `KeyError` or `TypeError` for what another version wrote."""
        fields: dict[str, Any] = orjson.loads(raw)
        return cls(**(fields | {"state": RunState(fields["state"])}))


class BulkRuns:
    """The registry, for an event loop. Raises `BrokerUnavailable`."""

    def __init__(self, client: redis.asyncio.Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    async def report(self, run: BulkRun) -> Wanted:
        """Write how the run is, the first time or again, and return what is wanted of it.

        A server that has lost what was wanted is told by the run's state: one that is paused stays so.
        """
        name, index = self._keys.bulk_run(run.id), self._keys.bulk_runs

        async def write() -> list[Any]:
            async with self._client.pipeline(transaction=True) as pipe:
                pipe.hset(name, "record", cast("str", run.encode()))
                pipe.hsetnx(name, "wanted", _LIVE.get(run.state, Wanted.RUN))
                pipe.hget(name, "wanted")
                pipe.expire(name, KEEP_S)
                pipe.zadd(index, {run.id: run.updated_at})
                pipe.zremrangebyscore(index, "-inf", run.updated_at - KEEP_S)
                pipe.zremrangebyrank(index, 0, -1 - MAX_LISTED)
                pipe.expire(index, KEEP_S)
                answers: list[Any] = await pipe.execute()
            return answers

        async with translated_async(self._client):
            answers = await tried_twice(write)
        return Wanted(cast("bytes", answers[2]).decode())

    async def get(self, run_id: str) -> BulkRun | None:
        """The run as it is now; None for an unknown id, and one whose last report was too long ago."""
        return (await self._read([run_id]))[0]

    async def listed(self, limit: int) -> list[BulkRun]:
        """At most `limit` runs, of those that reported last; those that began last are first."""
        async with translated_async(self._client):
            ids = await tried_twice(lambda: self._client.zrevrange(self._keys.bulk_runs, 0, limit - 1))
        found = await self._read([name.decode() for name in cast("list[bytes]", ids)])
        return sorted((run for run in found if run is not None), key=lambda run: -run.created_at)

    async def want(self, run_id: str, wanted: Wanted) -> BulkRun | None:
        """Let the run know with its next report; returns how it was. None, or a run that has ended: nothing is done."""
        name = self._keys.bulk_run(run_id)

        async def note(pipe: redis.asyncio.client.Pipeline) -> BulkRun | None:
            raw, ttl_ms = await pipe.hget(name, "record"), await pipe.pttl(name)
            run = _run(cast("bytes | None", raw), ttl_ms)
            pipe.multi()  # type: ignore[no-untyped-call]  # redis-py
            if run is not None and not run.ended:
                pipe.hset(name, "wanted", wanted)
            return run

        async with translated_async(self._client):
            # It comes again when the run has reported meanwhile.
            run: BulkRun | None = await self._client.transaction(note, name, value_from_callable=True)
        return run

    async def _read(self, ids: Sequence[str]) -> list[BulkRun | None]:
        names = [self._keys.bulk_run(run_id) for run_id in ids]

        async def read() -> list[Any]:
            async with self._client.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.hget(name, "record")
                    pipe.pttl(name)
                answers: list[Any] = await pipe.execute()
            return answers

        async with translated_async(self._client):
            found = await tried_twice(read)
        return [_run(raw, ttl_ms) for raw, ttl_ms in zip(found[::2], found[1::2], strict=True)]


def _run(raw: bytes | None, ttl_ms: int) -> BulkRun | None:
    """A stored run; one that lives and has been silent for too long is told to have stopped."""
    if raw is None:
        return None
    try:
        run = BulkRun.decode(raw)
    except (ValueError, KeyError, TypeError) as error:
        log.warning("A bulk run cannot be read: another version wrote it.", extra={"cause": str(error)})
        return None
    if run.ended or KEEP_S - ttl_ms / 1000 <= SILENT_AFTER_S:
        return run
    return replace(run, state=RunState.STOPPED, rows_per_second=0.0, error="its process is gone")
