"""What many callers ask for at once goes to the server together: they share a round trip."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")

#: Round trips at once: while the server works on one, callers' requests become the next.
FLIGHTS = 2


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
        self._flushers: set[asyncio.Task[None]] = set()
        self._flying = 0
        #: The last flusher has not begun: what is asked meanwhile goes with it.
        self._starting = False

    async def ask(self, asked: Asked) -> Answer:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._pending.append((asked, future))
        if not self._starting and self._flying < FLIGHTS:
            self._starting = True
            self._flying += 1
            flusher = asyncio.create_task(self._flush())
            self._flushers.add(flusher)
            flusher.add_done_callback(self._flushers.discard)
        return await future

    async def _flush(self) -> None:
        self._starting = False
        try:
            while self._pending:
                together, self._pending = self._pending[: self._most], self._pending[self._most :]
                await self._carry_out(together)
        finally:
            # Not when it is seen as done, a turn of the loop later: until then nobody would start the next.
            self._flying -= 1


def fail(entries: Sequence[tuple[object, asyncio.Future[Answer]]], error: Exception) -> None:
    """Whatever it was, those who wait must hear of it."""
    for _, future in entries:
        if not future.done():
            future.set_exception(error)
