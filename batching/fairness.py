"""Who goes first: flows that share a priority level, levels that share a device, models that share a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from batching.types import LEVELS

#: Finish times of flows are tidied up when there are more of them than this, and than twice those that wait.
TIDY_ABOVE = 64


class FairOrder:
    """Gives the rows of one level their place, so that a flow's flood does not hold up another flow's trickle.

    Each row gets a tag, in tokens on a virtual clock; the least goes first. The clock runs at the rate at which each of
    the flows that wait is served when all are served alike. Rows that are a flow of their own (None) are served in the
    order in which they come. Source: Demers, Keshav and Shenker, "Analysis and simulation of a fair queueing
    algorithm", 1989.
    """

    def __init__(self) -> None:
        #: Now, on the virtual clock: rows with a tag above it belong to flows that are ahead of their part.
        self.clock = 0.0
        self._alone = 0
        self._waiting: Counter[Hashable] = Counter()
        self._finish: dict[Hashable, float] = {}

    def enter(self, flow: Hashable, tokens: int) -> float:
        """The tag of a row that begins to wait."""
        if flow is None:
            self._alone += 1
            return self.clock
        start = max(self.clock, self._finish.get(flow, 0.0))
        self._finish[flow] = start + tokens
        self._waiting[flow] += 1
        return start

    def leave(self, flow: Hashable) -> None:
        """A row waits no longer."""
        if flow is None:
            self._alone -= 1
            return
        self._waiting[flow] -= 1
        if not self._waiting[flow]:
            del self._waiting[flow]
            if len(self._finish) > TIDY_ABOVE + 2 * len(self._waiting):
                self._finish = {known: end for known, end in self._finish.items() if end > self.clock}

    def give_back(self, flow: Hashable, tokens: int) -> None:
        """A row has left that will not be served: its flow gets that part back."""
        if flow in self._finish:
            self._finish[flow] -= tokens

    def served(self, tokens: int, least: float | None) -> None:
        """So many tokens were served; `least` is the least tag that still waits. Call it after `leave`."""
        self.clock += tokens / (len(self._waiting) + self._alone + 1)
        if least is not None:
            self.clock = max(self.clock, least)


class Shares:
    """Which priority level leads: the highest that waits, but each lower one for its share of the time."""

    def __init__(self, share: float) -> None:
        if not 0 <= share <= 1 / LEVELS:
            raise ValueError(f"the share of a lower level lies between 0 and {1 / LEVELS}, not {share}")
        self._share = share
        self._credits = [0.0] * LEVELS
        self._usual_s = 0.0

    def pick(self, waiting: Sequence[int]) -> int:
        """The level that leads, of those that wait (ascending, at least one). A lower one that has earned a batch."""
        highest, *lower = waiting
        for level in range(LEVELS):
            if level not in lower:
                self._credits[level] = 0.0
        if lower:
            richest = max(lower, key=lambda level: self._credits[level])
            if self._credits[richest] > 0 and self._credits[richest] >= self._usual_s:
                return richest
        return highest

    def charge(self, level: int, waiting: Sequence[int], seconds: float) -> None:
        """`level` led a batch of so many seconds while these waited."""
        self._usual_s = seconds if not self._usual_s else 0.8 * self._usual_s + 0.2 * seconds
        for lower in waiting[1:]:
            self._credits[lower] += self._share * seconds
        if level != waiting[0]:
            self._credits[level] -= seconds
