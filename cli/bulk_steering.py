"""Has runs of files and batches pause, go on or end, and waits until they have heard of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from broker import AsyncBroker, BatchEnded, BatchRecord, Wanted
from broker.batches import Batches
from broker.bulk_runs import BulkRuns
from cli.bulk_views import View

#: Seconds for which a run may take to do what is wanted of it.
CONFIRMED_WITHIN_S = 10.0
#: Seconds between looks at whether it has.
LOOK_EVERY_S = 0.2


class _Kind(Protocol):
    async def get(self, name: str) -> View | None: ...

    async def listed(self, limit: int) -> Sequence[View]: ...

    async def want(self, name: str, wanted: Wanted) -> View | None:
        """Let it know; one that has ended, and None, are left as they are."""


class Steered:
    """All bulk runs of a broker, of either kind. Every method raises `BrokerUnavailable`."""

    def __init__(self, broker: AsyncBroker) -> None:
        self._files = _FileRuns(broker.bulk_runs)
        self._batches = _BatchRuns(broker.batches)

    async def get(self, name: str) -> View | None:
        return await self._kind(name).get(name)

    async def listed(self, limit: int) -> list[View]:
        """At most `limit`, the newest first."""
        views = [*await self._files.listed(limit), *await self._batches.listed(limit)]
        return sorted(views, key=lambda view: -view.created_at)[:limit]

    async def obeyed(self, name: str, wanted: Wanted) -> str | None:
        """Want it of a run; None when the run has done it, else why not."""
        kind = self._kind(name)
        view = await kind.want(name, wanted)
        deadline = time.monotonic() + CONFIRMED_WITHIN_S
        if view is not None and view.ended:
            return _over(view)
        while view is not None and not _done(view, wanted):
            if view.ended:
                return _over(view)
            if time.monotonic() > deadline:
                return (
                    f"{name} has not answered for {CONFIRMED_WITHIN_S:g} s, and is {view.state}: it does so when it "
                    f"hears of it; see `sheaf bulk show {name}`"
                )
            await asyncio.sleep(LOOK_EVERY_S)
            view = await kind.get(name)
        return unknown(name) if view is None else None

    def _kind(self, name: str) -> _Kind:
        return self._batches if name.startswith("batch_") else self._files


def unknown(name: str) -> str:
    return f"there is no bulk run {name}: see `sheaf bulk list`; files' runs are kept for a week, batches for 30 days"


def _done(view: View, wanted: Wanted) -> bool:
    match wanted:
        case Wanted.PAUSE:
            return view.state == "paused"
        case Wanted.CANCEL:
            return view.state == "cancelled"
        case Wanted.RUN:
            # One that goes on may be at its end before we look.
            return view.state in ("succeeded", "completed") or not (view.ended or view.state == "paused")


def _over(view: View) -> str:
    why = f" ({view.error})" if view.error else ""
    cure = f": {view.cure}" if view.cure else ""
    return f"{view.id} has ended, it is {view.state}{why}{cure}"


class _FileRuns:
    def __init__(self, runs: BulkRuns) -> None:
        self._runs = runs

    async def get(self, name: str) -> View | None:
        run = await self._runs.get(name)
        return None if run is None else View.of_run(run)

    async def listed(self, limit: int) -> Sequence[View]:
        return [View.of_run(run) for run in await self._runs.listed(limit)]

    async def want(self, name: str, wanted: Wanted) -> View | None:
        run = await self._runs.want(name, wanted)
        return None if run is None else View.of_run(run)


class _BatchRuns:
    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._verbs: Mapping[Wanted, Callable[[str], Awaitable[BatchRecord | None]]] = {
            Wanted.PAUSE: batches.pause,
            Wanted.RUN: batches.resume,
            Wanted.CANCEL: batches.cancel,
        }

    async def get(self, name: str) -> View | None:
        batch = await self._batches.get(name)
        return None if batch is None else View.of_batch(batch)

    async def listed(self, limit: int) -> Sequence[View]:
        return [View.of_batch(batch) for batch in await self._batches.newest(limit)]

    async def want(self, name: str, wanted: Wanted) -> View | None:
        try:
            batch = await self._verbs[wanted](name)
        except BatchEnded:
            return await self.get(name)
        return None if batch is None else View.of_batch(batch)
