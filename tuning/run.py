"""A tuning from beginning to end: load, measure, simulate, choose, try."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from batching import Limits
from batching.simulation import Arrival
from broker import TrafficRow
from configs import ModelSettings, Settings
from inference import Model, ModelLoadError, ModelSpec, free_gpu_memory
from tuning import traffic as traffics
from tuning.errors import TrafficError, TuningError
from tuning.measuring import LONGEST_BATCH_S, Measured, fit, measure
from tuning.replay import Seen, Worker, limits_as_settings, replay
from tuning.report import Predicted, Report
from tuning.rows import Rows
from tuning.search import Bounds, Candidate, Place, Service, choose, frontier, grid, look, worthwhile_sizes
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
#: The rate at which queue and worker are measured alone is the traffic's, within these bounds, rows/s; for how long,
#: seconds; and the rows of their full queues, in batches of one row and of `SERVICE_SIZE`.
LEAST_RATE = 50.0
MOST_RATE = 500.0
SERVICE_S = 4.0
SERVICE_ROWS_ALONE = 500
SERVICE_ROWS = 5000
SERVICE_SIZE = 64


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
    """Raises `TuningError`."""
    progress.stage(f"Loading {task.spec.name} on {task.device}")
    model = _loaded(task)
    rows = Rows(model, task.file.texts if task.file is not None else ())
    traffic = _traffic(task, model, rows)
    progress.stage("Measuring queue and worker without a model")
    service = _service(task, traffic, rows)
    progress.stage("Measuring batches")
    longest_row = max(traffic.lengths[-1], (rows.limit if rows.have_length else None) or 1)
    lengths = [*(traffic.quantile(share) for share in QUANTILES), longest_row]
    longest_s = min(LONGEST_BATCH_S, task.p99_s or LONGEST_BATCH_S)
    measured = measure(model, rows, lengths, task.seconds, progress.step, longest_s=longest_s)
    found = fit(measured.ran)
    place = Place(found.cost, service, task.settings.workers.prefetch_batches, measured.aside_s)
    bounds = _bounds(task, measured, rows, longest_row)
    candidates, present = _searched(task, traffic, place, bounds, progress)
    # What runs today is known to run, even where it is larger than what was measured.
    known = candidates if present is None or present in candidates else [*candidates, present]
    chosen, kept = choose(known, task.p99_s)
    report = Report(
        model=task.spec.name,
        device=task.device,
        traffic=traffic,
        measured=measured,
        fit=found,
        service=service,
        candidates=candidates,
        frontier=frontier(known),
        present=present,
        present_limits=task.present,
        chosen=chosen,
        p99_s=task.p99_s,
        kept=kept,
    )
    if task.replay_s <= 0:
        return report
    stretch = traffic.busiest(task.replay_s, MOST_REPLAYED)
    texts = {tokens: rows.of(tokens).row for tokens in set(traffic.lengths)}
    # The worker needs the device's memory.
    del model, rows
    free_gpu_memory()
    progress.stage(f"Trying the settings with a worker, {stretch.seconds:.0f} s of traffic")
    return _tried(task, report, place, stretch, texts.__getitem__)


def _loaded(task: Task) -> Model:
    try:
        # A warm-up runs the largest batch of the present settings; here the sizes come in order.
        return Model.load(replace(task.spec, warmup=False), task.device)
    except ModelLoadError as error:
        raise TuningError(str(error)) from None


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


def _service(task: Task, traffic: Traffic, rows: Rows) -> Service:
    """Queue and worker with a model that takes no time, in batches of one row and of many."""
    row = rows.of(traffic.quantile(0.5)).row
    rate = max(LEAST_RATE, min(MOST_RATE, traffic.rate))
    arrivals = (
        traffics.made_up(rate, longest=1).busiest(min(SERVICE_S, task.replay_s or SERVICE_S), MOST_REPLAYED).arrivals
    )

    def served(size: int, count: int, arrivals: Sequence[Arrival]) -> Seen:
        limits = Limits(max_batch_size=size, max_batch_tokens=size, max_wait_s=0.0)
        own = ModelSettings(handler="inference.handlers.echo:Echo", **limits_as_settings(limits))
        full_queue = count * [Arrival(0.0, 1)]
        return replay(task.settings, task.spec.name, own, task.worker, full_queue, arrivals, lambda _: row)

    alone = served(1, SERVICE_ROWS_ALONE, arrivals)
    together = served(SERVICE_SIZE, SERVICE_ROWS, ())
    return Service.of(alone.capacity, together.capacity, SERVICE_SIZE, alone.latencies_s)


def _bounds(task: Task, measured: Measured, rows: Rows, longest_row: int) -> Bounds:
    most_rows = measured.most_rows
    if task.settings.broker.max_queue_depth:
        most_rows = min(most_rows, task.settings.broker.max_queue_depth)
    # Where rows have no length, only their number counts; tokens stay as they are.
    most_tokens = measured.most_padded_tokens if rows.have_length else max(task.present.max_batch_tokens, most_rows)
    return Bounds(most_rows, max(most_tokens, longest_row), longest_row)


def _searched(
    task: Task, traffic: Traffic, place: Place, bounds: Bounds, progress: Progress
) -> tuple[list[Candidate], Candidate | None]:
    """What keeps up with the traffic, and the present settings where they do."""
    progress.stage("Simulating settings")
    sizes = worthwhile_sizes(traffic, place, bounds)
    candidates = list(look(grid(task.present, bounds, sizes), traffic, place, progress.step))
    if not candidates:
        most = max(place.capacity(traffic, Limits(size, bounds.tokens_of(size), 0.0)) for size in sizes)
        raise TuningError(
            f"no setting keeps up with {traffic.rate:,.1f} rows/s: the most is {most:,.1f} rows/s; "
            "add devices, or tune for a lower --rate"
        )
    present = next((one for one in candidates if one.limits == task.present), None)
    if present is None and task.present.max_batch_tokens >= traffic.lengths[-1]:
        # Out of bounds, so it is no choice, but still where one comes from.
        present = next(look([task.present], traffic, place, progress.step), None)
    return candidates, present


def _tried(task: Task, report: Report, place: Place, stretch: Traffic, make_row: Callable[[int], object]) -> Report:
    limits = report.chosen.limits
    full_queue = _full_queue(task, report)
    own = task.settings.models[task.spec.name].model_copy(update=limits_as_settings(limits))
    seen = replay(task.settings, task.spec.name, own, task.worker, full_queue, stretch.arrivals, make_row)
    p50_s, p99_s = place.latencies_s(stretch, limits)
    rows_per_s = len(stretch.arrivals) / (stretch.seconds + p50_s)
    return replace(report, predicted=Predicted(p50_s, p99_s, rows_per_s, report.chosen.capacity), seen=seen)


def _full_queue(task: Task, report: Report) -> list[Arrival]:
    """Rows of the traffic, over and over, that keep the worker busy for a while."""
    seconds = min(FULL_QUEUE_S, FULL_QUEUE_SHARE * task.replay_s)
    batches = FULL_QUEUE_BATCHES * report.chosen.limits.max_batch_size
    count = min(FULL_QUEUE_ROWS, max(batches, int(seconds * report.chosen.capacity)))
    arrivals = report.traffic.arrivals
    return [arrivals[number % len(arrivals)] for number in range(count)]
