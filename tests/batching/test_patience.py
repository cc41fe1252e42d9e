"""When a free device waits, and when it does not."""

from __future__ import annotations

import math

import pytest

from batching import Batcher, CloseReason, CostModel, Limits, Row
from batching.patience import ArrivalRate, Patience, worth_waiting_s
from batching.simulation import ClosedLoop, Outcome, Trace, poisson, simulate

NULL = CostModel(0.00005, 1e-9)
SMALL = CostModel(0.001, 0.00002)
GPU = CostModel(0.005, 0.000002)
CPU = CostModel(0.008, 0.0002)


def loop(callers: int, cost: CostModel, turnaround_s: tuple[float, float], size: int, rows: int) -> Outcome:
    traffic = ClosedLoop(callers, rows, lambda _: 20, seed=callers, turnaround_s=turnaround_s)
    return simulate(traffic, Limits(size, 16_384, 0.01), cost)


def late_rate(outcome: Outcome) -> float:
    """Rows a second in the second half, when what there is to learn has been learnt."""
    ends = sorted(row.ended for row in outcome.served)
    half = len(ends) // 2
    return (len(ends) - half) / (ends[-1] - ends[half])


@pytest.mark.parametrize("callers", [1, 2, 5, 16])
@pytest.mark.parametrize("cost", [NULL, SMALL, GPU, CPU], ids=["null", "small", "gpu", "cpu"])
@pytest.mark.parametrize("turnaround_s", [(0.0, 0.0), (0.0, 0.001), (0.0, 0.005), (0.004, 0.006)])
def test_batching_is_never_slower_than_none(callers: int, cost: CostModel, turnaround_s: tuple[float, float]) -> None:
    # Long enough for what is tried now and then to be its share of the time.
    rows = 12_000 if callers > 4 and cost is NULL else 2000
    rows_alone = 2000 if callers < 3 or cost is NULL else 800
    batched, alone = loop(callers, cost, turnaround_s, 32, rows), loop(callers, cost, turnaround_s, 1, rows_alone)
    assert late_rate(batched) >= 0.95 * late_rate(alone)


@pytest.mark.parametrize("rate", [100, 500, 2000])
@pytest.mark.parametrize("cost", [NULL, GPU], ids=["null", "gpu"])
def test_traffic_that_comes_whatever_the_answers_is_waited_for(rate: int, cost: CostModel) -> None:
    rows = poisson(rate, 8000, lambda _: 20, seed=rate)
    batches = simulate(Trace(rows), Limits(32, 16_384, 0.01), cost).batches
    # What a full wait brings: the row that begins it, and those of ten milliseconds.
    assert sorted(len(batch.rows) for batch in batches for _ in batch.rows)[4000] >= 0.75 * (1 + 0.01 * rate)


def test_a_lone_row_waits_while_nothing_is_known() -> None:
    outcome = simulate(Trace(poisson(1, 1, lambda _: 20, seed=1)), Limits(32, 16_384, 0.01), GPU)
    assert [row.wait_s for row in outcome.served] == [pytest.approx(0.01)]
    assert outcome.batches[0].reason is CloseReason.WAIT


def test_as_many_rows_as_ever_came_are_not_waited_with() -> None:
    patience = Patience(0.01)
    assert patience.enough(0.0) == math.inf
    patience.waited_in_full(3, 0.0)
    assert patience.enough(0.1) == 3
    patience.closed_early(5)
    assert patience.enough(0.1) == 5


def test_now_and_then_a_wait_is_made_in_full_to_see_whether_more_would_come() -> None:
    patience = Patience(0.01)
    patience.waited_in_full(3, 0.0)
    assert patience.enough(0.99) == 3
    assert patience.enough(1.01) == math.inf


def test_what_came_once_is_forgotten() -> None:
    patience = Patience(0.01)
    patience.waited_in_full(9, 0.0)
    for _ in range(32):
        patience.waited_in_full(2, 0.0)
    assert patience.enough(0.0) == 2


@pytest.mark.parametrize(
    "rows, gap_s, overhead_s, expected",
    [(1, 0.001, 0.01, 0.005), (4, 0.001, 0.01, 0.002), (9, 0.001, 0.01, 0.0), (1, 1.0, 0.01, 0.0), (1, math.inf, 1, 0)],
)
def test_a_row_is_worth_waiting_for_while_it_saves_more_than_it_costs(
    rows: int, gap_s: float, overhead_s: float, expected: float
) -> None:
    assert worth_waiting_s(rows, gap_s, overhead_s) == pytest.approx(expected)


def test_the_gap_between_rows_is_that_of_the_last_seconds() -> None:
    rate = ArrivalRate()
    assert rate.gap_s(0.0) == math.inf
    for number in range(1000):
        rate.add(number / 100)
    assert rate.gap_s(10.0) == pytest.approx(0.01, rel=0.05)
    assert rate.gap_s(30.0) > 10


def test_with_adaptive_wait_a_rare_row_is_served_at_once() -> None:
    rows = Trace(poisson(5, 400, lambda _: 20, seed=1))
    outcome = simulate(rows, Limits(32, 16_384, 0.01, adaptive_wait=True), GPU)
    assert outcome.mean_s <= 1.1 * GPU.seconds(20)


@pytest.mark.parametrize("rate", [500, 2000, 20_000])
def test_with_adaptive_wait_a_busy_device_serves_no_fewer_rows(rate: int) -> None:
    rows = Trace(poisson(rate, 4000, lambda _: 20, seed=1))
    fixed, adaptive = (
        simulate(rows, Limits(32, 16_384, 0.01, adaptive_wait=adaptive), GPU) for adaptive in (False, True)
    )
    assert adaptive.rows_per_s >= 0.99 * fixed.rows_per_s
    assert adaptive.mean_s <= 1.02 * fixed.mean_s


def test_with_adaptive_wait_the_wait_is_still_bounded() -> None:
    batcher: Batcher[int] = Batcher(Limits(32, 16_384, 0.01, adaptive_wait=True))
    for number in range(20):
        batcher.add(Row(number, 1, number / 1000), number / 1000)
    wakeup = batcher.next_wakeup(0.019)
    assert wakeup is not None
    assert wakeup <= 0.01
