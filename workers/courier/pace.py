"""When there will be a turn, judged by how long turns took until now."""

from __future__ import annotations

import random
import time

#: Shortest and longest time that something is put off for, seconds.
MIN_PUT_OFF_S = 0.1
MAX_PUT_OFF_S = 300.0
#: How long a turn takes while nothing is known of any, seconds; low, so that what is put off is soon back.
FIRST_GUESS_S = 0.1
#: Weight of the last turn in their mean duration.
_LAST_TURN = 0.2


class Pace:
    """Of turns that are had by several at once. Clock: `time.monotonic`."""

    def __init__(self) -> None:
        self._mean_s = FIRST_GUESS_S
        self._moved_at = time.monotonic()
        self._next_turn_at = 0.0

    def began(self) -> None:
        """A turn has begun."""
        self._moved_at = time.monotonic()

    def ended(self, duration_s: float) -> None:
        """A turn has ended, after so long."""
        self._mean_s += _LAST_TURN * (duration_s - self._mean_s)
        self._moved_at = time.monotonic()

    def until_turn_s(self, turns: int) -> float:
        """When one more has a turn, in so many seconds, if all `turns` go on to take as long as they did.

        Those who asked earlier come earlier. All may hang and none end: then a turn takes at least the time since one
        began or ended last.
        """
        now = time.monotonic()
        turn_s = max(self._mean_s, now - self._moved_at)
        self._next_turn_at = max(self._next_turn_at + turn_s / turns, now + MIN_PUT_OFF_S)
        if self._next_turn_at < now + MAX_PUT_OFF_S:
            return self._next_turn_at - now
        self._next_turn_at = now + MAX_PUT_OFF_S
        # What comes back goes first: a flood that did so in one moment would hold up everybody.
        return MAX_PUT_OFF_S * random.uniform(0.5, 1.0)
