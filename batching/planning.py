"""Which of the rows that wait should run together: those that make all of them cheapest.

Rows of like length belong together, but a batch more costs its overhead. With rows in order of length, the cheapest way
to run all of them is to cut the sequence into batches, and the best cuts are found by dynamic programming over

    cost(batch) = overhead + longest x rows        (in padded tokens; the overhead as `CostModel.overhead_tokens`)

so the buckets of length come from what waits and from what the device was seen to take, not from a list.
"""

from __future__ import annotations

from collections.abc import Sequence

#: Most places to cut at that are looked at; more rows are taken several at a time. It bounds a plan to a fraction of a
#: millisecond.
MAX_CUTS = 128


def together_with(
    position: int, lengths: Sequence[int], overhead: float, max_rows: int, max_padded: int
) -> tuple[int, int]:
    """The half-open range of `lengths` that should share a batch with the row at `position`.

    `lengths` ascend, in tokens. The range holds `position` and keeps both bounds, as far as one row does.
    """
    step = -(-len(lengths) // MAX_CUTS)
    cuts = [*range(0, len(lengths), step), len(lengths)]
    begins = _cheapest(lengths, cuts, overhead, max_rows, max_padded)
    last = len(cuts) - 1
    while cuts[begins[last]] > position:
        last = begins[last]
    return _within_bounds(position, cuts[begins[last]], cuts[last], lengths, max_rows, max_padded)


def _cheapest(
    lengths: Sequence[int], cuts: Sequence[int], overhead: float, max_rows: int, max_padded: int
) -> list[int]:
    """For each place among `cuts`: the place where the last batch before it begins when all are cut at least cost."""
    costs: list[float] = [0.0]
    begins = [0]
    first = 0
    for place in range(1, len(cuts)):
        end = cuts[place]
        longest = lengths[end - 1]
        rows = min(max_rows, max_padded // longest) if longest else max_rows
        while first < place - 1 and end - cuts[first] > rows:
            first += 1
        candidates = [costs[begin] - longest * cuts[begin] for begin in range(first, place)]
        best = min(candidates)
        begins.append(first + candidates.index(best))
        costs.append(best + overhead + longest * end)
    return begins


def _within_bounds(
    position: int, begin: int, end: int, lengths: Sequence[int], max_rows: int, max_padded: int
) -> tuple[int, int]:
    """The range less what is too much, the farthest from `position` first: cuts may lie further apart than a batch."""
    while end - begin > 1 and (end - begin > max_rows or lengths[end - 1] * (end - begin) > max_padded):
        if end - 1 - position >= position - begin:
            end -= 1
        else:
            begin += 1
    return begin, end
