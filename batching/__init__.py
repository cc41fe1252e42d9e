"""What to run next, and when: a pure state machine. No I/O, no clock of its own, no threads."""

from batching.batcher import Batcher
from batching.cost import CostFit, CostModel
from batching.scheduler import Scheduler
from batching.types import LEVELS, LOWEST, Batch, CloseReason, Limits, Row, RowTooLong

__all__ = [
    "LEVELS",
    "LOWEST",
    "Batch",
    "Batcher",
    "CloseReason",
    "CostFit",
    "CostModel",
    "Limits",
    "Row",
    "RowTooLong",
    "Scheduler",
]
