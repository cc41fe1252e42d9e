"""The batcher's promises, as properties over all sequences of events that hypothesis can think of."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batching import LEVELS, Batcher, CloseReason, CostFit, CostModel, Limits, Row, RowTooLong
from batching.batcher import DEADLINE_MARGIN_S

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


def test_a_batch_that_no_further_row_would_fit_is_full() -> None:
    batch = filled(*[(20, 0.0)] * 2).due(0.0)
    assert batch is not None
    assert (len(batch.rows), batch.reason) == (2, CloseReason.FULL)


def test_what_waits_when_the_device_comes_free_goes_as_idle() -> None:
    batch = filled((1, 0.0), (1, 0.5)).due(5.0)
    assert batch is not None
    assert (len(batch.rows), batch.reason) == (2, CloseReason.IDLE)


def test_rows_of_unlike_length_are_left_for_a_batch_of_their_own() -> None:
    batcher = filled((1, 0.0), (2000, 0.0), (2, 0.0), limits=Limits(3, 100_000, 1.0))
    batch = batcher.due(0.0)
    assert batch is not None
    assert ([row.payload for row in batch.rows], batch.reason) == ([0, 2], CloseReason.TOKENS)


def test_a_batch_of_one_row_is_always_full() -> None:
    batcher = filled((1, 0.0), (30, 0.0), limits=Limits(1, 40, 1.0))
    for number in range(2):
        batch = batcher.due(0.0)
        assert batch is not None
        assert ([row.payload for row in batch.rows], batch.reason) == ([number], CloseReason.FULL)


def test_a_row_that_is_about_to_expire_is_not_waited_for() -> None:
    batcher: Batcher[int] = Batcher(LIMITS)
    batcher.add(Row(0, 1, 0.0, deadline=0.5), 0.0)
    closes = 0.5 - DEADLINE_MARGIN_S
    assert batcher.next_wakeup(0.0) == closes
    assert batcher.due(0.4) is None
    batch = batcher.due(closes)
    assert batch is not None
    assert batch.reason is CloseReason.DEADLINE


def test_rows_that_would_expire_during_the_next_batch_lead_it_together() -> None:
    batcher: Batcher[int] = Batcher(Limits(4, 40, 1.0), CostFit(CostModel(90.0, 0.001)))
    for number in range(20):
        batcher.add(Row(number, 1, 0.0, deadline=10.0 - number / 100 if number in (9, 15) else None), 0.0)
    batch = batcher.due(0.0)
    assert batch is not None
    assert [row.payload for row in batch.rows] == [15, 9, 0, 1]


def test_a_row_with_a_deadline_does_not_overtake_a_higher_level() -> None:
    batcher: Batcher[int] = Batcher(Limits(2, 40, 1.0), CostFit(CostModel(90.0, 0.001)))
    for number, (level, deadline) in enumerate([(1, 10.0), (0, None), (0, None)]):
        batcher.add(Row(number, 1, 0.0, level, deadline=deadline), 0.0)
    batch = batcher.due(0.0)
    assert batch is not None
    assert [row.payload for row in batch.rows] == [1, 2]


PREFERRED = Limits(8, 1000, 1.0, preferred_sizes=(2, 4, 8))


def test_a_preferred_number_of_rows_is_taken_while_the_rest_may_wait() -> None:
    batcher = filled(*[(1, 0.0)] * 4, *[(1, 0.5)] * 2, limits=PREFERRED)
    batch = batcher.due(1.0)
    assert batch is not None
    assert (len(batch.rows), batch.reason) == (4, CloseReason.FULL)


def test_no_row_whose_wait_is_over_stays_for_a_preferred_number() -> None:
    batch = filled(*[(1, 0.0)] * 6, limits=PREFERRED).due(1.0)
    assert batch is not None
    assert len(batch.rows) == 6


@given(st.integers(9, 60), st.sampled_from([(8,), (2, 8), (1, 4), (3,)]))
def test_a_backlog_runs_in_preferred_numbers(rows: int, preferred: tuple[int, ...]) -> None:
    batcher = filled(*[(1, 0.0)] * rows, limits=Limits(8, 1000, 0.0, preferred))
    while len(batcher) > 8:
        batch = batcher.due(0.0)
        assert batch is not None
        assert len(batch.rows) == preferred[-1]


@given(
    sizes=st.lists(st.integers(1, 40), max_size=60),
    size=st.integers(1, 8),
    tokens=st.integers(40, 100),
)
def test_a_backlog_is_cut_into_batches_that_keep_every_bound_and_the_oldest_leads(
    sizes: list[int], size: int, tokens: int
) -> None:
    batcher = filled(*((n, 0.0) for n in sizes), limits=Limits(size, tokens, 0.0))
    left = list(range(len(sizes)))
    while (batch := batcher.due(0.0)) is not None:
        assert 1 <= len(batch.rows) <= size
        assert batch.padded_tokens <= tokens
        assert batch.longest == max(row.tokens for row in batch.rows)
        assert batch.rows[0].payload == left[0]
        for row in batch.rows:
            left.remove(row.payload)
    assert left == []


class DeviceThatIsAlwaysFree(RuleBasedStateMachine):
    """Rows arrive, time passes, and whoever owns the device asks whenever the batcher said it should."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.limits = LIMITS
        self.batcher: Batcher[int] = Batcher(LIMITS)
        self.rows: dict[int, Row[int]] = {}
        self.added = 0

    @initialize(
        size=st.integers(1, 6),
        preferred=st.lists(st.integers(1, 6), max_size=2),
        adaptive=st.booleans(),
    )
    def choose_limits(self, size: int, preferred: list[int], adaptive: bool) -> None:
        sizes = tuple(sorted({min(size, wanted) for wanted in preferred}))
        self.limits = Limits(size, 40, 1.0, sizes, adaptive)
        self.batcher = Batcher(self.limits)

    @rule(
        tokens=st.integers(0, 40),
        age=st.floats(0, 3),
        level=st.integers(0, LEVELS - 1),
        flow=st.sampled_from([None, None, "a", "b"]),
        expires_in=st.none() | st.floats(-1, 3),
    )
    def add(self, tokens: int, age: float, level: int, flow: str | None, expires_in: float | None) -> None:
        deadline = None if expires_in is None else self.now + expires_in
        row = Row(self.added, tokens, self.now - age, level, flow, deadline)
        self.rows[self.added] = row
        self.added += 1
        self.batcher.add(row, self.now)
        self.take_what_is_due()

    @rule(seconds=st.floats(0, 2))
    def let_time_pass(self, seconds: float) -> None:
        end = self.now + seconds
        while (wakeup := self.batcher.next_wakeup(self.now)) is not None and wakeup <= end:
            self.now = max(self.now, wakeup)
            self.take_what_is_due()
        self.now = end

    @rule(parity=st.integers(0, 1))
    def remove(self, parity: int) -> None:
        gone = [number for number in self.rows if number % 2 == parity]
        assert self.batcher.remove(lambda number: number % 2 == parity) == len(gone)
        for number in gone:
            del self.rows[number]

    @precondition(lambda self: self.rows)
    @rule()
    def drain(self) -> None:
        drained = self.batcher.drain()
        assert sorted(row.payload for row in drained) == sorted(self.rows)
        self.rows.clear()

    def take_what_is_due(self) -> None:
        while (batch := self.batcher.due(self.now)) is not None:
            assert 1 <= len(batch.rows) <= self.limits.max_batch_size
            assert batch.padded_tokens <= self.limits.max_batch_tokens
            waiting = list(self.rows.values())
            highest = min(row.level for row in waiting)
            leader = batch.rows[0]
            assert leader.level == highest
            if all(row.flow is None and row.deadline is None for row in waiting):
                assert leader.enqueued_at == min(row.enqueued_at for row in waiting if row.level == highest)
            for row in batch.rows:
                # Each leaves once: it fails when the row is gone already.
                assert self.rows.pop(row.payload) is row

    @invariant()
    def it_holds_what_waits(self) -> None:
        waiting = self.rows.values()
        assert len(self.batcher) == len(self.rows)
        assert self.batcher.levels() == sorted({row.level for row in waiting})
        assert self.batcher.oldest == min((row.enqueued_at for row in waiting), default=math.inf)

    @invariant()
    def no_row_waits_past_its_bound(self) -> None:
        assert all(row.enqueued_at + self.limits.max_wait_s > self.now for row in self.rows.values())


TestDeviceThatIsAlwaysFree = DeviceThatIsAlwaysFree.TestCase


@pytest.mark.parametrize("level", [-1, LEVELS])
def test_a_row_of_no_level_is_refused(level: int) -> None:
    with pytest.raises(ValueError, match="levels"):
        filled().add(Row(0, 1, 0.0, level), 0.0)


def test_a_row_that_nothing_can_join_does_not_wait() -> None:
    assert filled((40, 0.0)).due(0.0) is not None
