"""A device in fast motion: traffic in, the very batching of production, and what came of it.

Discrete events over a virtual clock: rows arrive, batches begin and end. Only the device is made up: a batch takes what
a `CostModel` says. Tests hold the policy's promises over thousands of seeds with it; `sheaf tune` looks for settings.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Protocol

from batching.batcher import Batcher
from batching.cost import CostFit, CostModel
from batching.scheduler import LOW_SHARE, Scheduler
from batching.types import LEVELS, Batch, CloseReason, Limits, Row

#: A length in tokens, drawn anew each time.
Lengths = Callable[[random.Random], int]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A row that comes at a time, in seconds. `deadline` is a time too."""

    at: float
    tokens: int
    level: int = 0
    flow: str | None = None
    deadline: float | None = None
    model: str = "model"


class Traffic(Protocol):
    """Where rows come from."""

    def first(self) -> Iterable[Arrival]:
        """The rows that come whatever happens."""

    def after(self, answered: Arrival, now: float) -> Arrival | None:
        """The row that its caller sends because `answered` has ended."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Rows that come at their times, as fast as they may be answered: recorded traffic, or made by `poisson`."""

    arrivals: Sequence[Arrival]

    def first(self) -> Iterable[Arrival]:
        return self.arrivals

    def after(self, answered: Arrival, now: float) -> Arrival | None:
        return None


