"""What uvicorn has for each connection, in less memory: thousands of callers wait for results at once.

A deque takes 600 bytes before there is anything in it, and `asyncio.Event` has one too.
"""

from __future__ import annotations

import asyncio
from typing import Literal, TypeVar

T = TypeVar("T")


class LightEvent(asyncio.Event):
    """An event that has no place for waiters until there are some."""

    def __init__(self, value: bool = False) -> None:
        self._set = value
        self._waiting: list[asyncio.Future[None]] | None = None

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        waiting, self._waiting = self._waiting, None
        for future in waiting or ():
            if not future.done():
                future.set_result(None)

    def clear(self) -> None:
        self._set = False

    async def wait(self) -> Literal[True]:
        if not self._set:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            if self._waiting is None:
                self._waiting = []
            self._waiting.append(future)
            await future
        return True


class ShortQueue(list[T]):
    """The part of a deque that uvicorn uses, for a few entries."""

    def appendleft(self, entry: T) -> None:
        self.insert(0, entry)
