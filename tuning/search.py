"""Simulates settings over the traffic, and chooses among them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from batching import CostModel, Limits
from batching.simulation import Trace, any_of, backlog, simulate
from tuning.traffic import Traffic

#: Waits that are looked at, seconds.
WAITS_S = (0.0, 0.005, 0.01, 0.025, 0.05)
#: With `adaptive_wait` the wait is a bound only, so fewer tell as much.
ADAPTIVE_WAITS_S = (0.01, 0.05)
#: `max_batch_tokens` of each size that are looked at: as much as its longest rows need, and these shares of it.
TOKEN_SHARES = (1.0, 0.25)
#: Rows of the traffic that are simulated at most, where most of them come.
MOST_ROWS = 2_000
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

    def __post_init__(self) -> None:
        assert self.longest_row <= self.most_tokens

    def tokens_of(self, size: int) -> int:
        """Tokens that bound a batch of so many rows by nothing but what was seen to run."""
        return max(self.longest_row, size, min(size * self.longest_row, self.most_tokens))

    def hold(self, limits: Limits) -> bool:
        """Whether settings keep to them; tokens that so many rows never have do not matter."""
        tokens = min(limits.max_batch_tokens, limits.max_batch_size * self.longest_row)
        taken = limits.max_batch_tokens >= self.longest_row
        return taken and limits.max_batch_size <= self.most_rows and tokens <= self.most_tokens


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings and what they come to: rows/s from a full queue, and latencies at the traffic."""

    limits: Limits
    capacity: float
    p50_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class Service:
    """What queue and worker take for a model that takes no time: of a full queue for each batch and each of its rows,
    and a sample of latencies at the traffic's rate.
    """

    batch_s: float
    row_s: float
    latencies_s: Sequence[float]

    @classmethod
    def of(cls, alone: float, together: float, size: int, latencies_s: Sequence[float]) -> Service:
        """From the rows/s of batches of one row, and of batches of `size`."""
        row_s = max(0.0, (size / together - 1 / alone) / (size - 1))
        return cls(max(0.0, 1 / alone - row_s), row_s, latencies_s)

    def capacity(self, rows_per_batch: float) -> float:
        """Rows/s in batches of so many rows."""
        return rows_per_batch / (self.batch_s + self.row_s * rows_per_batch)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the settings are simulated. `aside_s` is a row's time in the model's steps beside the device."""

    cost: CostModel
    service: Service
    prefetch_batches: int
    aside_s: float

    def latencies_s(self, traffic: Traffic, limits: Limits) -> tuple[float, float]:
        """p50 and p99 of the traffic's rows: each with what the device and what the service does to it."""
        outcome = simulate(Trace(traffic.arrivals), limits, self.cost, window=self._window(limits))
        randoms = random.Random(_SEED)
        latencies = sorted(row.latency_s + randoms.choice(self.service.latencies_s) for row in outcome.served)
        return quantile(latencies, 0.5) + self.aside_s, quantile(latencies, 0.99) + self.aside_s

    def capacity(self, traffic: Traffic, limits: Limits) -> float:
        """Rows/s of the traffic's lengths from a full queue: the device's or the service's, whichever is less."""
        count = max(BACKLOG_ROWS, BACKLOG_BATCHES * limits.max_batch_size)
        rows = Trace(backlog(count, any_of(traffic.lengths), _SEED))
        # What is left in the end need not wait, and a wait tells nothing here.
        at_once = replace(limits, max_wait_s=0.0, adaptive_wait=False)
        outcome = simulate(rows, at_once, self.cost, window=self._window(limits))
        return min(outcome.rows_per_s, self.service.capacity(count / len(outcome.batches)))

    def _window(self, limits: Limits) -> int:
        """Rows that a worker holds ahead of the device."""
        return self.prefetch_batches * limits.max_batch_size


def quantile(ascending: Sequence[float], share: float) -> float:
    """The value that this share of all stays within."""
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))]


def worthwhile_sizes(traffic: Traffic, place: Place, bounds: Bounds) -> list[int]:
    """Numbers of rows, doubling for as long as that gains anything: beyond it, larger batches are no others."""
    sizes: list[int] = []
    best = 0.0
    for size in (2**power for power in range(bounds.most_rows.bit_length())):
        sizes.append(size)
        capacity = place.capacity(traffic, Limits(size, bounds.tokens_of(size), 0.0))
        if capacity <= (1 + ALIKE) * best:
            break
        best = capacity
    return sizes


def grid(present: Limits, bounds: Bounds, sizes: Sequence[int]) -> list[Limits]:
    """The settings to look at, the present ones among them if they keep the bounds."""
    found: dict[Limits, None] = {}
    for size in sizes:
        preferred = tuple(one for one in present.preferred_sizes if one <= size)
        waits = sorted({*WAITS_S, present.max_wait_s}) if size > 1 else [0.0]
        modes = [(wait_s, False) for wait_s in waits]
        modes += [(wait_s, True) for wait_s in ADAPTIVE_WAITS_S] if size > 1 else []
        for most_tokens, (wait_s, adaptive) in product(_token_bounds(size, present, bounds), modes):
            found[Limits(size, most_tokens, wait_s, preferred, adaptive)] = None
    if bounds.hold(present):
        found[present] = None
    return list(found)


def look(
    settings: Sequence[Limits], traffic: Traffic, place: Place, told: Callable[[int, int], None]
) -> Iterator[Candidate]:
    """Each setting that keeps up with the traffic on the whole, with what it comes to in its busiest stretch."""
    part = traffic.busiest(traffic.seconds, MOST_ROWS)
    capacities: dict[tuple[int, int], float] = {}
    for number, limits in enumerate(settings):
        bound = (limits.max_batch_size, limits.max_batch_tokens)
        if bound not in capacities:
            capacities[bound] = place.capacity(traffic, limits)
        if capacities[bound] > traffic.rate:
            yield Candidate(limits, capacities[bound], *place.latencies_s(part, limits))
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
    most = bounds.tokens_of(size)
    tokens = {max(bounds.longest_row, size, int(share * most)) for share in TOKEN_SHARES}
    if size * bounds.longest_row <= present.max_batch_tokens <= bounds.most_tokens:
        # Where they bind nothing, what stands there may stay.
        tokens = tokens - {most} | {present.max_batch_tokens}
    return sorted(tokens)
