"""Who goes first: flows that share a priority level, levels that share a device, models that share a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from batching.types import LEVELS

#: Finish times of flows are tidied up when there are more of them than this, and than twice those kept the last time.
TIDY_ABOVE = 64
#: Together the lower levels lead every other batch at most.
MOST_SHARE = 0.5 / (LEVELS - 1)


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
        self._tidy_above = TIDY_ABOVE

    def enter(self, flow: Hashable, tokens: int) -> float:
        """The tag of a row that begins to wait."""
        if flow is None:
            self._alone += 1
            return self.clock
        start = max(self.clock, self._finish.get(flow, 0.0))
        self._finish[flow] = start + tokens
        self._waiting[flow] += 1
        if len(self._finish) > self._tidy_above:
            self._finish = {known: end for known, end in self._finish.items() if end > self.clock}
            self._tidy_above = max(TIDY_ABOVE, 2 * len(self._finish))
        return start

    def leave(self, flow: Hashable) -> None:
        """A row waits no longer."""
        if flow is None:
            self._alone -= 1
            return
        self._waiting[flow] -= 1
        if not self._waiting[flow]:
            del self._waiting[flow]

    def give_back(self, flow: Hashable, tokens: int) -> None:
        """A row has left that will not be served: its flow gets that part back for the rows that come.

        The tags of its rows that wait already are their owner's to move.
        """
        if flow in self._finish:
            self._finish[flow] -= tokens

    def served(self, tokens: int, least: float | None) -> None:
        """So many tokens were served; `least` is the least tag that still waits. Call it after `leave`."""
        self.clock += tokens / (len(self._waiting) + self._alone + 1)
        if least is not None:
            self.clock = max(self.clock, least)


class Shares:
    """Which priority level leads: the highest that waits, but each lower one for its share of the time.

    A lower one leads once it has earned the time of a batch, and never two batches in a row while a higher one waits: a
    row of the highest level waits for the batch that runs and for one more at most. What it gets while none waits is
    taken off what it has earned: it earns nothing as long as it has its share anyway.
    """

    def __init__(self, share: float) -> None:
        if not 0 <= share <= MOST_SHARE:
            raise ValueError(f"the share of a lower level lies between 0 and {MOST_SHARE:.3f}, not {share}")
        self._share = share
        self._credits = [0.0] * LEVELS
        self._usual_s = 0.0
        #: The batch before was led by a lower level while a higher one waited.
        self._lower_led = False

    def pick(self, waiting: Sequence[int]) -> int:
        """The level that leads, of those that wait (ascending, at least one). A lower one that has earned a batch."""
        highest, *lower = waiting
        for level in range(LEVELS):
            if level not in lower:
                # What it has earned is lost, what it owes is not: it may empty with each batch that it leads.
                self._credits[level] = min(0.0, self._credits[level])
        if lower and not self._lower_led:
            richest = max(lower, key=lambda level: self._credits[level])
            if self._credits[richest] > 0 and self._credits[richest] >= self._usual_s:
                return richest
        return highest

    def charge(self, level: int, waiting: Sequence[int], seconds: float) -> None:
        """`level` led a batch of so many seconds while these waited."""
        self._usual_s = seconds if not self._usual_s else 0.8 * self._usual_s + 0.2 * seconds
        self._lower_led = level != waiting[0]
        self.correct(level, waiting, seconds)

    def correct(self, level: int, waiting: Sequence[int], seconds: float) -> None:
        """The batch that `charge` was told of took so many seconds more than it was charged, or fewer if negative."""
        for lower in waiting[1:]:
            self._credits[lower] += self._share * seconds
        if level != waiting[0]:
            self._credits[level] -= seconds
        elif level and self._credits[level] > 0:
            self._credits[level] = max(0.0, self._credits[level] - seconds)
