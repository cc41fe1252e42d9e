"""Simulates settings over the traffic, and chooses among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from batching import CostModel, Limits
from batching.simulation import Trace, any_of, backlog, simulate
from tuning.errors import TuningError
from tuning.traffic import Traffic

#: Waits that are looked at, seconds.
WAITS_S = (0.0, 0.002, 0.005, 0.01, 0.025, 0.05)
#: With `adaptive_wait` the wait is a bound only, so fewer tell as much.
ADAPTIVE_WAITS_S = (0.01, 0.05)
#: `max_batch_tokens` of each size that are looked at: as much as its longest rows need, and these shares of it.
TOKEN_SHARES = (1.0, 0.25)
#: Rows of the full queue that tell the capacity, in batches and at least.
BACKLOG_BATCHES = 8
BACKLOG_ROWS = 1000
#: Without a bound on the p99: the choice has this share of the best capacity, to be ready for more than the traffic.
CAPACITY_SHARE = 0.9
#: Figures closer than this are alike: the simulator knows them no better.
ALIKE = 0.02
_SEED = 1


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a setting must keep to. `most_rows` and `most_tokens` are what was seen to run as one batch."""

    most_rows: int
    most_tokens: int
    #: A row of so many tokens must still be taken.
    longest_row: int
    #: False for a model whose rows all cost the same: then `max_batch_tokens` says nothing.
    have_length: bool = True

    def __post_init__(self) -> None:
        if self.most_tokens < self.longest_row:
            raise TuningError(
                f"rows of {self.longest_row} tokens are to be served, and no batch of over {self.most_tokens} tokens "
                "was seen to run: set the model's max_length to less, or give --seconds more"
            )


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings and what they come to: rows/s from a full queue, and latencies at the traffic."""

    limits: Limits
    capacity: float
    p50_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class Place:
    """Where the settings are simulated: `aside_s` is what a job's time has beside the device's."""

    cost: CostModel
    prefetch_batches: int
    aside_s: float

    def window(self, limits: Limits) -> int:
        """Rows that a worker holds ahead of the device."""
        return self.prefetch_batches * limits.max_batch_size

    def latencies_s(self, traffic: Traffic, limits: Limits) -> tuple[float, float]:
        """p50 and p99 of the traffic's rows."""
        outcome = simulate(Trace(traffic.arrivals), limits, self.cost, window=self.window(limits))
        return outcome.latency_s(0.5) + self.aside_s, outcome.latency_s(0.99) + self.aside_s

    def capacity(self, traffic: Traffic, limits: Limits) -> float:
        """Rows/s of the traffic's lengths from a full queue."""
        count = max(BACKLOG_ROWS, BACKLOG_BATCHES * limits.max_batch_size)
        rows = Trace(backlog(count, any_of(traffic.lengths), _SEED))
        # What is left in the end need not wait, and a wait tells nothing here.
        at_once = replace(limits, max_wait_s=0.0, adaptive_wait=False)
        return simulate(rows, at_once, self.cost, window=self.window(limits)).rows_per_s


def grid(present: Limits, bounds: Bounds) -> list[Limits]:
    """The settings to look at, without the present ones."""
    sizes = {2**power for power in range(bounds.most_rows.bit_length())} | {present.max_batch_size}
    found: dict[Limits, None] = {}
    for size in sorted(size for size in sizes if size <= bounds.most_rows):
        preferred = tuple(one for one in present.preferred_sizes if one <= size)
        waits = sorted({*WAITS_S, present.max_wait_s}) if size > 1 else [0.0]
        modes = [(wait_s, False) for wait_s in waits]
        modes += [(wait_s, True) for wait_s in ADAPTIVE_WAITS_S] if size > 1 else []
        for tokens, (wait_s, adaptive) in product(_token_bounds(size, present, bounds), modes):
            found[Limits(size, tokens, wait_s, preferred, adaptive)] = None
    found.pop(present, None)
    return list(found)


def look(
    settings: Sequence[Limits], traffic: Traffic, place: Place, told: Callable[[int, int], None]
) -> Iterator[Candidate]:
    """Each setting that keeps up with the traffic, with what it comes to."""
    capacities: dict[tuple[int, int], float] = {}
    for number, limits in enumerate(settings):
        bound = (limits.max_batch_size, limits.max_batch_tokens)
        if bound not in capacities:
            capacities[bound] = place.capacity(traffic, limits)
        if capacities[bound] > traffic.rate:
            yield Candidate(limits, capacities[bound], *place.latencies_s(traffic, limits))
        told(number + 1, len(settings))


def choose(candidates: Sequence[Candidate], p99_s: float | None) -> tuple[Candidate, bool]:
    """The candidate to recommend, and whether it keeps the bound `p99_s` on the p99.

    With a bound: the greatest capacity within it, and of those alike the least p99. When none keeps it: the least p99.
    Without: the least p99 of those with `CAPACITY_SHARE` of the best capacity; of those alike the greatest capacity.
    What is still alike is told apart by how little it asks for: shorter waits, smaller batches.
    """
    if p99_s is None:
        ready = [one for one in candidates if one.capacity >= CAPACITY_SHARE * _best_capacity(candidates)]
        return _fastest(ready), True
    within = [one for one in candidates if one.p99_s <= p99_s]
    if not within:
        return _fastest(candidates), False
    greatest = [one for one in within if one.capacity >= (1 - ALIKE) * _best_capacity(within)]
    return _fastest(greatest), True


def frontier(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other beats in both capacity and p99, the least capacity first."""
    best: list[Candidate] = []
    for one in sorted(candidates, key=lambda one: (-one.capacity, one.p99_s, *_asks(one))):
        if not best or one.p99_s < best[-1].p99_s:
            best.append(one)
    return best[::-1]


def _fastest(candidates: Sequence[Candidate]) -> Candidate:
    least = min(one.p99_s for one in candidates)
    alike = [one for one in candidates if one.p99_s <= (1 + ALIKE) * least]
    greatest = _best_capacity(alike)
    return min((one for one in alike if one.capacity >= (1 - ALIKE) * greatest), key=_asks)


def _best_capacity(candidates: Sequence[Candidate]) -> float:
    return max(one.capacity for one in candidates)


def _asks(one: Candidate) -> tuple[float, ...]:
    limits = one.limits
    return limits.max_batch_size, limits.max_batch_tokens, limits.adaptive_wait, limits.max_wait_s


def _token_bounds(size: int, present: Limits, bounds: Bounds) -> list[int]:
    if not bounds.have_length:
        return [max(present.max_batch_tokens, size)]
    least = max(bounds.longest_row, size)
    most = min(size * bounds.longest_row, bounds.most_tokens)
    return sorted({max(least, int(share * most)) for share in TOKEN_SHARES})
