"""What is wanted of a run while it runs: to go on, or to pause. Whoever hears it says it here, and the run heeds it."""

from __future__ import annotations

import asyncio
import time


class Steering:
    """One run's, on one event loop. It goes on until it is told to pause."""

    def __init__(self) -> None:
        self._going = asyncio.Event()
        self._going.set()
        self._pausing = asyncio.Event()
        self._paused_at = 0.0
        self._earlier_s = 0.0
        #: Whether it is paused, nothing of it is at the broker, and all that it has written is in its checkpoint.
        self.rests = False

    def pause(self) -> None:
        if self._going.is_set():
            self._paused_at = time.monotonic()
            self._going.clear()
            self._pausing.set()

    def resume(self) -> None:
        if self._pausing.is_set():
            self._earlier_s += self.pause_s
            self._pausing.clear()
            self._going.set()
            self.rests = False

    def rest(self) -> None:
        """Said by the run; it may have been told to go on meanwhile."""
        self.rests = self._pausing.is_set()

    async def going(self) -> None:
        """Returns at once unless it is paused, else when it goes on."""
        await self._going.wait()

    async def pausing(self) -> None:
        """Returns when it is to pause."""
        await self._pausing.wait()

    @property
    def pause_s(self) -> float:
        """For how long it has been told to pause now; 0 when it goes on."""
        return time.monotonic() - self._paused_at if self._pausing.is_set() else 0.0

    @property
    def paused_s(self) -> float:
        """For how long it was told to pause in all."""
        return self._earlier_s + self.pause_s
