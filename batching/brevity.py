"""How long a batch with rows of the lowest priority may take while callers of a higher one are about.

A row that arrives waits for the batch that is under way, or for a part of it where that gives way, so its wait is
bounded by what that batch may take: no longer than callers' own batches take. A batch that is short beside its overhead
would waste the device, so twice the overhead is always allowed: at least half of the device's time goes into rows.
"""

from __future__ import annotations

import math

from batching.cost import CostModel

#: Seconds for which callers are taken to be about after the last row of theirs.
ABOUT_S = 5.0
#: A batch may always take so many times its overhead.
LEAST_OVERHEADS = 2.0
#: What the mean of callers' batches keeps of its weight with each one that follows.
KEPT = 0.9


class Brevity:
    """Learns how long callers' own batches take, and tells how many padded tokens others may have meanwhile."""

    def __init__(self) -> None:
        self._came_at = -math.inf
        self._own_s: float | None = None

    def came(self, now: float) -> None:
        """A row of a caller's was added."""
        self._came_at = max(now, self._came_at)

    def ran(self, seconds: float) -> None:
        """Callers' rows that ran together take so long by themselves."""
        self._own_s = seconds if self._own_s is None else KEPT * self._own_s + (1 - KEPT) * seconds

    def most_tokens(self, now: float, cost: CostModel) -> float:
        """Padded tokens of a batch with rows of the lowest priority; infinity when no callers are about."""
        if self._own_s is None or now - self._came_at > ABOUT_S:
            return math.inf
        seconds = max(self._own_s, LEAST_OVERHEADS * cost.overhead_s) - cost.overhead_s
        # What was computed from tokens has to come back as those tokens.
        return round(seconds / cost.token_s, 6)
