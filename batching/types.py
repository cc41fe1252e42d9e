"""What goes into the batcher and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

T = TypeVar("T")


class RowTooLong(ValueError):
    """A row alone is over `max_batch_tokens`; no batch could ever hold it."""

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(f"the row has {tokens} tokens, a batch holds {limit}: shorten it or raise max_batch_tokens")
        self.tokens = tokens
        self.limit = limit


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a batch. `max_batch_tokens` counts padding: longest row x number of rows."""

    max_batch_size: int
    max_batch_tokens: int
    #: Seconds from enqueue after which a row is due although its batch is not full.
    max_wait_s: float

    def __post_init__(self) -> None:
        if self.max_batch_size < 1 or self.max_batch_tokens < 1 or self.max_wait_s < 0:
            raise ValueError(f"a batch holds at least one row and one token, and waits no negative time: {self}")


@dataclass(slots=True, eq=False)
class Row(Generic[T]):
    """One row that waits. `enqueued_at` is on the caller's clock, in seconds, and may lie before the row was added."""

    payload: T
    tokens: int
    enqueued_at: float


class CloseReason(StrEnum):
    """Why a batch takes no more rows."""

    FULL = "full"
    TOKENS = "tokens"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class Batch(Generic[T]):
    """Rows that run together, oldest first; `longest` is the tokens of the longest."""

    rows: tuple[Row[T], ...]
    longest: int
    reason: CloseReason

    @property
    def padded_tokens(self) -> int:
        return self.longest * len(self.rows)

    @property
    def tokens(self) -> int:
        return sum(row.tokens for row in self.rows)
