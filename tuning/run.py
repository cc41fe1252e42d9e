"""A tuning from beginning to end: load, measure, simulate, choose, try."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from batching import Limits
from batching.simulation import Arrival, Trace, simulate
from broker import TrafficRow
from configs import Settings
from inference import Model, ModelSpec, free_gpu_memory
from tuning import traffic as traffics
from tuning.errors import TrafficError, TuningError
from tuning.measuring import LONGEST_BATCH_S, Fit, Measured, fit, measure
from tuning.replay import Worker, replay
from tuning.report import Predicted, Report
from tuning.rows import Rows
from tuning.search import Bounds, Candidate, Place, choose, frontier, grid, look
from tuning.traffic import Traffic, TrafficFile

#: Quantiles of the traffic's lengths that are measured, beside the longest row of all.
QUANTILES = (0.1, 0.5, 0.9, 0.99)
#: Most rows that are replayed.
MOST_REPLAYED = 20_000
#: Seconds of work in the full queue of a replay, at most, and as a share of the replay's own.
FULL_QUEUE_S = 3.0
FULL_QUEUE_SHARE = 0.3
#: Batches in it at least, and rows at most.
FULL_QUEUE_BATCHES = 8
FULL_QUEUE_ROWS = 10_000


class Progress(Protocol):
    """Who looks on."""

    def stage(self, name: str, steps: int | None = None) -> None:
        """Something of so many steps begins; None when there are none to count."""

    def step(self, done: int, steps: int, text: str = "") -> None:
        """So many of its steps are done."""


@dataclass(frozen=True)
class Task:
    """What is to be tuned, and for what."""

    settings: Settings
    spec: ModelSpec
    device: str
    present: Limits
    worker: Worker
    #: Where the traffic comes from: a file, else what was recorded, else `rate`.
    file: TrafficFile | None = None
    recorded: Sequence[TrafficRow] = ()
    rate: float | None = None
    p99_s: float | None = None
    #: For the measuring, and of the traffic that is replayed; 0 for no replay.
    seconds: float = 20.0
    replay_s: float = 12.0


def tune(task: Task, progress: Progress) -> Report:
    """Raises `TuningError`, or `inference.ModelLoadError`."""
    progress.stage(f"Loading {task.spec.name} on {task.device}")
    # A warm-up runs the largest batch of the present settings; here the sizes come in order.
    model = Model.load(replace(task.spec, warmup=False), task.device)
    rows = Rows(model, task.file.texts if task.file is not None else ())
    traffic = _traffic(task, model, rows)
    longest_row = max(traffic.lengths[-1], (rows.limit if rows.have_length else None) or 1)
    progress.stage("Measuring batches")
    lengths = [*(traffic.quantile(share) for share in QUANTILES), longest_row]
    longest_s = min(LONGEST_BATCH_S, task.p99_s or LONGEST_BATCH_S)
    measured = measure(model, rows, lengths, task.seconds, progress.step, longest_s=longest_s)
    found = fit(measured.ran)
    # The worker that tries the settings needs the device's memory, and rows need only the handler's encoding.
    bounds = Bounds(
        most_rows=_most_rows(task, measured, rows),
        most_tokens=measured.most_padded_tokens if rows.have_length else task.present.max_batch_tokens,
        longest_row=longest_row,
        have_length=rows.have_length,
    )
    report = _searched(task, traffic, measured, found, bounds, progress)
    if task.replay_s > 0:
        stretch = traffic.busiest(task.replay_s, MOST_REPLAYED)
        texts = {arrival.tokens: rows.of(arrival.tokens).row for arrival in (*traffic.arrivals,)}
        del model, rows
        free_gpu_memory()
        report = _tried(task, report, stretch, texts.__getitem__, progress)
    return report


def _traffic(task: Task, model: Model, rows: Rows) -> Traffic:
    if task.file is not None:
        found = task.file.traffic(model.encode)
    elif task.recorded:
        found = traffics.recorded(task.recorded)
    elif task.rate is not None:
        longest = (rows.limit or traffics.LONGEST_TOKENS) if rows.have_length else 1
        found = traffics.made_up(task.rate, longest)
    else:
        raise TrafficError(f"no traffic to tune {task.spec.name} for: give --rate R (rows/s) or --traffic FILE")
    if rows.limit is not None:
        found = found.cut_to(rows.limit)
    if task.rate is not None and (task.file is not None or task.recorded):
        found = found.at_rate(task.rate)
    return found


def _most_rows(task: Task, measured: Measured, rows: Rows) -> int:
    """Of a batch: no more than ran, and than the other settings allow."""
    failed = measured.failed
    most = measured.most_rows
    if failed is not None and not rows.have_length:
        most = min(most, failed.rows - 1)
    depth = task.settings.broker.max_queue_depth
    return min(most, depth) if depth else most


def _searched(
    task: Task, traffic: Traffic, measured: Measured, found: Fit, bounds: Bounds, progress: Progress
) -> Report:
    part = traffic.busiest(traffic.seconds, traffics.MOST_ROWS)
    place = Place(found.cost, task.settings.workers.prefetch_batches, measured.aside_s)
    settings = grid(task.present, bounds)
    progress.stage("Simulating settings", len(settings))
    candidates = list(look(settings, part, place, progress.step))
    present = _present(task.present, part, place)
    if present is not None and _within(task.present, bounds):
        candidates.append(present)
    if not candidates:
        best = max(settings, key=lambda limits: place.capacity(part, limits))
        raise TuningError(
            f"no setting keeps up with {part.rate:,.4g} rows/s: the most is {place.capacity(part, best):,.4g} rows/s "
            f"(max_batch_size {best.max_batch_size}); add devices, or tune for a lower --rate"
        )
    chosen, kept = choose(candidates, task.p99_s)
    return Report(
        model=task.spec.name,
        device=task.device,
        traffic=part,
        measured=measured,
        fit=found,
        candidates=candidates,
        frontier=frontier(candidates),
        present=present,
        present_limits=task.present,
        chosen=chosen,
        p99_s=task.p99_s,
        kept=kept,
    )


def _present(limits: Limits, traffic: Traffic, place: Place) -> Candidate | None:
    """The present settings; None when they refuse a row of the traffic, or do not keep up with it."""
    if limits.max_batch_tokens < traffic.lengths[-1]:
        return None
    return next(look([limits], traffic, place, lambda done, steps: None), None)


def _within(limits: Limits, bounds: Bounds) -> bool:
    return limits.max_batch_size <= bounds.most_rows and limits.max_batch_tokens <= bounds.most_tokens


def _tried(
    task: Task, report: Report, stretch: Traffic, make_row: Callable[[int], object], progress: Progress
) -> Report:
    limits = report.chosen.limits
    place = Place(report.fit.cost, task.settings.workers.prefetch_batches, report.measured.aside_s)
    outcome = simulate(Trace(stretch.arrivals), limits, place.cost, window=place.window(limits))
    p50_s, p99_s = place.latencies_s(stretch, limits)
    predicted = Predicted(p50_s, p99_s, outcome.rows_per_s, report.chosen.capacity)
    progress.stage(f"Trying the settings with a worker, {stretch.seconds:.0f} s of traffic")
    full_queue = _full_queue(task, report)
    seen = replay(task.settings, task.spec.name, limits, task.worker, full_queue, stretch.arrivals, make_row)
    return replace(report, predicted=predicted, seen=seen)


def _full_queue(task: Task, report: Report) -> list[Arrival]:
    """Rows of the traffic, over and over, that keep the worker busy for a while."""
    seconds = min(FULL_QUEUE_S, FULL_QUEUE_SHARE * task.replay_s)
    batches = FULL_QUEUE_BATCHES * report.chosen.limits.max_batch_size
    count = min(FULL_QUEUE_ROWS, max(batches, int(seconds * report.chosen.capacity)))
    arrivals = report.traffic.arrivals
    return [arrivals[number % len(arrivals)] for number in range(count)]
