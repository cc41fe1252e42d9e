"""Levels and models that share a device."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from batching import LOWEST, Batcher, CostModel, Limits, Row, Scheduler
from batching.scheduler import MOST_BY_AGE
from batching.simulation import Arrival, Outcome, Trace, simulate

LIMITS = Limits(8, 10_000, 0.01)
COST = CostModel(0.01, 0.0001)


def levels_of(outcome: Outcome) -> Counter[int]:
    """Rows by level while rows of all levels wait."""
    return Counter(row.level for batch in outcome.batches[:1000] for row in batch.rows)


@pytest.mark.parametrize("levels", [[0, 3], [0, 1], [0, 1, 2, 3]])
def test_each_lower_level_gets_a_tenth_of_the_time_under_endless_load(levels: list[int]) -> None:
    traffic = Trace([Arrival(0.0, 10, level) for level in levels for _ in range(8000)])
    rows = levels_of(simulate(traffic, LIMITS, COST, window=16))
    for level in levels[1:]:
        assert 0.08 <= rows[level] / rows.total() <= 0.12


def test_with_a_share_of_nothing_priority_is_strict() -> None:
    traffic = Trace([Arrival(0.0, 10, level) for level in (0, 3) for _ in range(800)])
    outcome = simulate(traffic, LIMITS, COST, window=16, low_share=0.0)
    levels = [row.level for batch in outcome.batches for row in batch.rows]
    assert levels == sorted(levels)


def test_rows_that_lead_for_their_share_take_their_like_along() -> None:
    traffic = Trace([Arrival(0.0, 10, level) for level in (0, 3) for _ in range(800)])
    outcome = simulate(traffic, LIMITS, COST, window=16)
    assert all(len({row.level for row in batch.rows}) == 1 for batch in outcome.batches[:100])


@pytest.mark.parametrize("seed", range(20))
def test_a_high_row_waits_for_the_running_batch_and_one_more_at_most(seed: int) -> None:
    randoms = random.Random(seed)
    low = [Arrival(0.0, 10, level) for level in (1, 2, 3) for _ in range(1000)]
    high = [Arrival(randoms.uniform(0.0, 4.0), 10, 0) for _ in range(60)]
    outcome = simulate(Trace(low + high), LIMITS, COST, window=16)
    longest = COST.seconds(80)
    assert all(row.wait_s <= 2 * longest + 1e-9 for row in outcome.served if row.arrival.level == 0)


@pytest.mark.parametrize("seed", range(10))
def test_a_trickle_beside_a_backlog_of_another_model_waits_for_about_two_batches(seed: int) -> None:
    randoms = random.Random(seed)
    full = [Arrival(0.0, 10, model="full") for _ in range(6000)]
    trickle = [Arrival(randoms.uniform(0.0, 12.0), 10, model="trickle") for _ in range(40)]
    outcome = simulate(Trace(full + trickle), {"full": LIMITS, "trickle": LIMITS}, COST, window=32)
    waits = sorted(row.wait_s for row in outcome.served if row.arrival.model == "trickle")
    assert waits[35] <= 2 * COST.seconds(80) + LIMITS.max_wait_s
    # Rows right after each other are more than a trickle's part, beside rows that have waited far longer.
    assert waits[-1] <= (1 + MOST_BY_AGE) * COST.seconds(80)


def test_long_batches_beside_short_ones_share_time_and_not_turns() -> None:
    scheduler: Scheduler[str] = Scheduler()
    used: Counter[str] = Counter()
    now = 0.0
    batchers = {}
    for name, seconds in (("long", 0.2), ("short", 0.005)):
        batcher: Batcher[str] = Batcher(Limits(1, 10_000, 0.0))
        for _ in range(200):
            batcher.cost.add(10, seconds)
        scheduler.serve(batcher)
        batchers[name] = batcher
    while now < 60:
        for name, batcher in batchers.items():
            if len(batcher) < 2:
                batcher.add(Row(name, 10, now), now)
        found = scheduler.due(now)
        assert found is not None
        name = found[1].rows[0].payload
        seconds = 0.2 if name == "long" else 0.005
        used[name] += round(1000 * seconds)
        now += seconds
    assert used["long"] == pytest.approx(used["short"], rel=0.15)


@pytest.mark.parametrize("behind_s", [2.0, 6.0])
def test_the_ages_of_two_backlogs_draw_level(behind_s: float) -> None:
    old = [Arrival(i / 300, 10, model="old") for i in range(4000)]
    young = [Arrival(behind_s + i / 300, 10, model="young") for i in range(4000)]
    outcome = simulate(Trace(old + young), {"old": LIMITS, "young": LIMITS}, COST)
    late = outcome.served[5000:6000]
    waits = {
        name: sum(row.wait_s for row in late if row.arrival.model == name)
        / max(1, sum(row.arrival.model == name for row in late))
        for name in ("old", "young")
    }
    assert waits["old"] == pytest.approx(waits["young"], abs=2.0)


def test_no_model_starves_whatever_the_others_have() -> None:
    names = [f"model-{number}" for number in range(5)]
    traffic = Trace([Arrival(i / 1000, 10, model=name) for i in range(400) for name in names])
    outcome = simulate(traffic, dict.fromkeys(names, LIMITS), COST)
    first = Counter(batch.rows[0].payload.model for batch in outcome.batches[:100])
    assert min(first[name] for name in names) >= 15


def test_without_rows_nothing_is_due() -> None:
    scheduler: Scheduler[int] = Scheduler()
    scheduler.serve(Batcher(LIMITS))
    assert scheduler.due(1e9) is None
    assert scheduler.next_wakeup(1e9) is None


def test_a_model_that_waits_for_its_batch_saves_no_time_up() -> None:
    scheduler: Scheduler[str] = Scheduler()
    busy: Batcher[str] = Batcher(Limits(1, 10_000, 0.0))
    slow: Batcher[str] = Batcher(Limits(100, 10_000, 1e6))
    scheduler.serve(busy)
    scheduler.serve(slow)
    slow.add(Row("slow", 10, 0.0), 0.0)
    for _ in range(200):
        busy.add(Row("busy", 10, 0.0), 0.0)
        assert scheduler.due(0.0) is not None
    used = [place.used_s for place in scheduler._places]
    assert used[1] >= 0.98 * used[0]


def test_shares_are_of_the_time_that_batches_took_not_of_what_was_expected() -> None:
    randoms = random.Random(1)
    scheduler: Scheduler[int] = Scheduler()
    batchers = [Batcher[int](Limits(1, 100, 0.0)) for _ in range(2)]
    for batcher in batchers:
        scheduler.serve(batcher)
    used, now = [0.0, 0.0], 0.0
    while now < 300.0:
        for level, batcher in ((0, batchers[0]), (3, batchers[1])):
            if len(batcher) < 2:
                batcher.add(Row(level, 1, now, level), now)
        found = scheduler.due(now)
        assert found is not None
        batcher, batch = found
        # The high one's batches are alike, the low one's are not, though nothing tells them apart.
        seconds = 0.1 if batcher is batchers[0] else randoms.choice([0.001, 1.0])
        now += seconds
        used[batchers.index(batcher)] += seconds
        batcher.cost.add(batch.padded_tokens, seconds)
        scheduler.ended(batcher, batch, seconds)
    assert 0.06 <= used[1] / now <= 0.14


def test_what_goes_before_a_batch_that_could_stand_aside_has_callers_rows_alone() -> None:
    batcher: Batcher[str] = Batcher(LIMITS)
    scheduler: Scheduler[str] = Scheduler()
    scheduler.serve(batcher)
    for _ in range(40):
        batcher.add(Row("low", 10, 0.0, LOWEST), 0.0)
    assert scheduler.due(0.0, callers_only=True) is None
    running = scheduler.due(0.0)
    assert running is not None
    batcher.add(Row("caller", 10, 0.0, 1), 0.0)
    urgent = scheduler.due(0.0, callers_only=True)
    assert urgent is not None
    assert [row.payload for row in urgent[1].rows] == ["caller"]
    assert scheduler.due(0.0, callers_only=True) is None
    assert len(batcher) == 32


def test_what_stands_aside_goes_on_for_its_share() -> None:
    batcher: Batcher[str] = Batcher(LIMITS)
    scheduler: Scheduler[str] = Scheduler()
    scheduler.serve(batcher)
    batcher.add(Row("low", 10, 0.0, LOWEST), 0.0)
    assert scheduler.due(1.0) is not None
    served = 0
    while True:
        batcher.add(Row("caller", 10, 0.0, 0), 0.0)
        urgent = scheduler.due(1.0, callers_only=True)
        if urgent is None:
            break
        scheduler.ended(*urgent, batcher.cost.model.seconds(10))
        served += 1
    assert 8 <= served <= 12
