"""The way of all rows of a run: read, served, written, and saved now and then, whatever the files look like."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

from bulk.chunks import Item, Outcome
from bulk.engine import Engine
from bulk.errors import OutputFailed
from bulk.steering import Steering

T = TypeVar("T")

#: Seconds between checkpoints: so much work is done again after a kill. Each costs two flushes to disk.
CHECKPOINT_EVERY_S = 5.0


class Files(Protocol):
    """The open files of a run, used from one thread at a time."""

    def take(self, most: int) -> Sequence[Item]:
        """The next rows, about as many as that; none at the end."""

    def write(self, outcomes: Sequence[Outcome]) -> None:
        """What became of the next rows, in their order."""

    def save(self) -> None:
        """Have all that was written on disk, and a checkpoint say so."""


async def drive(engine: Engine, files: Files, told: Callable[[], None], steering: Steering | None = None) -> None:
    """Have every row served and written; `told` is called whenever some are. What was begun is ended, or saved.

    `steering` is the engine's, if it has one: it is told when a pause has left nothing at the broker, and all on disk.

    Raises:
        BulkError: it could not be done; unless said otherwise it can be resumed.
        asyncio.CancelledError: it was told to stop; what is done is in the checkpoint.
    """
    outcomes = engine.outcomes(lambda most: undisturbed(files.take, most))
    saved_at = time.monotonic()
    try:
        told()
        async for some in outcomes:
            await undisturbed(files.write, some)
            told()
            if not some or time.monotonic() - saved_at > CHECKPOINT_EVERY_S:
                await undisturbed(files.save)
                saved_at = time.monotonic()
            if not some and steering is not None:
                steering.rest()
    except BaseException:
        await outcomes.aclose()
        await engine.abandon()
        with suppress(OutputFailed):
            await undisturbed(files.save)
        raise


async def undisturbed(call: Callable[..., T], *arguments: object) -> T:
    """Run it on a thread. A cancellation waits until it is done: else it would go on beside what follows."""
    running = asyncio.ensure_future(asyncio.to_thread(call, *arguments))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


async def to_its_end(call: Callable[[], T]) -> T:
    """Run it on a thread. A cancellation comes too late; a second one does not wait."""
    running = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        return running.result()
