"""The batcher's promises, as properties over all sequences of events that hypothesis can think of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batching import Batcher, CloseReason, Limits, Row, RowTooLong

LIMITS = Limits(max_batch_size=4, max_batch_tokens=40, max_wait_s=1.0)


def filled(*rows: tuple[int, float], limits: Limits = LIMITS) -> Batcher[int]:
    """A batcher with rows of (tokens, enqueued_at), numbered from 0."""
    batcher: Batcher[int] = Batcher(limits)
    for number, (tokens, enqueued_at) in enumerate(rows):
        batcher.add(Row(number, tokens, enqueued_at), enqueued_at)
    return batcher


def test_a_full_batch_is_due_at_once() -> None:
    batch = filled(*[(1, 0.0)] * 5).due(0.0)
    assert batch is not None
    assert [row.payload for row in batch.rows] == [0, 1, 2, 3]
    assert batch.reason is CloseReason.FULL


def test_a_batch_that_another_row_would_make_too_long_is_due_at_once() -> None:
    batcher = filled((10, 0.0), (10, 0.0), (20, 0.0))
    batch = batcher.due(0.0)
    assert batch is not None
    assert (len(batch.rows), batch.padded_tokens, batch.tokens) == (2, 20, 20)
    assert batch.reason is CloseReason.TOKENS
    assert len(batcher) == 1


def test_a_lone_row_waits_until_its_time_is_over() -> None:
    batcher = filled((1, 10.0))
    assert batcher.next_wakeup(10.5) == 11.0
    assert batcher.due(10.99) is None
    batch = batcher.due(11.0)
    assert batch is not None
    assert batch.reason is CloseReason.WAIT


def test_a_row_that_waited_elsewhere_does_not_wait_again() -> None:
    batcher: Batcher[int] = Batcher(LIMITS)
    batcher.add(Row(0, 1, enqueued_at=3.0), now=100.0)
    assert batcher.due(100.0) is not None


def test_an_old_row_behind_a_young_one_is_not_held_up_by_it() -> None:
    batcher = filled((1, 10.0))
    batcher.add(Row(1, 1, enqueued_at=9.2), now=10.0)
    assert batcher.oldest == 9.2
    assert batcher.next_wakeup(10.0) == pytest.approx(10.2)
    batch = batcher.due(10.2)
    assert batch is not None
    assert len(batch.rows) == 2


def test_without_rows_nothing_is_due() -> None:
    batcher = filled()
    assert batcher.due(1e9) is None
    assert batcher.next_wakeup(1e9) is None


def test_a_row_over_the_token_limit_is_refused_and_not_kept() -> None:
    batcher = filled((1, 0.0))
    with pytest.raises(RowTooLong, match="41 tokens, a batch holds 40"):
        batcher.add(Row(1, 41, 0.0), 0.0)
    assert len(batcher) == 1


def test_a_row_of_exactly_the_token_limit_runs_alone() -> None:
    batch = filled((40, 0.0), (1, 0.0)).due(0.0)
    assert batch is not None
    assert len(batch.rows) == 1


def test_drain_gives_everything_back_in_order() -> None:
    batcher = filled(*[(1, 0.0)] * 6)
    assert [row.payload for row in batcher.drain()] == [0, 1, 2, 3, 4, 5]
    assert batcher.due(1e9) is None


@pytest.mark.parametrize("limits", [(0, 1, 0.0), (1, 0, 0.0), (1, 1, -0.1)])
def test_bounds_that_no_batch_can_keep_are_refused(limits: tuple[int, int, float]) -> None:
    with pytest.raises(ValueError, match="at least one row"):
        Limits(*limits)


@given(
    sizes=st.lists(st.integers(1, 40), max_size=60),
    size=st.integers(1, 8),
    tokens=st.integers(40, 100),
)
def test_a_backlog_is_cut_into_batches_that_keep_every_bound_and_order(
    sizes: list[int], size: int, tokens: int
) -> None:
    batcher = filled(*((n, 0.0) for n in sizes), limits=Limits(size, tokens, 0.0))
    seen: list[int] = []
    while (batch := batcher.due(0.0)) is not None:
        assert 1 <= len(batch.rows) <= size
        assert batch.padded_tokens <= tokens
        assert batch.longest == max(row.tokens for row in batch.rows)
        seen += [row.payload for row in batch.rows]
    assert seen == list(range(len(sizes)))


class DeviceThatIsAlwaysFree(RuleBasedStateMachine):
    """Rows arrive, time passes, and whoever owns the device asks whenever the batcher said it should."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.batcher: Batcher[int] = Batcher(LIMITS)
        self.added = 0
        self.left: list[int] = []
        self.enqueued_at: dict[int, float] = {}

    @rule(tokens=st.integers(1, 40), age=st.floats(0, 3))
    def add(self, tokens: int, age: float) -> None:
        self.batcher.add(Row(self.added, tokens, self.now - age), self.now)
        self.enqueued_at[self.added] = self.now - age
        self.added += 1
        self.take_what_is_due()

    @rule(seconds=st.floats(0, 2))
    def let_time_pass(self, seconds: float) -> None:
        end = self.now + seconds
        while (wakeup := self.batcher.next_wakeup(self.now)) is not None and wakeup <= end:
            self.now = max(self.now, wakeup)
            self.take_what_is_due()
        self.now = end

    @precondition(lambda self: len(self.batcher) > 0)
    @rule()
    def drain(self) -> None:
        self.left += [row.payload for row in self.batcher.drain()]

    def take_what_is_due(self) -> None:
        while (batch := self.batcher.due(self.now)) is not None:
            assert len(batch.rows) <= LIMITS.max_batch_size
            assert batch.padded_tokens <= LIMITS.max_batch_tokens
            self.left += [row.payload for row in batch.rows]

    @invariant()
    def every_row_leaves_once_and_in_order(self) -> None:
        assert self.left == list(range(len(self.left)))
        assert len(self.left) + len(self.batcher) == self.added

    @invariant()
    def no_row_waits_past_its_bound(self) -> None:
        waiting = [self.enqueued_at[number] for number in range(len(self.left), self.added)]
        assert all(moment + LIMITS.max_wait_s > self.now for moment in waiting)


TestDeviceThatIsAlwaysFree = DeviceThatIsAlwaysFree.TestCase
