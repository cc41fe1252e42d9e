"""How fast queues are drained, for those who are told to come again later.

Each lease takes the next number of its queue's sequence, so two looks at it tell how many messages were leased between
them. Messages that were given back count twice; that is seldom, and only makes a caller come a little earlier.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from broker.errors import BrokerUnavailable

#: Seconds between looks, and how far back the oldest lies.
LOOK_EVERY_S = 2.0
WINDOW_S = 20.0
#: Share of the limit that is to be free again when a refused caller comes back, so that not all of them are in vain.
ROOM = 0.1
#: Bounds of what callers are told, seconds. The longest is for a queue that nothing drains.
MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0


class DrainRates:
    """Looks at the sequences of `queues` now and then. `look` reads how many messages of each were ever leased."""

    def __init__(self, queues: Sequence[str], look: Callable[[Sequence[str]], Awaitable[Sequence[int]]]) -> None:
        self._queues = queues
        self._look = look
        self._looks: deque[tuple[float, dict[str, int]]] = deque(maxlen=round(WINDOW_S / LOOK_EVERY_S) + 1)

    async def run(self) -> None:
        """Look for as long as the process lives."""
        while True:
            try:
                leased = await self._look(self._queues)
            except BrokerUnavailable:
                # Whoever submits now hears of it.
                self._looks.clear()
            else:
                self._looks.append((time.monotonic(), dict(zip(self._queues, leased, strict=True))))
            await asyncio.sleep(LOOK_EVERY_S)

    def per_second(self, queue: str) -> float:
        """Messages leased per second, lately; 0 when that is not known."""
        if len(self._looks) < 2:
            return 0.0
        (begin, first), (end, last) = self._looks[0], self._looks[-1]
        return max(0, last.get(queue, 0) - first.get(queue, 0)) / (end - begin)

    def retry_after_s(self, queue: str, depth: int, limit: int) -> float:
        """Seconds after which a full queue will have room again."""
        rate = self.per_second(queue)
        if not rate:
            return MAX_RETRY_S
        return min(MAX_RETRY_S, max(MIN_RETRY_S, (depth - limit + ROOM * limit) / rate))
