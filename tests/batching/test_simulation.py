"""The policy in fast motion: what it promises of throughput and of waits, over many seeds."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from batching import CloseReason, CostModel, Limits
from batching.simulation import (
    Arrival,
    ClosedLoop,
    Outcome,
    Trace,
    any_of,
    backlog,
    bursts,
    lognormal,
    poisson,
    simulate,
)

CPU = CostModel(0.008, 0.0002)
GPU = CostModel(0.005, 0.000002)
TEXTS = lognormal(20, 1.1, 256)
LIMITS = Limits(32, 16_384, 0.01)


def fifo_s(arrivals: list[Arrival], cost: CostModel, size: int = 32) -> float:
    """Seconds of a full queue in batches of its order, each padded to its longest row."""
    batches = [arrivals[begin : begin + size] for begin in range(0, len(arrivals), size)]
    return sum(cost.seconds(max(row.tokens for row in batch) * len(batch)) for batch in batches)


def random_trace(randoms: random.Random) -> list[Arrival]:
    return [
        Arrival(
            at=randoms.choice([0.0, randoms.uniform(0, 0.3)]),
            tokens=TEXTS(randoms),
            level=randoms.choice([0, 0, 0, 3]),
            flow=randoms.choice([None, None, "a", "b"]),
            deadline=None if randoms.random() < 0.9 else randoms.uniform(0.1, 1.0),
        )
        for _ in range(randoms.randint(1, 24))
    ]


def test_every_row_leaves_once_and_no_bound_is_broken_over_thousands_of_seeds() -> None:
    for seed in range(3000):
        randoms = random.Random(seed)
        arrivals = random_trace(randoms)
        size, tokens = randoms.randint(1, 8), randoms.choice([256, 600])
        limits = Limits(size, tokens, randoms.choice([0.0, 0.01]), adaptive_wait=randoms.random() < 0.3)
        outcome = simulate(Trace(arrivals), limits, randoms.choice([CPU, GPU]), window=randoms.choice([None, size]))
        left = Counter(id(row.payload) for batch in outcome.batches for row in batch.rows)
        assert left == Counter(map(id, arrivals)), seed
        assert all(len(batch.rows) <= size and batch.padded_tokens <= tokens for batch in outcome.batches), seed
        assert len(outcome.served) + len(outcome.expired) == len(arrivals), seed


@pytest.mark.parametrize("seed", range(3))
def test_a_full_queue_of_mixed_lengths_pads_little_and_runs_three_times_as_fast_as_in_its_order(seed: int) -> None:
    arrivals = backlog(4000, TEXTS, seed)
    outcome = simulate(Trace(arrivals), LIMITS, CPU, window=64)
    assert outcome.padding_ratio <= 0.10
    assert fifo_s(arrivals, CPU) >= 3 * outcome.seconds


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("window", [64, 256])
def test_where_padding_is_cheap_a_full_queue_runs_no_slower_than_in_its_order(seed: int, window: int) -> None:
    arrivals = backlog(4000, TEXTS, seed)
    outcome = simulate(Trace(arrivals), LIMITS, GPU, window=window)
    assert outcome.seconds <= 1.01 * fifo_s(arrivals, GPU)


def test_a_row_that_is_far_too_long_delays_short_ones_by_its_own_batch_at_most() -> None:
    short = [Arrival(0.0, 10) for _ in range(320)]
    long = Arrival(0.0, 8000)
    outcome = simulate(Trace([*short[:160], long, *short[160:]]), LIMITS, CPU, window=64)
    [alone] = [batch for batch in outcome.batches if batch.longest == 8000]
    assert len(alone.rows) == 1
    assert outcome.seconds <= fifo_s(short, CPU) + CPU.seconds(8000) + 2 * CPU.overhead_s


def test_with_a_backlog_nothing_waits() -> None:
    outcome = simulate(Trace(backlog(1000, TEXTS, 1)), LIMITS, CPU, window=64)
    assert outcome.idle_ratio == pytest.approx(0.0, abs=1e-9)
    assert CloseReason.WAIT not in outcome.closed_by


def test_no_timer_splits_what_comes_after_a_full_batch() -> None:
    # Ten milliseconds after the full batch began, half of the next one has come.
    first = [Arrival(0.0, 20) for _ in range(32)]
    second = [Arrival(0.0055 + number * 0.0003, 20) for number in range(30)]
    outcome = simulate(Trace(first + second), LIMITS, GPU)
    assert [len(batch.rows) for batch in outcome.batches] == [32, 30]
    assert outcome.closed_by == {CloseReason.FULL: 1, CloseReason.WAIT: 1}


def test_rows_with_deadlines_are_served_in_time_while_the_device_has_time() -> None:
    expired = 0
    for seed in range(40):
        randoms = random.Random(seed)
        patient = [Arrival(0.0, 20) for _ in range(640)]
        urgent = [Arrival(at := randoms.uniform(0, 2.5), TEXTS(randoms), deadline=at + 0.6) for _ in range(6)]
        expired += len(simulate(Trace(patient + urgent), LIMITS, CPU).expired)
    assert expired <= 0.02 * 40 * 6


def test_a_deadline_of_ten_seconds_is_kept_with_batches_of_ninety() -> None:
    rows = [Arrival(0.0, 20) for _ in range(100)]
    outcome = simulate(Trace([*rows, Arrival(0.0, 20, deadline=10.0)]), LIMITS, CostModel(0.1, 0.14))
    # Nothing is known of the device before its first batch has run.
    assert len(outcome.expired) <= 1
    assert simulate(Trace([Arrival(0.0, 20, deadline=10.0)]), Limits(32, 16_384, 60.0), GPU).expired == []


def test_backlogs_run_in_preferred_sizes() -> None:
    limits = Limits(32, 16_384, 0.01, preferred_sizes=(8, 16))
    outcome = simulate(Trace(backlog(960, any_of([20]), 1)), limits, GPU, window=64)
    # What is left at last goes at once: its wait is over.
    assert {len(batch.rows) for batch in outcome.batches[:-1]} == {16}


def test_a_closed_loop_has_no_more_rows_under_way_than_callers() -> None:
    outcome = simulate(ClosedLoop(5, 200, TEXTS, 1, (0.0, 0.002)), LIMITS, CPU)
    assert len(outcome.served) == 200
    assert max(len(batch.rows) for batch in outcome.batches) <= 5


def test_traffic_is_the_same_for_the_same_seed() -> None:
    assert poisson(100, 50, TEXTS, 1) == poisson(100, 50, TEXTS, 1) != poisson(100, 50, TEXTS, 2)
    assert poisson(100, 5000, TEXTS, 1)[-1].at == pytest.approx(50, rel=0.1)
    assert [row.at for row in bursts(1.0, 4, 10, TEXTS, 1)].count(bursts(1.0, 4, 10, TEXTS, 1)[0].at) == 4


def test_an_outcome_tells_latencies_and_rates() -> None:
    outcome: Outcome = simulate(Trace([Arrival(1.0, 20), Arrival(2.0, 20)]), Limits(1, 100, 0.0), CPU)
    assert outcome.latency_s(0.5) == pytest.approx(0.012)
    assert outcome.mean_s == pytest.approx(0.012)
    assert outcome.rows_per_s == pytest.approx(2 / 1.012)
    assert outcome.idle_ratio == pytest.approx(1 - 0.024 / 1.012)


def test_no_traffic_is_over_at_once() -> None:
    outcome = simulate(Trace([]), LIMITS, CPU)
    assert (outcome.seconds, outcome.rows_per_s, outcome.padding_ratio, outcome.idle_ratio) == (0.0, 0.0, 0.0, 0.0)
