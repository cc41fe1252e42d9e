"""Plans against all plans there are."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batching.planning import MAX_CUTS, together_with


def cheapest(lengths: Sequence[int], overhead: float, max_rows: int, max_padded: int) -> float:
    """The least cost of all cuts of `lengths` into batches, by trying all."""

    @cache
    def of(end: int) -> float:
        if end == 0:
            return 0.0
        longest = lengths[end - 1]
        return min(
            of(begin) + overhead + longest * (end - begin)
            for begin in range(end)
            if end - begin == 1 or (end - begin <= max_rows and longest * (end - begin) <= max_padded)
        )

    return of(len(lengths))


def partitions(rows: Sequence[int]) -> Iterator[list[list[int]]]:
    """All ways to put rows into batches, of like length or not."""
    if not rows:
        yield []
        return
    for rest in partitions(rows[1:]):
        yield [[rows[0]], *rest]
        for index, batch in enumerate(rest):
            yield [*rest[:index], [rows[0], *batch], *rest[index + 1 :]]


plans = {
    "lengths": st.lists(st.integers(0, 60), min_size=1, max_size=14).map(sorted),
    "overhead": st.sampled_from([0.0, 1.0, 10.0, 37.5, 200.0, 1e7]),
    "max_rows": st.integers(1, 8),
    "max_padded": st.integers(60, 300),
}


@given(**plans, where=st.floats(0, 0.999))
def test_a_range_belongs_to_a_cheapest_plan(
    lengths: list[int], overhead: float, max_rows: int, max_padded: int, where: float
) -> None:
    position = int(where * len(lengths))
    begin, end = together_with(position, lengths, overhead, max_rows, max_padded)
    ours = overhead + lengths[end - 1] * (end - begin)
    around = (cheapest(part, overhead, max_rows, max_padded) for part in (lengths[:begin], lengths[end:]))
    assert ours + sum(around) == pytest.approx(cheapest(lengths, overhead, max_rows, max_padded))


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    overhead=st.sampled_from([0.0, 10.0, 200.0]),
    max_rows=st.integers(1, 4),
    max_padded=st.integers(60, 150),
)
def test_no_batches_of_unlike_rows_are_cheaper(
    lengths: list[int], overhead: float, max_rows: int, max_padded: int
) -> None:
    possible = (
        sum(overhead + max(batch) * len(batch) for batch in plan)
        for plan in partitions(lengths)
        if all(len(batch) <= max_rows and max(batch) * len(batch) <= max_padded for batch in plan)
    )
    assert min(possible) == pytest.approx(cheapest(sorted(lengths), overhead, max_rows, max_padded))


@given(
    lengths=st.lists(st.integers(0, 500), min_size=1, max_size=5 * MAX_CUTS).map(sorted),
    overhead=st.floats(0, 1e7),
    max_rows=st.integers(1, 64),
    max_padded=st.integers(1, 4000),
    where=st.floats(0, 0.999),
)
def test_a_range_holds_its_row_and_keeps_both_bounds(
    lengths: list[int], overhead: float, max_rows: int, max_padded: int, where: float
) -> None:
    position = int(where * len(lengths))
    begin, end = together_with(position, lengths, overhead, max_rows, max_padded)
    assert 0 <= begin <= position < end <= len(lengths)
    assert end - begin <= max_rows
    assert lengths[end - 1] * (end - begin) <= max_padded or end - begin == 1


def test_rows_beyond_the_number_of_cuts_cost_hardly_more() -> None:
    randoms = random.Random(1)
    for _ in range(5):
        lengths = sorted(max(1, min(256, round(randoms.lognormvariate(3, 1.1)))) for _ in range(4 * MAX_CUTS))
        best = cheapest(lengths, 40.0, 32, 16384)
        cost, end = 0.0, len(lengths)
        while end:
            begin, end_of = together_with(end - 1, lengths[:end], 40.0, 32, 16384)
            assert end_of == end
            cost += 40.0 + lengths[end - 1] * (end - begin)
            end = begin
        assert cost <= 1.15 * best
