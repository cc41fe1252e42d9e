"""Forms the batches of one model: the row whose turn it is leads, rows of like length fill.

It owns the rows that wait and nothing else; time is an argument. Its invariant: each added row leaves exactly once,
through `due`, `remove` or `drain`, and no batch exceeds a bound.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from typing import Generic, TypeVar

from batching.brevity import Brevity
from batching.cost import CostFit
from batching.level import Level
from batching.patience import ArrivalRate, Patience, worth_waiting_s
from batching.planning import together_with
from batching.types import LEVELS, LOWEST, Batch, CloseReason, Limits, Row, RowTooLong

T = TypeVar("T")

#: How long before a row's deadline its batch is closed, seconds: it has to begin in time.
DEADLINE_MARGIN_S = 0.02
#: A batch of callers' rows takes at most so many times as long for the rows of the lowest level that fill it.
FILLED = 1.1
#: A row leads when it would expire within so many batches: it may not be the only one whose deadline is near.
LOOK_AHEAD = 2


class _Cause(Enum):
    """Why a batch is due."""

    #: What waits fills a batch.
    ENOUGH = auto()
    #: The oldest row's wait is over.
    WAITED = auto()
    #: As many rows wait as are worth waiting for.
    ALL_THERE = auto()
    #: The next row is not worth waiting for.
    NOT_WORTH_IT = auto()
    #: A row is about to expire.
    DEADLINE = auto()


class Batcher(Generic[T]):
    """Rows in, batches out. All times are seconds on one clock of the caller's.

    `cost` is what the device was seen to take; whoever runs the batches adds to it.
    """

    def __init__(self, limits: Limits, cost: CostFit | None = None) -> None:
        self.limits = limits
        self.cost = cost or CostFit()
        self._levels: list[Level[T]] = [Level() for _ in range(LEVELS)]
        self._lengths: Counter[int] = Counter()
        self._count = 0
        self._longest = 0
        self._oldest = math.inf
        self._deadline = math.inf
        self._last_added = -math.inf
        self._patience = Patience(limits.max_wait_s)
        self._arrivals = ArrivalRate()
        self._brevity = Brevity()
        #: The device asked for a batch while these rows waited, and got none.
        self._kept_waiting = False

    def __len__(self) -> int:
        return self._count

    @property
    def oldest(self) -> float:
        """When the oldest row that waits was enqueued; infinity when there is none."""
        return self._oldest

    def levels(self) -> list[int]:
        """The priority levels that wait, the highest first."""
        return [number for number, level in enumerate(self._levels) if level.rows]

    def rows_at(self, level: int) -> int:
        """How many rows of this priority level wait."""
        return len(self._levels[level].rows)

    def add(self, row: Row[T], now: float) -> None:
        """Take a row in. Raises `RowTooLong` for a row that fits no batch; it is not taken in."""
        if not 0 <= row.level < LEVELS:
            raise ValueError(f"the levels are 0 to {LEVELS - 1}, not {row.level}")
        if row.tokens > self.limits.max_batch_tokens:
            raise RowTooLong(row.tokens, self.limits.max_batch_tokens)
        self._levels[row.level].add(row)
        self._lengths[row.tokens] += 1
        self._count += 1
        self._longest = max(self._longest, row.tokens)
        self._oldest = min(self._oldest, row.enqueued_at)
        if row.deadline is not None:
            self._deadline = min(self._deadline, row.deadline)
        self._last_added = now
        if row.level != LOWEST:
            self._brevity.came(now)
        if self.limits.adaptive_wait:
            self._arrivals.add(now)

    def next_wakeup(self, now: float) -> float | None:
        """When a batch will be due if nothing is added: not after `now` when one is due already; None without rows."""
        if not self._count:
            return None
        return min(moment for moment, _ in self._causes(now))

    def due(self, now: float, level: int | None = None, *, callers_only: bool = False) -> Batch[T] | None:
        """The next batch, led by a row of `level` (default: the highest that waits), when one is due at `now`.

        Ask when the device is free, or about to be: a batch is formed as late as possible, so that it holds as many
        rows as possible. With `callers_only` it has no row of the lowest level.
        """
        if not self._count:
            return None
        moment, cause = min(self._causes(now), key=lambda found: found[0])
        if moment > now:
            self._kept_waiting = True
            return None
        planned = self._planned(self.levels()[0] if level is None else level, now, callers_only=callers_only)
        rows = self._trimmed(planned, now)
        longest = max(row.tokens for row in rows)
        batch = Batch(tuple(rows), longest, self._reason(cause, len(rows), len(planned), longest))
        self._learn(cause, len(rows), now)
        self._serve(rows)
        return batch

    def remove(self, gone: Callable[[T], bool]) -> int:
        """Take out the rows whose payload is `gone`, wherever they wait; returns how many that were."""
        rows = [row for level in self._levels for row in level.rows if gone(row.payload)]
        self._withdraw(rows)
        return len(rows)

    def drain(self) -> list[Row[T]]:
        """All rows that wait, oldest first; none is left."""
        rows = sorted((row for level in self._levels for row in level.rows), key=lambda row: row.enqueued_at)
        self._withdraw(rows)
        return rows

    def _causes(self, now: float) -> Iterable[tuple[float, _Cause]]:
        """The moments at which a batch is due, each with its cause. At least one row waits."""
        limits = self.limits
        if self._count >= limits.full_size or self._longest * (self._count + 1) > limits.max_batch_tokens:
            yield now, _Cause.ENOUGH
            return
        yield self._oldest + limits.max_wait_s, _Cause.WAITED
        if self._count >= self._patience.enough(now):
            yield now, _Cause.ALL_THERE
        if limits.adaptive_wait:
            gap_s = self._arrivals.gap_s(now)
            patience_s = worth_waiting_s(self._count, gap_s, self.cost.model.overhead_s)
            yield self._last_added + patience_s, _Cause.NOT_WORTH_IT
        if self._deadline < math.inf:
            yield self._deadline - DEADLINE_MARGIN_S, _Cause.DEADLINE

    def _planned(self, level: int, now: float, *, callers_only: bool) -> Sequence[Row[T]]:
        """The rows that should run next, the one that leads first; no more than a batch may hold."""
        leading = self._levels[level]
        if callers_only:
            limits = self.limits
            candidates, most_tokens = self._candidates(level, limits.max_batch_size, LOWEST), limits.max_batch_tokens
        else:
            candidates, most_tokens = self._open_to(level, now)
        if len(self._lengths) == 1 and self._deadline == math.inf:
            # Rows of one length need no plan: they run in their order.
            return candidates[: self._most(self._longest, most_tokens)]
        rows = self._alike(candidates, most_tokens)
        if leading.deadlines:
            seconds = self.cost.model.seconds(max(row.tokens for row in rows) * len(rows))
            urgent = leading.urgent(now, now + LOOK_AHEAD * seconds + DEADLINE_MARGIN_S)
            if not set(urgent) <= set(self._trimmed(rows, now)):
                rest = set(urgent)
                rows = self._alike([*urgent, *(row for row in candidates if row not in rest)], most_tokens)
        return rows

    def _open_to(self, level: int, now: float) -> tuple[list[Row[T]], int]:
        """The rows that a batch led by `level` may have, in their order, and how many padded tokens.

        While callers are about, one with rows of the lowest level is brief; theirs is filled with such rows only where
        it takes hardly longer with them.
        """
        size, tokens = self.limits.max_batch_size, self.limits.max_batch_tokens
        brief = self._brevity.most_tokens(now, self.cost.model) if self._levels[LOWEST].rows else math.inf
        if brief < math.inf and level != LOWEST:
            callers = self._candidates(level, size, LOWEST)
            alike = self._alike(callers, tokens)
            longest = max(row.tokens for row in alike)
            brief = min(brief, FILLED * longest * len(alike) + (FILLED - 1) * self.cost.model.overhead_tokens)
            if longest * (len(alike) + 1) > brief:
                return callers, tokens
        return self._candidates(level, size), int(min(brief, tokens))

    def _candidates(self, level: int, enough: int, levels: int = LEVELS) -> list[Row[T]]:
        """The rows of `level` in their order; while they are not enough those of the other levels too, high before low.

        Only the first `levels` are looked at.
        """
        candidates = self._levels[level].ordered()
        for other in range(levels):
            if len(candidates) >= enough:
                break
            if other != level:
                candidates = candidates + self._levels[other].ordered()
        return candidates

    def _alike(self, candidates: Sequence[Row[T]], most_tokens: int) -> list[Row[T]]:
        """The first of the candidates and those that should run with it, in their order, of so many padded tokens."""
        leader = candidates[0]
        lengths = sorted([row.tokens for row in candidates])
        begin, end = together_with(
            bisect_left(lengths, leader.tokens),
            lengths,
            self.cost.model.overhead_tokens,
            self.limits.max_batch_size,
            most_tokens,
        )
        shortest, longest = lengths[begin], lengths[end - 1]
        return [row for row in candidates if shortest <= row.tokens <= longest][: end - begin]

    def _trimmed(self, rows: Sequence[Row[T]], now: float) -> Sequence[Row[T]]:
        """A preferred number of these rows, where that holds up no row."""
        preferred = max((size for size in self.limits.preferred_sizes if size <= len(rows)), default=len(rows))
        wait_s = self.limits.max_wait_s
        if self._count > len(rows) or all(row.enqueued_at + wait_s > now for row in rows[preferred:]):
            return rows[:preferred]
        return rows

    def _most(self, longest: int, most_tokens: int) -> int:
        """Rows of a batch whose longest row has so many tokens; one row always may run."""
        size = self.limits.max_batch_size
        return max(1, min(size, most_tokens // longest)) if longest else size

    def _learn(self, cause: _Cause, rows: int, now: float) -> None:
        match cause:
            case _Cause.ALL_THERE:
                self._patience.closed_early(self._count)
            case _Cause.WAITED if self._kept_waiting:
                self._patience.waited_in_full(self._count, now)
        self._patience.left(rows, now)

    def _reason(self, cause: _Cause, rows: int, planned: int, longest: int) -> CloseReason:
        """Why the batch has so many rows: first what bounds it, then what made it due."""
        limits = self.limits
        left = self._count - rows
        if rows >= limits.full_size or rows < planned or (not left and longest * (rows + 1) > limits.max_batch_tokens):
            return CloseReason.FULL
        if cause is _Cause.DEADLINE:
            return CloseReason.DEADLINE
        if left:
            return CloseReason.TOKENS
        return CloseReason.WAIT if cause is _Cause.WAITED and self._kept_waiting else CloseReason.IDLE

    def _serve(self, rows: Sequence[Row[T]]) -> None:
        callers = [row.tokens for row in rows if row.level != LOWEST]
        if callers:
            self._brevity.ran(self.cost.model.seconds(max(callers) * len(callers)))
        for number, level in enumerate(self._levels):
            level.serve([row for row in rows if row.level == number])
        self._left(rows)

    def _withdraw(self, rows: Sequence[Row[T]]) -> None:
        for number, level in enumerate(self._levels):
            level.withdraw([row for row in rows if row.level == number])
        self._left(rows)

    def _left(self, rows: Sequence[Row[T]]) -> None:
        """These rows wait no longer."""
        for tokens, count in Counter(row.tokens for row in rows).items():
            self._lengths[tokens] -= count
            if not self._lengths[tokens]:
                del self._lengths[tokens]
        self._count -= len(rows)
        self._longest = max(self._lengths, default=0)
        self._oldest = min(level.oldest for level in self._levels)
        self._deadline = min(level.deadline for level in self._levels)
        self._kept_waiting = False
