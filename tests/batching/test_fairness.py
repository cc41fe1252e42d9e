"""Flows within a level, and levels within the device's time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batching import LEVELS, Batcher, Limits, Row
from batching.fairness import MOST_SHARE, TIDY_ABOVE, FairOrder, Shares

LIMITS = Limits(32, 100_000, 0.0)


def flood(batcher: Batcher[str], flow: str, rows: int, tokens: int, at: float = 0.0) -> None:
    for _ in range(rows):
        batcher.add(Row(flow, tokens, at, flow=flow), at)


def served(batcher: Batcher[str], batches: int, at: float = 1.0) -> Counter[str]:
    """Tokens by payload over the next batches."""
    tokens: Counter[str] = Counter()
    for _ in range(batches):
        batch = batcher.due(at)
        assert batch is not None
        for row in batch.rows:
            tokens[row.payload] += row.tokens
    return tokens


@pytest.mark.parametrize("flow", ["other", None])
@pytest.mark.parametrize("tokens", [16, 120])
def test_a_flood_delays_no_other_row_by_more_than_a_few_batches(flow: str | None, tokens: int) -> None:
    batcher: Batcher[str] = Batcher(LIMITS)
    flood(batcher, "flood", 10_000, 16)
    served(batcher, 5)
    batcher.add(Row("trickle", tokens, 1.0, flow=flow), 1.0)
    assert served(batcher, 3)["trickle"] == tokens


def test_floods_of_long_and_of_short_rows_get_equal_tokens() -> None:
    batcher: Batcher[str] = Batcher(LIMITS)
    flood(batcher, "long", 1000, 200)
    flood(batcher, "short", 10_000, 20)
    tokens = served(batcher, 150)
    assert tokens["long"] == pytest.approx(tokens["short"], rel=0.1)


def test_floods_of_rows_without_tokens_take_turns_too() -> None:
    batcher: Batcher[str] = Batcher(LIMITS)
    flood(batcher, "first", 1000, 0)
    flood(batcher, "second", 1000, 0)
    payloads = Counter(row.payload for _ in range(10) for row in (batcher.due(1.0) or pytest.fail("none due")).rows)
    assert payloads["first"] == pytest.approx(payloads["second"], abs=32)


def test_an_idle_flow_saves_nothing_up() -> None:
    batcher: Batcher[str] = Batcher(LIMITS)
    flood(batcher, "idle", 1, 16)
    flood(batcher, "busy", 5000, 16)
    served(batcher, 100)
    flood(batcher, "idle", 2000, 16, at=1.0)
    tokens = served(batcher, 40)
    assert tokens["idle"] == pytest.approx(tokens["busy"], rel=0.1)


def test_rows_that_were_removed_are_not_charged_to_their_flow() -> None:
    batcher: Batcher[str] = Batcher(LIMITS)
    for _ in range(5000):
        batcher.add(Row("cancelled", 16, 0.0, flow="a"), 0.0)
    flood(batcher, "a", 1000, 16)
    flood(batcher, "b", 6000, 16)
    assert batcher.remove(lambda payload: payload == "cancelled") == 5000
    flood(batcher, "a", 1000, 16)
    tokens = served(batcher, 60)
    assert tokens["a"] == pytest.approx(tokens["b"], rel=0.1)


def test_what_is_remembered_of_flows_is_bounded() -> None:
    order = FairOrder()
    for number in range(20_000):
        order.enter(number, 16)
        if number >= 50:
            order.leave(number - 50)
            order.served(16, None)
    assert len(order._finish) <= 4 * (TIDY_ABOVE + 50)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True), st.floats(0, MOST_SHARE))
def test_a_lower_level_never_leads_twice_while_a_higher_one_waits(levels: list[int], share: float) -> None:
    waiting = sorted(levels)
    shares = Shares(share)
    before = waiting[0]
    for _ in range(60):
        level = shares.pick(waiting)
        shares.charge(level, waiting, 1.0)
        assert waiting[0] in (level, before)
        before = level


def test_each_lower_level_gets_its_share_whatever_its_batches_take() -> None:
    shares = Shares(0.1)
    used: Counter[int] = Counter()
    for _ in range(20_000):
        level = shares.pick(range(LEVELS))
        shares.charge(level, range(LEVELS), 1.0 + level)
        used[level] += 1 + level
    assert [used[level] / used.total() for level in range(1, LEVELS)] == pytest.approx([0.1] * 3, abs=0.01)


def test_what_a_lower_level_gets_while_none_waits_is_taken_off_what_it_has_earned() -> None:
    shares = Shares(0.1)
    for _ in range(10):
        for _ in range(9):
            shares.charge(0, [0, 3], 1.0)
        shares.charge(3, [3], 1.0)
        assert shares.pick([0, 3]) == 0
    for _ in range(11):
        shares.charge(0, [0, 3], 1.0)
    assert shares.pick([0, 3]) == 3


@pytest.mark.parametrize("share", [-0.1, 0.2])
def test_shares_that_leave_the_highest_level_less_than_half_are_refused(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        Shares(share)


def test_a_lower_level_that_empties_with_each_batch_keeps_its_debt() -> None:
    shares = Shares(0.1)
    used = {0: 0.0, 3: 0.0}
    waiting = [0, 3]
    for _ in range(20_000):
        level = shares.pick(waiting)
        seconds = 0.5 if level else 0.005
        shares.charge(level, waiting, seconds)
        used[level] += seconds
        waiting = [0] if level else [0, 3]
    assert used[3] <= 0.12 * sum(used.values())
