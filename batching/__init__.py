"""What to run next, and when: a pure state machine. No I/O, no clock of its own, no threads."""

from batching.batcher import Batcher
from batching.types import Batch, CloseReason, Limits, Row, RowTooLong

__all__ = ["Batch", "Batcher", "CloseReason", "Limits", "Row", "RowTooLong"]
