"""What many callers ask for at once goes to the server together: they share a round trip."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class Together(Generic[Asked, Answer]):
    """Collects what is asked while a round trip is under way and hands it on with the next one.

    `carry_out` gets at most `most` entries and resolves each one's future that is not done yet; it does not raise.
    """

    def __init__(
        self, most: int, carry_out: Callable[[Sequence[tuple[Asked, asyncio.Future[Answer]]]], Awaitable[object]]
    ) -> None:
        self._most = most
        self._carry_out = carry_out
        self._pending: list[tuple[Asked, asyncio.Future[Answer]]] = []
        self._flusher: asyncio.Task[None] | None = None

    async def ask(self, asked: Asked) -> Answer:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._pending.append((asked, future))
        if self._flusher is None:
            self._flusher = asyncio.create_task(self._flush())
        return await future

    async def _flush(self) -> None:
        try:
            while self._pending:
                together, self._pending = self._pending[: self._most], self._pending[self._most :]
                await self._carry_out(together)
        finally:
            self._flusher = None


def fail(entries: Sequence[tuple[object, asyncio.Future[Answer]]], error: Exception) -> None:
    """Whatever it was, those who wait must hear of it."""
    for _, future in entries:
        if not future.done():
            future.set_exception(error)
