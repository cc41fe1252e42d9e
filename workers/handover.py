"""What reaches the settler: batches that have run, and jobs that ended without one."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass

from batching import CloseReason
from inference import Inferred
from workers.jobs import Burial, Ending
from workers.lane import Lane, RowRef


@dataclass(frozen=True, slots=True)
class RunBatch:
    """A batch that the device has run, on its way to be settled."""

    lane: Lane
    rows: tuple[RowRef, ...]
    inferred: Inferred
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


#: The bounded queue before the settler; None ends it.
Handover = queue.Queue[RunBatch | Endings | Burials | None]
