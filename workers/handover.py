"""What reaches the settler: batches that have run, and jobs that ended without one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from batching import CloseReason
from workers.jobs import Burial, Ending
from workers.lane import Lane, RowRef


@dataclass(frozen=True, slots=True)
class RunBatch:
    """A batch that the device has run, on its way to be settled."""

    lane: Lane
    rows: tuple[RowRef, ...]
    #: What the lane's executor made of them, for its own `finish`.
    inferred: Any
    infer_s: float
    longest: int
    reason: CloseReason


@dataclass(frozen=True, slots=True)
class Endings:
    """Jobs of a lane that ended without a batch."""

    lane: Lane
    endings: Sequence[Ending]


@dataclass(frozen=True, slots=True)
class Burials:
    """Messages of a lane that go to the dead letters."""

    lane: Lane
    burials: Sequence[Burial]


_Item = RunBatch | Endings | Burials | None


class Handover:
    """The queue before the settler, in order. It holds `depth` items; then whoever brings more waits."""

    def __init__(self, depth: int) -> None:
        self._items: queue.SimpleQueue[tuple[_Item, bool]] = queue.SimpleQueue()
        self._room = threading.Semaphore(depth)

    def put(self, item: RunBatch | Endings | Burials) -> None:
        self._room.acquire()
        self._items.put((item, True))

    def put_at_once(self, item: Endings | Burials) -> None:
        """Beyond the depth, for a thread that must not wait: its leases would not be renewed meanwhile."""
        self._items.put((item, False))

    def end(self) -> None:
        """After what is there, no more comes."""
        self._items.put((None, False))

    def get(self) -> _Item:
        """The next item, as soon as there is one; None when no more comes."""
        item, counted = self._items.get()
        if counted:
            self._room.release()
        return item