class ClosedLoop:
    """A number of callers, each with one row at a time; after an answer the next row takes `turnaround_s` to come."""

    def __init__(
        self, callers: int, rows: int, lengths: Lengths, seed: int, turnaround_s: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        self._callers = callers
        self._left = rows
        self._lengths = lengths
        self._random = random.Random(seed)
        self._turnaround_s = turnaround_s

    def first(self) -> Iterable[Arrival]:
        return [arrival for _ in range(self._callers) if (arrival := self._next(0.0)) is not None]

    def after(self, answered: Arrival, now: float) -> Arrival | None:
        return self._next(now)

    def _next(self, now: float) -> Arrival | None:
        if self._left == 0:
            return None
        self._left -= 1
        return Arrival(now + self._random.uniform(*self._turnaround_s), self._lengths(self._random))


def poisson(
    rate: float, rows: int, lengths: Lengths, seed: int, level: int = 0, flow: str | None = None
) -> list[Arrival]:
    """Rows that come independently of each other, `rate` a second."""
    randoms = random.Random(seed)
    at = 0.0
    arrivals: list[Arrival] = []
    for _ in range(rows):
        at += randoms.expovariate(rate)
        arrivals.append(Arrival(at, lengths(randoms), level, flow))
    return arrivals


def bursts(every_s: float, size: int, rows: int, lengths: Lengths, seed: int) -> list[Arrival]:
    """`size` rows at once, every so often on average."""
    randoms = random.Random(seed)
    at = 0.0
    arrivals: list[Arrival] = []
    while len(arrivals) < rows:
        at += randoms.expovariate(1 / every_s)
        arrivals += [Arrival(at, lengths(randoms)) for _ in range(min(size, rows - len(arrivals)))]
    return arrivals


def backlog(rows: int, lengths: Lengths, seed: int) -> list[Arrival]:
    """All rows at once: a full queue."""
    randoms = random.Random(seed)
    return [Arrival(0.0, lengths(randoms)) for _ in range(rows)]


def any_of(sample: Sequence[int]) -> Lengths:
    """Lengths as they were seen."""
    return lambda randoms: randoms.choice(sample)


def lognormal(median: float, sigma: float, longest: int) -> Lengths:
    """Lengths as texts have them: many short ones, some long, cut at `longest`."""
    return lambda randoms: max(1, min(longest, round(randoms.lognormvariate(math.log(median), sigma))))


@dataclass(frozen=True, slots=True)
class Served:
    """One row's way: it came, its batch began and ended."""

    arrival: Arrival
    begun: float
    ended: float

    @property
    def wait_s(self) -> float:
        return self.begun - self.arrival.at

    @property
    def latency_s(self) -> float:
        return self.ended - self.arrival.at


@dataclass(frozen=True)
class Outcome:
    """What came of the traffic. `expired` rows did not begin in time."""

    served: Sequence[Served]
    batches: Sequence[Batch[Arrival]]
    expired: Sequence[Arrival]
    seconds: float
    busy_s: float

    @property
    def rows_per_s(self) -> float:
        return len(self.served) / self.seconds if self.seconds else 0.0

    @property
    def idle_ratio(self) -> float:
        """Share of the time in which the device had nothing to do."""
        return 1 - self.busy_s / self.seconds if self.seconds else 0.0

    @property
    def padding_ratio(self) -> float:
        """Share of all padded tokens that was padding."""
        padded = sum(batch.padded_tokens for batch in self.batches)
        return 1 - sum(batch.tokens for batch in self.batches) / padded if padded else 0.0

    @property
    def mean_s(self) -> float:
        return sum(self._latencies) / len(self._latencies) if self._latencies else 0.0

    @property
    def closed_by(self) -> Counter[CloseReason]:
        return Counter(batch.reason for batch in self.batches)

    def latency_s(self, quantile: float) -> float:
        """The latency that this share of the rows stays within."""
        return self._latencies[min(len(self._latencies) - 1, int(quantile * len(self._latencies)))]

    @cached_property
    def _latencies(self) -> list[float]:
        return sorted(row.latency_s for row in self.served)


def simulate(
    traffic: Traffic,
    limits: Limits | Mapping[str, Limits],
    cost: CostModel,
    *,
    window: int | None = None,
    low_share: float = LOW_SHARE,
) -> Outcome:
    """Run `traffic` to its end. `limits` are those of the one model, or of each by its name.

    `window`: rows of a level that the worker holds at once of each model; the rest waits in the queue, in order. None
    for all of them.
    """
    by_model = {"model": limits} if isinstance(limits, Limits) else limits
    return _Run(traffic, by_model, cost, window, low_share).run()


@dataclass(slots=True)
class _Model:
    batcher: Batcher[Arrival]
    #: What the worker has not leased yet, by level.
    queues: list[deque[Arrival]] = field(default_factory=lambda: [deque() for _ in range(LEVELS)])


class _Run:
    def __init__(
        self, traffic: Traffic, limits: Mapping[str, Limits], cost: CostModel, window: int | None, low_share: float
    ) -> None:
        self._traffic = traffic
        self._cost = cost
        self._window = window
        self._scheduler: Scheduler[Arrival] = Scheduler(low_share)
        self._models = {name: _Model(Batcher(of_model, CostFit())) for name, of_model in limits.items()}
        for model in self._models.values():
            self._scheduler.serve(model.batcher)
        self._order = count()
        self._coming = [(arrival.at, next(self._order), arrival) for arrival in traffic.first()]
        heapq.heapify(self._coming)
        self._begin = self._coming[0][0] if self._coming else 0.0
        self._served: list[Served] = []
        self._batches: list[Batch[Arrival]] = []
        self._expired: list[Arrival] = []
        self._busy_s = 0.0

    def run(self) -> Outcome:
        now = self._begin
        while True:
            self._arrive(now)
            found = self._scheduler.due(now)
            if found is not None:
                self._lease_all(now)
                now = self._run_batch(*found, now)
                continue
            moments = [self._coming[0][0]] if self._coming else []
            wakeup = self._scheduler.next_wakeup(now)
            moments += [] if wakeup is None else [wakeup]
            if not moments:
                return Outcome(self._served, self._batches, self._expired, now - self._begin, self._busy_s)
            now = min(moments)

    def _arrive(self, now: float) -> None:
        while self._coming and self._coming[0][0] <= now:
            arrival = heapq.heappop(self._coming)[2]
            model = self._models[arrival.model]
            model.queues[arrival.level].append(arrival)
            self._lease(model, arrival.level, arrival.at)

    def _lease_all(self, now: float) -> None:
        """A batch has left room."""
        for model in self._models.values():
            for level in range(LEVELS):
                self._lease(model, level, now)

    def _lease(self, model: _Model, level: int, now: float) -> None:
        queue = model.queues[level]
        while queue and (self._window is None or model.batcher.rows_at(level) < self._window):
            arrival = queue.popleft()
            row = Row(arrival, arrival.tokens, arrival.at, level, arrival.flow, arrival.deadline)
            model.batcher.add(row, now)

    def _run_batch(self, batcher: Batcher[Arrival], batch: Batch[Arrival], now: float) -> float:
        """Returns when it ended."""
        seconds = self._cost.seconds(batch.padded_tokens)
        batcher.cost.add(batch.padded_tokens, seconds)
        self._scheduler.ended(batcher, batch, seconds)
        self._batches.append(batch)
        self._busy_s += seconds
        ended = now + seconds
        for row in batch.rows:
            arrival = row.payload
            if arrival.deadline is not None and arrival.deadline <= now:
                self._expired.append(arrival)
            else:
                self._served.append(Served(arrival, now, ended))
            following = self._traffic.after(arrival, ended)
            if following is not None:
                heapq.heappush(self._coming, (following.at, next(self._order), following))
        return ended
