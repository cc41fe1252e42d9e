"""What a lane remembers of the rows that came, until the keeper notes it on the broker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Generic, TypeVar

from broker import TrafficRow
from broker.traffic import MAX_NOTED

T = TypeVar("T")


class TrafficSample(Generic[T]):
    """Every n-th row that came since the last `take`; n doubles whenever they become too many.

    So whatever comes, a note costs the broker the same, and the feeder a slice of a list for each lease.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._rows: list[T] = []
        self._seen = 0
        self._stride = 1

    def add(self, rows: Sequence[T]) -> None:
        """Rows that came."""
        with self._lock:
            self._rows += rows[-self._seen % self._stride :: self._stride]
            self._seen += len(rows)
            while len(self._rows) > MAX_NOTED:
                self._rows = self._rows[::2]
                self._stride *= 2

    def take(self, noted: Callable[[T, int], TrafficRow]) -> list[TrafficRow]:
        """What was kept since the last time, each as `noted` makes it of the row and how many it stands for."""
        with self._lock:
            rows, stride = self._rows, self._stride
            self._rows, self._seen, self._stride = [], 0, 1
        return [noted(row, stride) for row in rows]
