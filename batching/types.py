"""What goes into the batcher and what comes out of it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

T = TypeVar("T")

#: Priority levels of rows, 0 is served first: one for each of Celery's four priority lists.
LEVELS = 4
#: The one whose rows nobody waits for.
LOWEST = LEVELS - 1


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
    #: Numbers of rows that the device runs best, ascending; none for no preference.
    preferred_sizes: tuple[int, ...] = ()
    #: Wait, within `max_wait_s`, only while another row is likely to come soon enough to be worth it.
    adaptive_wait: bool = False

    def __post_init__(self) -> None:
        if self.max_batch_size < 1 or self.max_batch_tokens < 1 or self.max_wait_s < 0:
            raise ValueError(f"a batch holds at least one row and one token, and waits no negative time: {self}")
        if any(not 1 <= size <= self.max_batch_size for size in self.preferred_sizes):
            raise ValueError(f"preferred sizes lie between 1 and max_batch_size: {self}")

    @property
    def full_size(self) -> int:
        """Rows of a batch that more rows would make no better."""
        return self.preferred_sizes[-1] if self.preferred_sizes else self.max_batch_size


@dataclass(slots=True, eq=False)
class Row(Generic[T]):
    """One row that waits. Times are seconds on the caller's clock; `enqueued_at` may lie before the row was added."""

    payload: T
    tokens: int
    enqueued_at: float
    #: 0 is served first.
    level: int = 0
    #: Whose row it is: flows share a level fairly. None for a row that is a flow of its own.
    flow: Hashable = None
    #: When it expires unless it has begun; None for never.
    deadline: float | None = None
    #: The batcher's: its place in the fair order of its level, and whether it still waits.
    tag: float = field(default=0.0, repr=False)
    waiting: bool = field(default=False, repr=False)


class CloseReason(StrEnum):
    """Why a batch takes no more rows."""

    #: It holds as many rows as a batch may, or a number that is preferred to that of all which would fit.
    FULL = "full"
    #: Others wait on: with them it would cost more padding than a batch more does, or exceed `max_batch_tokens`.
    TOKENS = "tokens"
    #: The device was free, and the oldest row had waited for `max_wait_s`.
    WAIT = "wait"
    #: The device came free, or more rows were not to be expected or not worth the wait, and this was all that waited.
    IDLE = "idle"
    #: A row would have expired.
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True)
class Batch(Generic[T]):
    """Rows that run together, the one that leads it first; `longest` is the tokens of the longest."""

    rows: tuple[Row[T], ...]
    longest: int
    reason: CloseReason

    @property
    def padded_tokens(self) -> int:
        return self.longest * len(self.rows)

    @property
    def tokens(self) -> int:
        return sum(row.tokens for row in self.rows)
