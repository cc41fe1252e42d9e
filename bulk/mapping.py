"""Rows of a program through a model: an iterator in, an iterator out, with no more than a window in between."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, TypeVar, get_args

from broker import JobFailure
from bulk.chunks import Item
from bulk.client import open_broker
from bulk.engine import WINDOW, Engine
from bulk.errors import RowFailed
from configs import Settings, load_settings
from schemas.rows import INVALID_INPUT

T = TypeVar("T")

#: Seconds for which rows of a slow source are gathered before they are sent.
GATHER_S = 0.05

OnError = Literal["raise", "return"]


@dataclass(frozen=True, slots=True)
class Failure:
    """Stands for the answer to row `number`, counted from 0, that the model does not have."""

    number: int
    type: str
    message: str


def map(  # noqa: A001  # as `map` of the language, and always called with the room's name
    rows: Iterable[object],
    *,
    model: str,
    window: int = WINDOW,
    on_error: OnError = "raise",
    settings: Settings | None = None,
) -> Iterator[Any]:
    """The model's answers to `rows`, in their order, at the lowest priority.

    `rows` is read as answers are taken, on another thread, and no further ahead than `window` rows. A row that fails,
    or is nothing that JSON could tell, raises `RowFailed`, or is given as a `Failure` with `on_error="return"`. Rows
    wait while the broker is away, or no worker serves the model. Left early, what has not run is cancelled. `settings`
    are those that `sheaf` would read here (`SHEAF_BROKER__URL` names the broker).

    Raises:
        RowFailed: a row failed; its number is `number`.
        TypeError: `rows` is one row, or `window` no whole number; told by the call itself, as is a `ValueError`.
        ValueError: there is no such model or `on_error`, or `window` is below one.
    """
    return _answers_here(amap(rows, model=model, window=window, on_error=on_error, settings=settings))


def amap(
    rows: Iterable[object] | AsyncIterable[object],
    *,
    model: str,
    window: int = WINDOW,
    on_error: OnError = "raise",
    settings: Settings | None = None,
) -> AsyncGenerator[Any]:
    """`map` for an event loop; `rows` may be asynchronous. Close it (`aclosing`) where it is left early."""
    settings = settings or load_settings().settings
    if model not in settings.models:
        raise ValueError(f"there is no model {model!r}: the settings name {', '.join(settings.models)}")
    if on_error not in get_args(OnError):
        raise ValueError(f"on_error is one of {' or '.join(get_args(OnError))}, not {on_error!r}")
    if not isinstance(window, int) or isinstance(window, bool):
        raise TypeError(f"window is a whole number of rows, not {window!r}")
    if window < 1:
        raise ValueError(f"a window holds at least one row, not {window}")
    if isinstance(rows, (str, bytes, bytearray, Mapping)):
        raise TypeError(
            f"rows is one row, {type(rows).__name__}: give a list of rows, or anything else that yields them"
        )
    source = _Asynchronous(aiter(rows)) if isinstance(rows, AsyncIterable) else _Plain(iter(rows))
    return _answers(source, model, window, on_error, settings)


def _answers_here(answers: AsyncGenerator[Any]) -> Iterator[Any]:
    with _Loop() as loop:
        try:
            while True:
                try:
                    yield loop.run(_first(answers))
                except StopAsyncIteration:
                    return
        finally:
            loop.run(answers.aclose())


async def _answers(
    source: _Plain | _Asynchronous, model: str, window: int, on_error: OnError, settings: Settings
) -> AsyncGenerator[Any]:
    async with open_broker(settings) as client:
        engine = Engine(client, model, owner=f"map-{uuid.uuid4().hex[:12]}", window=window)
        try:
            async with aclosing(engine.outcomes(source.take)) as outcomes:
                async for some in outcomes:
                    for outcome in some:
                        if outcome.failure is None:
                            yield outcome.output
                        elif on_error == "return":
                            yield Failure(outcome.number, outcome.failure.type, outcome.failure.message)
                        else:
                            raise RowFailed(outcome.number, outcome.failure.type, outcome.failure.message)
        finally:
            source.close()
            await engine.abandon()


def _item(number: int, row: object) -> Item:
    try:
        return Item.of(number, row)
    except TypeError as error:
        return Item(number, failure=JobFailure(INVALID_INPUT, f"it has no form in JSON: {error}"))


class _Plain:
    """Rows of an ordinary iterator, which may block: it is read on a thread."""

    def __init__(self, rows: Iterator[object]) -> None:
        self._rows = rows
        self._count = 0

    async def take(self, most: int) -> Sequence[Item]:
        return await asyncio.to_thread(self._items, most)

    def _items(self, most: int) -> list[Item]:
        items = [_item(self._count + place, row) for place, row in enumerate(islice(self._rows, most))]
        self._count += len(items)
        return items

    def close(self) -> None:
        """Nothing is held."""


class _Asynchronous:
    """Rows of an asynchronous iterator: what comes within a moment goes together."""

    def __init__(self, rows: AsyncIterator[object]) -> None:
        self._rows = rows
        self._count = 0
        self._next: asyncio.Task[object] | None = None

    async def take(self, most: int) -> Sequence[Item]:
        items: list[Item] = []
        while len(items) < most:
            if self._next is None:
                self._next = asyncio.ensure_future(_first(self._rows))
            done, _ = await asyncio.wait([self._next], timeout=GATHER_S if items else None)
            if not done:
                break
            try:
                row = self._next.result()
            except StopAsyncIteration:
                break
            self._next = None
            items.append(_item(self._count, row))
            self._count += 1
        return items

    def close(self) -> None:
        if self._next is not None:
            self._next.cancel()


async def _first(rows: AsyncIterator[object]) -> object:
    return await anext(rows)


class _Loop:
    """An event loop on a thread of its own, for callers who have none, or whose own runs already (a notebook's)."""

    def __enter__(self) -> _Loop:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bulk map", daemon=True)
        self._thread.start()
        return self

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns, or raises."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


__all__ = ["Failure", "OnError", "RowFailed", "amap", "map"]
