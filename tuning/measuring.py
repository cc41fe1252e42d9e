"""Runs batches of many sizes on the device, and fits to their times what the simulator needs.

A batch that does not run as one, for want of memory as a rule, is a finding: nothing as large is tried again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, median_low

from batching.cost import LEAST_TOKEN_S, CostModel
from inference import Encoded, Model
from tuning.errors import TuningError
from tuning.rows import Rows, Sample

#: Most rows of a batch that is tried.
MOST_ROWS = 1024
#: A batch that takes longer serves nobody; nothing larger is tried, seconds.
LONGEST_BATCH_S = 2.0
#: Times that each size is run, at most; the first does not count.
REPETITIONS = 6
#: A fit that is off by more than this share on average says little.
POOR_FIT = 0.2

Told = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Tried:
    """A size of batch that was tried: rows of `tokens` each. `seconds` is None when it did not run as one batch."""

    rows: int
    tokens: int
    seconds: float | None
    cause: str | None = None

    @property
    def padded_tokens(self) -> int:
        return self.rows * self.tokens

    def __str__(self) -> str:
        told = f"{self.seconds * 1e3:,.2f} ms" if self.seconds is not None else f"NOT POSSIBLE ({self.cause})"
        return f"{self.rows} x {self.tokens} tokens: {told}"


@dataclass(frozen=True)
class Measured:
    """What the device was seen to do, the smallest batches first."""

    batches: Sequence[Tried]
    #: Why no larger batch was tried.
    ended: str
    #: Encoding and postprocessing of one row: what a job's time has beside the device's.
    aside_s: float

    @property
    def ran(self) -> list[Tried]:
        return [batch for batch in self.batches if batch.seconds is not None]

    @property
    def failed(self) -> Tried | None:
        """The size that was not possible."""
        return next((batch for batch in self.batches if batch.seconds is None), None)

    @property
    def most_padded_tokens(self) -> int:
        """Of the largest batch that ran, below the size that was not possible."""
        beyond = self.failed.padded_tokens if self.failed is not None else math.inf
        return max(batch.padded_tokens for batch in self.ran if batch.padded_tokens < beyond)

    @property
    def most_rows(self) -> int:
        return max(batch.rows for batch in self.ran)


@dataclass(frozen=True, slots=True)
class Fit:
    """The line through the measured times, and by how much it is off: shares of the time of a batch."""

    cost: CostModel
    mean_error: float
    worst_error: float

    @property
    def poor(self) -> bool:
        return self.mean_error > POOR_FIT


def measure(
    model: Model, rows: Rows, lengths: Sequence[int], seconds: float, told: Told, *, longest_s: float = LONGEST_BATCH_S
) -> Measured:
    """Run batches of rows of these lengths for about `seconds`, until one takes `longest_s` or is not possible.

    Raises `TuningError` when a row does not even run alone.
    """
    samples = list({sample.tokens: sample for sample in (rows.of(length) for length in lengths)}.values())
    plan = sorted(
        ((2**power, sample) for sample in samples for power in range(MOST_ROWS.bit_length())),
        key=lambda size: (size[0] * size[1].tokens, size[0]),
    )
    aside_s = _aside_s(model, samples[len(samples) // 2])
    deadline = time.monotonic() + seconds
    batches: list[Tried] = []
    ended = ""
    for number, (count, sample) in enumerate(plan):
        left_s = deadline - time.monotonic()
        if batches and not ended and left_s <= _expected_s(batches[-1], count * sample.tokens):
            ended = f"--seconds {seconds:g} were over"
        if ended and count > 1:
            # Rows alone are run all the same: they have to be served.
            continue
        batch = _run(model, sample, count, left_s / (len(plan) - number))
        batches.append(batch)
        told(number + 1, len(plan), str(batch))
        if batch.seconds is None:
            if count == 1:
                raise TuningError(f"model {model.spec.name}: a row of {batch.tokens} tokens fails alone: {batch.cause}")
            ended = "the next larger one was not possible"
        elif batch.seconds > longest_s:
            ended = ended or f"it took over {longest_s:g} s"
    return Measured(batches, ended or "it is the largest that is tried", aside_s)


def fit(batches: Sequence[Tried]) -> Fit:
    """Least squares of the relative errors, with neither an overhead nor a token's time below zero."""
    points = [(batch.padded_tokens, batch.seconds) for batch in batches if batch.seconds]
    # Each point divided by its seconds: the line should be 1 everywhere.
    ones = sum(1 / y**2 for _, y in points)
    x = sum(x / y**2 for x, y in points)
    xx = sum((x / y) ** 2 for x, y in points)
    y = sum(1 / y for _, y in points)
    xy = sum(x / y for x, y in points)
    spread = ones * xx - x * x
    token_s = (ones * xy - x * y) / spread if spread > 1e-9 * ones * xx else 0.0
    overhead_s = (y - token_s * x) / ones
    if overhead_s < 0:
        overhead_s, token_s = 0.0, xy / xx
    if token_s < LEAST_TOKEN_S:
        overhead_s, token_s = y / ones, LEAST_TOKEN_S
    cost = CostModel(overhead_s, token_s)
    errors = [abs(cost.seconds(x) / y - 1) for x, y in points]
    return Fit(cost, fmean(errors), max(errors))


def _run(model: Model, sample: Sample, count: int, allowance_s: float) -> Tried:
    """Run a batch several times, for about `allowance_s` in all, but twice at least."""
    encoded = [sample.encoded] * count
    times: list[float] = []
    begin = time.monotonic()
    while len(times) < REPETITIONS and (len(times) < 2 or time.monotonic() - begin + times[-1] < allowance_s):
        seconds, cause = _timed(model, encoded)
        if cause is not None:
            return Tried(count, sample.tokens, None, cause)
        times.append(seconds)
    # The first run of a size may have chosen kernels and taken memory.
    return Tried(count, sample.tokens, median_low(times[1:]))


def _timed(model: Model, encoded: Sequence[Encoded]) -> tuple[float, str | None]:
    """Seconds that the batch took, and what kept it from running as one."""
    begin = time.perf_counter()
    inferred = model.infer(encoded)
    seconds = time.perf_counter() - begin
    if inferred.split_by is not None:
        return seconds, inferred.split_by
    error = inferred.parts[0].error
    return seconds, None if error is None else f"{error.type}: {error.message}"


def _aside_s(model: Model, sample: Sample) -> float:
    times: list[float] = []
    for _ in range(REPETITIONS):
        begin = time.perf_counter()
        model.encode([sample.row])
        encoded_s = time.perf_counter() - begin
        inferred = model.infer([sample.encoded])
        begin = time.perf_counter()
        model.finish(inferred)
        times.append(encoded_s + time.perf_counter() - begin)
    return median(times)


def _expected_s(last: Tried, padded_tokens: int) -> float:
    """No more than in proportion to the last batch, since a part of its time was overhead."""
    assert last.seconds is not None
    return last.seconds * padded_tokens / last.padded_tokens
