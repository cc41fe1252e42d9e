"""The line that is fitted to what batches take."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batching import CostFit, CostModel

DEVICES = [CostModel(0.008, 0.0002), CostModel(0.005, 0.000002), CostModel(0.0002, 0.00001)]


def measured(fit: CostFit, device: CostModel, batches: int, seed: int) -> None:
    """Batches of all sizes, each measured with 10 % noise."""
    randoms = random.Random(seed)
    for _ in range(batches):
        tokens = round(2 ** randoms.uniform(3, 14))
        fit.add(tokens, device.seconds(tokens) * randoms.lognormvariate(0, 0.1))


@pytest.mark.parametrize("device", DEVICES)
def test_both_parts_are_found_in_noisy_times(device: CostModel) -> None:
    overheads, slopes = [], []
    for seed in range(20):
        fit = CostFit()
        measured(fit, device, 300, seed)
        overheads.append(fit.model.overhead_s)
        slopes.append(fit.model.token_s)
    assert sorted(overheads)[10] == pytest.approx(device.overhead_s, rel=0.1)
    assert sorted(slopes)[10] == pytest.approx(device.token_s, rel=0.1)


@pytest.mark.parametrize("device", DEVICES)
def test_a_device_that_gets_slower_is_followed(device: CostModel) -> None:
    slower = CostModel(3 * device.overhead_s, 3 * device.token_s)
    for seed in range(20):
        fit = CostFit()
        measured(fit, device, 500, seed)
        measured(fit, slower, 200, seed + 100)
        for tokens in (16, 1000, 16_000):
            assert fit.model.seconds(tokens) == pytest.approx(slower.seconds(tokens), rel=0.25)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 1e4)), max_size=60))
def test_no_part_is_ever_negative(batches: list[tuple[int, float]]) -> None:
    fit = CostFit()
    for tokens, seconds in batches:
        fit.add(tokens, seconds)
        assert fit.model.overhead_s >= 0
        assert fit.model.token_s > 0
        assert 0 <= fit.model.overhead_tokens < float("inf")


@pytest.mark.parametrize("tokens", [0, 1, 512, 65_536])
def test_batches_of_one_size_are_foretold(tokens: int) -> None:
    fit = CostFit()
    for _ in range(2000):
        fit.add(tokens, 0.03)
    assert fit.model.seconds(tokens) == pytest.approx(0.03, rel=0.01)


@pytest.mark.parametrize("device", DEVICES)
def test_one_batch_that_took_a_hundred_times_as_long_changes_little(device: CostModel) -> None:
    fit = CostFit()
    measured(fit, device, 300, 1)
    before = fit.model
    fit.add(1000, 100 * device.seconds(1000))
    for tokens in (100, 1000, 10_000):
        assert fit.model.seconds(tokens) == pytest.approx(before.seconds(tokens), rel=0.15)


@pytest.mark.parametrize("seconds", [0.0005, 0.5])
def test_batches_of_one_size_leave_the_parts_in_the_ratio_that_was_assumed(seconds: float) -> None:
    fit = CostFit()
    for _ in range(50):
        fit.add(32, seconds)
    assert fit.model.overhead_tokens == pytest.approx(CostFit().model.overhead_tokens, rel=0.01)
