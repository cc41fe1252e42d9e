"""The rows of one priority level, in the order in which they are to lead a batch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from batching.fairness import FairOrder
from batching.types import Row

T = TypeVar("T")


class Level(Generic[T]):
    """The oldest row leads, among those of flows that have not had more than their fair part."""

    def __init__(self) -> None:
        self.rows: list[Row[T]] = []
        #: How many of them have a deadline.
        self.deadlines = 0
        self._fair = FairOrder()
        #: Whether `rows` is in order as it stands: no flow is shared, and each row is younger than the one before.
        self._in_order = True

    @property
    def oldest(self) -> float:
        """When the oldest row was enqueued; infinity without rows."""
        if self._in_order:
            return self.rows[0].enqueued_at if self.rows else math.inf
        return min((row.enqueued_at for row in self.rows), default=math.inf)

    @property
    def deadline(self) -> float:
        """The earliest deadline; infinity without one."""
        if not self.deadlines:
            return math.inf
        return min(row.deadline for row in self.rows if row.deadline is not None)

    def add(self, row: Row[T]) -> None:
        if row.flow is not None or (self.rows and row.enqueued_at < self.rows[-1].enqueued_at):
            self._in_order = False
        row.tag = self._fair.enter(row.flow, _part(row))
        row.waiting = True
        self.deadlines += row.deadline is not None
        self.rows.append(row)

    def ordered(self) -> list[Row[T]]:
        """All rows, the one that leads first."""
        if not self._in_order:
            clock = self._fair.clock
            self.rows.sort(key=lambda row: (max(row.tag, clock), row.enqueued_at))
        return self.rows

    def urgent(self, now: float, until: float) -> list[Row[T]]:
        """The rows that have not expired yet but will have by `until`, the earliest deadline first."""
        rows = [row for row in self.rows if row.deadline is not None and now < row.deadline <= until]
        return sorted(rows, key=lambda row: row.deadline or 0.0)

    def serve(self, rows: Sequence[Row[T]]) -> None:
        """These rows are about to run: each counts as a part that its flow has had."""
        if rows:
            self._leave(rows)
            least = None
            if self.rows:
                least = self.rows[0].tag if self._in_order else min(row.tag for row in self.rows)
            self._fair.served(sum(map(_part, rows)), least)

    def withdraw(self, rows: Sequence[Row[T]]) -> None:
        """These rows will not run: what their flows were charged for them is given back, also to rows behind them."""
        self._leave(rows)
        gone: defaultdict[Hashable, list[Row[T]]] = defaultdict(list)
        for row in rows:
            self._fair.give_back(row.flow, _part(row))
            if row.flow is not None:
                gone[row.flow].append(row)
        if gone and self.rows:
            for row in self.rows:
                if row.flow in gone:
                    gone[row.flow].append(row)
            for of_flow in gone.values():
                _move_up(of_flow)

    def _leave(self, rows: Sequence[Row[T]]) -> None:
        for row in rows:
            row.waiting = False
            self._fair.leave(row.flow)
            self.deadlines -= row.deadline is not None
        if any(row.waiting for row in self.rows[: len(rows)]):
            self.rows = [row for row in self.rows if row.waiting]
        else:
            del self.rows[: len(rows)]
        if not self.rows:
            self._in_order = True


def _move_up(rows: Sequence[Row[T]]) -> None:
    """Those rows of one flow that wait close the gaps that the others have left."""
    freed = 0
    for row in sorted(rows, key=lambda row: row.tag):
        if row.waiting:
            row.tag -= freed
        else:
            freed += _part(row)


def _part(row: Row[T]) -> int:
    """What a row counts in its flow, tokens: a flood of rows without any is a flood too."""
    return row.tokens or 1
