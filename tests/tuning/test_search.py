"""Which settings are looked at, and which of them is recommended."""

from __future__ import annotations

import pytest

from batching import CostModel, Limits
from batching.simulation import Arrival
from tuning.search import Bounds, Candidate, Place, Service, choose, frontier, grid, look, worthwhile_sizes
from tuning.traffic import Traffic, made_up

COST = CostModel(overhead_s=0.01, token_s=0.0001)
SERVICE = Service(batch_s=0.001, row_s=0.0001, latencies_s=[0.002, 0.003])
PLACE = Place(COST, SERVICE, prefetch_batches=2, aside_s=0.0)
BOUNDS = Bounds(most_rows=64, most_tokens=2048, longest_row=128)
PRESENT = Limits(32, 8192, 0.01, preferred_sizes=(8, 16))


def candidate(capacity: float, p99_s: float, size: int = 8, wait_s: float = 0.0) -> Candidate:
    return Candidate(Limits(size, 1024, wait_s), capacity, p99_s / 2, p99_s)


SLOW = candidate(1000, 0.5, size=64)
MIDDLE = candidate(940, 0.2, size=32)
QUICK = candidate(300, 0.05, size=4)
BEATEN = candidate(250, 0.3, size=2)
ALL = [SLOW, MIDDLE, QUICK, BEATEN]


def test_without_a_bound_it_is_the_least_p99_near_the_best_capacity() -> None:
    assert choose(ALL, None) == (MIDDLE, True)


def test_with_a_bound_it_is_the_greatest_capacity_within_it() -> None:
    assert choose(ALL, 0.6) == (SLOW, True)
    assert choose(ALL, 0.49) == (MIDDLE, True)
    assert choose(ALL, 0.05) == (QUICK, True)


def test_when_none_keeps_the_bound_it_is_the_least_p99_and_said_so() -> None:
    assert choose(ALL, 0.01) == (QUICK, False)


def test_of_those_alike_it_is_what_asks_for_least() -> None:
    alike = [candidate(1000, 0.2, size=64), candidate(995, 0.201, size=16, wait_s=0.05), candidate(990, 0.202, size=16)]
    assert choose(alike, None)[0] == alike[2]
    assert choose(alike, 1.0)[0] == alike[2]


def test_the_frontier_holds_what_no_other_beats() -> None:
    assert frontier([BEATEN, SLOW, QUICK, MIDDLE, candidate(300, 0.06)]) == [QUICK, MIDDLE, SLOW]


def test_all_that_is_looked_at_keeps_the_bounds() -> None:
    settings = grid(PRESENT, BOUNDS, [1, 8, 64])
    assert PRESENT not in settings
    assert {limits.max_batch_size for limits in settings} == {1, 8, 64}
    assert all(128 <= limits.max_batch_tokens <= 2048 for limits in settings)
    assert all(limits.preferred_sizes == ((8,) if limits.max_batch_size == 8 else (8, 16))
               for limits in settings if limits.max_batch_size > 1)  # fmt: skip
    assert {limits.adaptive_wait for limits in settings} == {True, False}
    assert len(set(settings)) == len(settings)


def test_the_present_settings_are_looked_at_when_they_keep_the_bounds() -> None:
    assert PRESENT in grid(PRESENT, Bounds(64, 4096, 128), [1])


def test_tokens_that_bind_nothing_stay_as_they_are() -> None:
    present = Limits(64, 8192, 0.0)
    settings = grid(present, Bounds(most_rows=256, most_tokens=8192, longest_row=1), [1, 256])
    assert {limits.max_batch_tokens for limits in settings} == {8192}


def test_sizes_double_only_while_that_gains_something() -> None:
    traffic = made_up(20.0, 128)
    long_rows = Place(CostModel(0.0001, 0.001), SERVICE, 2, 0.0)
    assert worthwhile_sizes(traffic, long_rows, BOUNDS) == [1, 2]
    assert worthwhile_sizes(traffic, PLACE, BOUNDS)[:4] == [1, 2, 4, 8]


def test_what_cannot_keep_up_is_no_candidate() -> None:
    traffic = made_up(150.0, 128)
    settings = [Limits(1, 2048, 0.0), Limits(32, 2048, 0.0)]
    assert [one.limits for one in look(settings, traffic, PLACE, lambda *_: None)] == [settings[1]]


def test_rows_that_come_all_at_once_are_a_wait_and_no_rate() -> None:
    arrivals = [Arrival(0.0, 10)] * 3_000 + [Arrival(1_000.0, 10)]
    [found] = look([Limits(8, 2048, 0.0)], Traffic(arrivals, "a burst"), PLACE, lambda *_: None)
    assert found.capacity > 100
    assert found.p99_s > 1.0


def test_latency_holds_what_device_service_and_steps_take() -> None:
    place = Place(COST, SERVICE, prefetch_batches=2, aside_s=0.1)
    p50_s, p99_s = place.latencies_s(made_up(0.1, 1), Limits(8, 1024, 0.0))
    assert 0.0101 + 0.002 + 0.1 <= p50_s <= p99_s
    assert p99_s == pytest.approx(0.0101 + 0.003 + 0.1, abs=0.001)


def test_the_service_bounds_the_capacity_of_a_fast_device() -> None:
    instant = Place(CostModel(0.0, 1e-9), SERVICE, 2, 0.0)
    assert instant.capacity(made_up(1.0, 1), Limits(10, 1000, 0.0)) == pytest.approx(10 / (0.001 + 10 * 0.0001))


def test_the_service_is_told_from_batches_of_one_and_of_many() -> None:
    found = Service.of(alone=1 / 0.0011, together=64 / (0.001 + 64 * 0.0001), size=64, latencies_s=[0.0])
    assert found.batch_s == pytest.approx(0.001)
    assert found.row_s == pytest.approx(0.0001)
