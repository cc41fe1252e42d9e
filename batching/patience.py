"""How long a free device waits for more rows, within `max_wait_s`."""

from __future__ import annotations

import math
from collections import deque

#: So many full waits are remembered.
REMEMBERED = 8
#: After so many batches that were closed early one waits in full again, to see whether more would come now.
PROBE_EVERY = 16
#: Seconds over which the arrival rate is taken.
RATE_OVER_S = 2.0


class Patience:
    """Learns when waiting on is of no use.

    Full waits tell how many rows may come: with eight callers who each wait for their answer, never more than eight.
    Once as many are there, the batch need not wait for the rest of its time. Without this, batching is slower than none
    when there are fewer callers than a batch has rows.
    """

    def __init__(self) -> None:
        self._full_waits: deque[int] = deque(maxlen=REMEMBERED)
        self._early = 0

    def enough(self) -> float:
        """So many rows waiting are all that can be expected; infinity when that is to be found out."""
        if not self._full_waits or self._early >= PROBE_EVERY:
            return math.inf
        return max(self._full_waits)

    def waited_in_full(self, rows: int) -> None:
        """After the longest wait so many rows were there."""
        self._full_waits.append(rows)
        self._early = 0

    def closed_early(self) -> None:
        """A batch was closed because `enough` rows waited."""
        self._early += 1


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
