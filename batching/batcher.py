"""Forms batches, first come first served.

It owns the rows that wait and nothing else; time is an argument. Its invariant: each added row leaves exactly once,
through `due`, `remove` or `drain`, and no batch exceeds a bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from batching.types import Batch, CloseReason, Limits, Row, RowTooLong

T = TypeVar("T")


class Batcher(Generic[T]):
    """Rows in, batches out. All times are seconds on one clock of the caller's."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._rows: deque[Row[T]] = deque()
        # How far the batch now forming reaches, so that each row is looked at once, not at every question.
        self._forming = 0
        self._longest = 0
        self._oldest = float("inf")
        self._closed: CloseReason | None = None

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def oldest(self) -> float:
        """When the oldest row of the next batch was enqueued; infinity when there is none."""
        return self._oldest

    def add(self, row: Row[T], now: float) -> None:
        """Take a row in. Raises `RowTooLong` for a row that fits no batch; it is not taken in."""
        if row.tokens > self.limits.max_batch_tokens:
            raise RowTooLong(row.tokens, self.limits.max_batch_tokens)
        self._rows.append(row)
        if self._closed is None:
            self._extend(row)

    def due(self, now: float) -> Batch[T] | None:
        """The next batch, when one is due at `now`: it is full, or its oldest row has waited long enough.

        Ask when the device is free: a batch is formed as late as possible, so that it holds as many rows as possible.
        """
        wakeup = self.next_wakeup(now)
        if wakeup is None or wakeup > now:
            return None
        rows = tuple(self._rows.popleft() for _ in range(self._forming))
        batch = Batch(rows, self._longest, self._closed or CloseReason.WAIT)
        self._form_next()
        return batch

    def next_wakeup(self, now: float) -> float | None:
        """When a batch will be due if nothing is added: not after `now` when one is due already; None without rows."""
        if not self._rows:
            return None
        return now if self._closed is not None else self._oldest + self.limits.max_wait_s

    def remove(self, gone: Callable[[T], bool]) -> int:
        """Take out the rows whose payload is `gone`, wherever they wait; returns how many that were."""
        before = len(self._rows)
        self._rows = deque(row for row in self._rows if not gone(row.payload))
        self._form_next()
        return before - len(self._rows)

    def drain(self) -> list[Row[T]]:
        """All rows that wait, oldest first; none is left."""
        rows = list(self._rows)
        self._rows.clear()
        self._form_next()
        return rows

    def _form_next(self) -> None:
        self._forming = 0
        self._longest = 0
        self._oldest = float("inf")
        self._closed = None
        for row in self._rows:
            self._extend(row)
            if self._closed is not None:
                return

    def _extend(self, row: Row[T]) -> None:
        longest = max(self._longest, row.tokens)
        if longest * (self._forming + 1) > self.limits.max_batch_tokens:
            self._closed = CloseReason.TOKENS
            return
        self._longest = longest
        # A message that was given back may come in behind younger ones; it waits no longer for that.
        self._oldest = min(self._oldest, row.enqueued_at)
        self._forming += 1
        if self._forming == self.limits.max_batch_size:
            self._closed = CloseReason.FULL
