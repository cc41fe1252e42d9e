"""How long a free device waits for more rows, within `max_wait_s`."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

#: So many waits are remembered.
REMEMBERED = 32
#: Share of the time that goes into full waits made only to see whether more rows would come now.
PROBE_SHARE = 0.01
#: A period holds at least so many batches, and lasts for `max_wait_s` at least.
PERIOD_BATCHES = 8
#: A trial is so many periods, after one that is not counted since it began in the state of things before.
TRIAL_PERIODS = 4
#: Longest time between two batches of a period, in `max_wait_s`: where it is longer, no wait makes a difference.
LONGEST_PAUSE = 40
#: Share of the time in which it is tried not to wait.
TRIAL_SHARE = 0.08
#: The same while more rows seem to come without the wait, but not surely.
EAGER_TRIAL_SHARE = 0.3
#: Share of the time in which waiting is tried, where it was found to cost rows.
COUNTER_TRIAL_SHARE = 0.02
#: How many standard deviations more rows have to come without the wait to do without it.
SURE = 2.0
#: What the figures keep of their weight with each trial that follows.
KEPT = 15 / 16
#: Weight, in periods, of the assumption that rows come independently of each other.
PRIOR_PERIODS = 4.0
#: Seconds over which the arrival rate is taken.
RATE_OVER_S = 2.0


class Patience:
    """Learns when waiting on is of no use.

    Two things make a wait useless, and callers who each wait for their answer before they send the next row bring both
    about; with them, batching that waits is slower than none.

    - All that can come are there. The last waits tell how many these are: with eight callers never more than eight.
      Once as many rows wait, the batch need not wait for the rest of its time (`enough`). Now and then a wait is made
      in full all the same, for `PROBE_SHARE` of the time at most, to see whether more would come.
    - The wait holds up the callers whose next rows it waits for. Traffic that comes whatever the answers, comes at the
      same rate with the wait and without; callers bring fewer rows if it takes longer than it gains. So the rows a
      second are counted in periods with the wait and in short ones without (`TRIAL_SHARE` of the time), and once more
      come without it, by `SURE` standard deviations, a free device takes what is there. Until then the configured wait
      holds.
    """

    def __init__(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s
        #: How many rows had come when waits ended, in full or because they were enough.
        self._seen: deque[int] = deque(maxlen=REMEMBERED)
        self._probed = -math.inf
        self._waiting = _Rate()
        self._hasty = _Rate()
        #: What the period that runs counts for.
        self._now_for = self._waiting
        self._begun = math.nan
        self._last = math.nan
        self._rows = 0
        self._batches = 0
        #: Seconds of trial that are due, and periods of the one that runs.
        self._owed_s = 0.0
        self._trial_left = 0

    def enough(self, now: float) -> float:
        """So many rows waiting are worth no more waiting; infinity when that is to be found out."""
        if self._now_for is self._hasty:
            return 1
        if not self._seen or (now - self._probed) * PROBE_SHARE > self._max_wait_s:
            return math.inf
        return max(self._seen)

    def waited_in_full(self, rows: int, now: float) -> None:
        """After the longest wait so many rows were there."""
        if not self._seen or rows >= max(self._seen):
            # With fewer, it does not tell whether more than usual would come.
            self._probed = now
        self._seen.append(rows)

    def closed_early(self, rows: int) -> None:
        """A batch was closed because `enough` rows waited: no fewer come."""
        if self._seen and rows >= max(self._seen):
            self._seen.append(rows)

    def left(self, rows: int, now: float) -> None:
        """A batch of so many rows was formed."""
        if not self._max_wait_s:
            return
        if not now - self._last <= LONGEST_PAUSE * self._max_wait_s:
            self._begin(now)
        else:
            self._rows += rows
            self._batches += 1
        self._last = now
        if self._batches >= PERIOD_BATCHES and now - self._begun >= self._max_wait_s:
            self._end_period(now - self._begun)
            self._begin(now)

    def _begin(self, now: float) -> None:
        self._begun = now
        self._rows = 0
        self._batches = 0

    def _end_period(self, seconds: float) -> None:
        """Counts it, and settles what the next one is to count for."""
        gain = self._hasty.above(self._waiting)
        if gain > SURE:
            usual, other, share = self._hasty, self._waiting, COUNTER_TRIAL_SHARE
        else:
            usual, other, share = self._waiting, self._hasty, EAGER_TRIAL_SHARE if gain > SURE / 2 else TRIAL_SHARE
        self._owed_s += (share if self._now_for is usual else share - 1) * seconds
        if self._trial_left <= TRIAL_PERIODS:
            self._now_for.add(self._rows, seconds)
        self._trial_left -= self._trial_left > 0
        if self._trial_left:
            return
        if self._now_for is other:
            usual.age()
            other.age()
            self._now_for = usual
        elif self._owed_s > 0:
            self._now_for = other
            self._trial_left = TRIAL_PERIODS + 1


@dataclass(slots=True, eq=False)
class _Rate:
    """Rows a second over the periods of one kind; those long ago count less."""

    rows: float = 0.0
    seconds: float = 0.0
    periods: float = 0.0
    #: Sum over the periods: how far the rows were off the rate, squared, by how far independent rows would be.
    scatter: float = 0.0

    def add(self, rows: int, seconds: float) -> None:
        if self.rows:
            expected = seconds * self.rows / self.seconds
            self.scatter += (rows - expected) ** 2 / expected
            self.periods += 1
        self.rows += rows
        self.seconds += seconds

    def age(self) -> None:
        self.rows *= KEPT
        self.seconds *= KEPT
        self.periods *= KEPT
        self.scatter *= KEPT

    def above(self, other: _Rate) -> float:
        """By how many standard deviations more rows a second came than for `other`; 0 when one is unknown."""
        if not self.rows or not other.rows:
            return 0.0
        dispersion = (self.scatter + other.scatter + PRIOR_PERIODS) / (self.periods + other.periods + PRIOR_PERIODS)
        rate, other_rate = self.rows / self.seconds, other.rows / other.seconds
        return (rate - other_rate) / math.sqrt(dispersion * (rate / self.seconds + other_rate / other.seconds))


class ArrivalRate:
    """Rows a second, lately: an average with a weight that falls with age by `RATE_OVER_S`."""

    def __init__(self) -> None:
        self._count = 0.0
        self._at = 0.0

    def add(self, now: float) -> None:
        self._count = self._decayed(now) + 1.0
        self._at = max(now, self._at)

    def gap_s(self, now: float) -> float:
        """Seconds between rows; infinity before any came."""
        count = self._decayed(now)
        return RATE_OVER_S / count if count > 0 else math.inf

    def _decayed(self, now: float) -> float:
        return self._count * math.exp(min(0.0, self._at - now) / RATE_OVER_S)


def worth_waiting_s(rows: int, gap_s: float, overhead_s: float) -> float:
    """How long to wait for the next row when `rows` wait already; 0 when it is not worth it.

    A row more in this batch saves the device a batch's overhead, and costs each row that waits, itself included, the
    time until it comes. So it is worth it while `(rows + 1) x gap < overhead`, and for no longer than that.
    """
    return overhead_s / (rows + 1) if (rows + 1) * gap_s < overhead_s else 0.0
