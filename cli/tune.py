"""`sheaf tune`: the batch settings that suit a model, this machine's device, and a traffic."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Annotated, NoReturn, Self

import typer

from broker import Broker, BrokerUnavailable, TrafficRow, queue_name
from cli.devices import Device, chosen_devices
from cli.loading import CONFIG_VARIABLE, known_model, loaded_settings
from cli.parent import SUPERVISOR_VARIABLE
from cli.problems import CommandError
from configs import Settings

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from tuning.replay import Worker


def register(app: typer.Typer) -> None:
    app.command()(tune)


def tune(
    model: Annotated[str, typer.Option("--model", "-m", metavar="NAME", help="The model to tune.")],
    p99_ms: Annotated[
        float | None, typer.Option("--p99-ms", min=0.001, help="Keep the p99 within this, and get the most out of it.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option("--rate", min=0.001, help="Rows a second; brings other traffic to this rate, or makes some up."),
    ] = None,
    traffic: Annotated[
        Path | None,
        typer.Option("--traffic", metavar="FILE", help='JSON lines: {"at": seconds, "tokens": n}, or "text" for it.'),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="cpu|0", help="Instead of the first of workers.devices.")
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0.5, help="For measuring the device.")] = 20.0,
    replay: Annotated[
        float, typer.Option("--replay", min=0, help="Seconds of traffic to try the settings with; 0 to leave it out.")
    ] = 12.0,
    as_json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures as JSON.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.png", help="Where the picture goes: sheaf-tune-NAME.png here."),
    ] = None,
) -> None:
    """Find batch settings for a model: measure it here, simulate its traffic, try the best settings for real.

    The traffic is that of --traffic, else what workers recorded of the model's queue, else made up by --rate. Without
    --p99-ms the least p99 is looked for among settings of at least 90 % of the best throughput; with it, the most
    throughput within that p99. A worker and a server of their own try what is recommended: the running service is not
    touched, but it should be idle on this device. Prints a table, the recommendation, what was predicted and what was
    measured, and the YAML to paste.
    """
    settings = loaded_settings().settings
    known_model(settings, model)
    place = Path(f"sheaf-tune-{model}.png") if plot is None else plot
    if place.suffix != ".png":
        raise CommandError(f"{place}: the picture is a PNG, so name a file that ends in .png")
    for file in (place, as_json):
        if file is not None and not file.absolute().parent.is_dir():
            raise CommandError(f"{file}: there is no folder {file.absolute().parent}")
    _end_on_sigterm()
    # Nothing of this package may cost the other commands the time of loading these.
    from tuning.errors import TuningError
    from tuning.plot import draw
    from tuning.run import Task
    from tuning.run import tune as run
    from tuning.traffic import TrafficFile
    from workers.device import limit_threads
    from workers.loading import limits, model_spec

    try:
        given = None if traffic is None else TrafficFile.read(traffic)
        recorded = _recorded(settings, model, wanted=rate is None) if given is None else []
        chosen = _chosen_device(settings, device)
        limit_threads(settings, chosen.name)
        os.environ["CUDA_VISIBLE_DEVICES"] = chosen.visible
        task = Task(
            settings=settings,
            spec=model_spec(model, settings.models[model], tf32=settings.workers.tf32),
            device=chosen.name,
            present=limits(settings.models[model]),
            worker=_worker(chosen),
            file=given,
            recorded=recorded,
            rate=rate,
            p99_s=None if p99_ms is None else p99_ms / 1e3,
            seconds=seconds,
            replay_s=replay,
        )
        with _shown_progress() as progress:
            report = run(task, progress)
    except TuningError as error:
        raise CommandError(str(error)) from None
    draw(report, place)
    report = report.with_plot(place)
    if as_json is not None:
        as_json.write_text(json.dumps(report.as_json(), indent=2) + "\n")
    typer.echo(report.as_text())


def _recorded(settings: Settings, model: str, *, wanted: bool) -> list[TrafficRow]:
    """What workers noted of this model's queue. Raises `CommandError` when there is nothing, and it is `wanted`."""
    broker = settings.broker
    reader = Broker(broker.server_url, "tune", key_prefix=broker.key_prefix, read_timeout_s=broker.read_timeout_s)
    why = "workers have recorded none"
    try:
        rows = reader.traffic(queue_name(model))
    except BrokerUnavailable as error:
        rows, why = [], f"the broker, which keeps what workers recorded, is away ({error})"
    finally:
        reader.close()
    if wanted and not rows:
        raise CommandError(f"no traffic to tune {model} for: {why}; give --rate R (rows/s) or --traffic FILE")
    return rows


def _chosen_device(settings: Settings, device: str | None) -> Device:
    if device is None:
        return chosen_devices(settings.workers.devices)[0]
    if device != "cpu" and not device.isdecimal():
        raise CommandError(f"--device {device}: it must be cpu, or the number of one GPU")
    return chosen_devices(device)[0]


def _worker(device: Device) -> Worker:
    """A worker process that reads no settings but those of its file, and ends with this process."""
    from tuning.replay import Worker

    environment = {
        name: value
        for name, value in os.environ.items()
        if name != CONFIG_VARIABLE and not (name.startswith("SHEAF_") and "__" in name)
    }
    environment |= {
        "SHEAF_ENV": "dev",
        "CUDA_VISIBLE_DEVICES": device.visible,
        SUPERVISOR_VARIABLE: str(os.getpid()),
    }
    return Worker((sys.executable, "-m", "cli"), ("device", "--device", device.name), environment)


def _end_on_sigterm() -> None:
    """As on Ctrl-C: the worker and the server that try the settings are stopped."""

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    # What `inference` says of batches that were split is in the report.
    logging.getLogger("inference").setLevel(logging.ERROR)


def _shown_progress() -> _Bar | _Lines:
    return _Bar() if sys.stderr.isatty() else _Lines()


class _Lines:
    """Progress as plain lines on standard error: one a stage, and one a step that has something to tell."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """There is nothing to end."""

    def stage(self, name: str, steps: int | None = None) -> None:
        typer.echo(f"{name} ..." if steps is None else f"{name} ({steps}) ...", err=True)

    def step(self, done: int, steps: int, text: str = "") -> None:
        if text:
            typer.echo(f"  {done}/{steps}  {text}", err=True)


class _Bar:
    """Progress as bars on a terminal, one a stage."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._progress: Progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}"),
            console=Console(stderr=True),
        )
        self._bar: TaskID | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._end_stage()
        self._progress.stop()

    def _end_stage(self) -> None:
        if self._bar is not None:
            self._progress.update(self._bar, total=1, completed=1, text="")

    def stage(self, name: str, steps: int | None = None) -> None:
        self._end_stage()
        self._bar = self._progress.add_task(name, total=steps, text="")

    def step(self, done: int, steps: int, text: str = "") -> None:
        if self._bar is not None:
            self._progress.update(self._bar, total=steps, completed=done, text=text)
