"""`sheaf bulk`: a file of any size through a model, at the lowest priority."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from broker import AsyncBroker, RunState
from bulk.engine import WINDOW
from cli import bulk_runs
from cli.bulk_progress import Bar, Lines, line, shown
from cli.default_command import DefaultCommandGroup
from cli.loading import loaded_settings
from cli.problems import CommandError, WrongOption
from configs import Settings

if TYPE_CHECKING:
    from bulk.formats import Format
    from bulk.locations import Location
    from bulk.run import Progress, Task

T = TypeVar("T")

#: All rows are done, and some of them failed.
SOME_FAILED = 3
#: Ended by `sheaf bulk cancel`.
CANCELLED = 4
#: Stopped by a signal, as shells tell it.
INTERRUPTED = 130


app = typer.Typer(
    cls=DefaultCommandGroup,
    no_args_is_help=True,
    short_help="A file of any size through a model, and the runs that do so.",
    subcommand_metavar="list|show|pause|resume|cancel …",
    help="See and steer the runs of this broker, on whatever machine they are. (A file with such a name: `./list`.)",
)
bulk_runs.register(app)


@app.command(hidden=True)
def run(
    source: Annotated[str, typer.Argument(metavar="INPUT", help="A path, s3://, gs:// or another URL, or - .")],
    output: Annotated[str, typer.Argument(metavar="OUTPUT", help="As INPUT. It is there when all of it is.")],
    model: Annotated[str, typer.Option("--model", help="A model of this service.")],
    column: Annotated[
        str | None,
        typer.Option("--column", help="The input; `text` for an embedding, else the whole row."),
    ] = None,
    result_column: Annotated[
        str | None, typer.Option("--result-column", help="The answer; `embedding` for an embedding, else `output`.")
    ] = None,
    id_column: Annotated[str | None, typer.Option("--id-column", help="A column to tell beside each error.")] = None,
    window: Annotated[int, typer.Option("--window", min=1, help="Rows that are under way at a time.")] = WINDOW,
    errors: Annotated[
        str | None, typer.Option("--errors", help="For rows that fail; OUTPUT.errors.jsonl without it.")
    ] = None,
    input_format: Annotated[
        str | None,
        typer.Option(
            "--input-format", help="jsonl, csv, tsv or parquet, where no suffix tells; jsonl.gz, csv.zst … if packed."
        ),
    ] = None,
    output_format: Annotated[str | None, typer.Option("--output-format", help="As --input-format.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a run of these files stopped.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary as JSON at the end.")] = False,
) -> None:
    """Run every row of a file through a model, at the lowest priority.

    Files are JSON lines, CSV, TSV or Parquet, text also as .gz or .zst. The output has the input's columns and order,
    and one more column; rows that fail are in the file of errors instead. Stopped or killed, --resume goes on.

    Exit codes: 0 all rows succeeded; 1 it could not be done; 2 wrong options; 3 done, but some rows failed; 4 ended by
    `sheaf bulk cancel`; 130 stopped by a signal.
    """
    settings = loaded_settings().settings
    if model not in settings.models:
        raise WrongOption(f"--model {model}: the settings name {', '.join(settings.models)}")
    texts = settings.models[model].task == "embedding"
    # Nothing of this room may cost the other commands the time of loading it.
    from bulk.errors import BulkError, RunCancelled
    from bulk.run import Task

    read_from, read_as = _as_asked(_place(source, "INPUT"), input_format, "--input-format")
    written_to, written_as = _as_asked(_place(output, "OUTPUT"), output_format, "--output-format")
    task = Task(
        model=model,
        input=read_from,
        output=written_to,
        errors=_errors(written_to, output, errors),
        column=column or ("text" if texts else None),
        result=result_column or ("embedding" if texts else "output"),
        id_column=id_column,
        texts=texts,
        input_format=read_as,
        output_format=written_as,
        window=window,
        resume=resume,
        overwrite=overwrite,
    )
    _check(task)
    try:
        with shown() as display:
            run_id, done = asyncio.run(_stoppable(_run(settings, task, display)))
    except RunCancelled:
        raise _ended(task, "cancelled", CANCELLED) from None
    except BulkError as error:
        raise CommandError(str(error)) from None
    except asyncio.CancelledError:
        raise _ended(task, "stopped", INTERRUPTED) from None
    _tell_end(task, run_id, done, as_json=as_json)
    raise typer.Exit(SOME_FAILED if done.failed else 0)


def _ended(task: Task, how: str, code: int) -> typer.Exit:
    """Say how a run ended before all was done."""
    if not task.resumable:
        then = "what was read from a pipe is gone"
    else:
        then = "--resume goes on" if task.checkpoint_path.exists() else "nothing was begun"
    typer.echo(f"sheaf: {how}; {then}", err=True)
    return typer.Exit(code)


def _place(text: str, what: str) -> Location:
    from bulk.errors import UnsupportedFormat
    from bulk.locations import Location

    try:
        return Location.parse(text)
    except UnsupportedFormat as error:
        raise WrongOption(f"{what}: {error}") from None


def _errors(place: Location, output: str, errors: str | None) -> Location | None:
    if errors is not None:
        return _place(errors, "--errors")
    return None if place.is_standard else _place(f"{output}.errors.jsonl", "OUTPUT")


def _as_asked(place: Location, name: str | None, option: str) -> tuple[Location, Format | None]:
    """The place, and its format if `name` is one; it may say how the file is packed, too."""
    from bulk.errors import UnsupportedFormat
    from bulk.formats import named

    if name is None:
        return place, None
    try:
        asked, packed = named(name)
    except UnsupportedFormat as error:
        raise WrongOption(f"{option} {name}: {error}") from None
    return replace(place, packed=packed or None), asked


def _check(task: Task) -> None:
    """See what is wrong whatever is in the files. Raises `WrongOption`."""
    from bulk.errors import SamePlace, UnknownFormat, UnsupportedFormat
    from bulk.formats import format_of
    from bulk.places import check_apart

    for what, place, asked in (("input", task.input, task.input_format), ("output", task.output, task.output_format)):
        try:
            format_of(place, asked)
        except UnknownFormat as error:
            raise WrongOption(f"{what.upper()}: {error}: name its format with --{what}-format") from None
        except UnsupportedFormat as error:
            raise WrongOption(f"{what.upper()}: {error}") from None
    if task.resume and not task.resumable:
        raise WrongOption("--resume: neither standard input nor standard output can be gone on with; name files")
    try:
        check_apart(task.places)
    except SamePlace as error:
        raise WrongOption(str(error)) from None
    if task.result == task.column:
        raise WrongOption(f"--result-column {task.result}: it is what the model is given; choose another name")


async def _stoppable(work: Coroutine[None, None, T]) -> T:
    """SIGINT and SIGTERM cancel the work, which keeps what it has done; a second one cuts that short."""
    running = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, running.cancel)
    return await running


async def _run(settings: Settings, task: Task, display: Bar | Lines) -> tuple[str, Progress]:
    """The run's id, and how far it has come: to the end."""
    from bulk.client import open_broker
    from bulk.registration import described, registered
    from bulk.run import prepared

    entry = described(task)
    callbacks = partial(_tell_state, display, entry.id), partial(_tell_reached, display)
    async with open_broker(settings) as broker:
        await _look_for_workers(broker, task.model)
        # What fails at once is nobody's run.
        async with prepared(task) as run, registered(broker.bulk_runs, entry, *callbacks) as registration:
            display.say(f"run {entry.id}; `sheaf bulk pause {entry.id}` pauses it")

            def tell(progress: Progress) -> None:
                registration.tell(progress)
                display.tell(progress)

            done = await run.run(broker, tell, registration.steering)
            registration.tell(done)
    return entry.id, done


def _tell_state(display: Bar | Lines, run_id: str, state: RunState) -> None:
    """What people have brought the run to."""
    match state:
        case RunState.PAUSED:
            display.say(f"paused; `sheaf bulk resume {run_id}` goes on")
        case RunState.RUNNING:
            display.say("goes on")
        case RunState.CANCELLING:
            display.say("cancelling")


def _tell_reached(display: Bar | Lines, now: bool) -> None:
    display.say("the broker is back; rows go on" if now else "the broker is away; rows wait, and go on when it is back")


async def _look_for_workers(broker: AsyncBroker, model: str) -> None:
    """Say so when nobody serves the model now. Raises `CommandError` when none of those who tried could load it."""
    models = [info for worker in await broker.overview.workers() for info in worker.models if info.name == model]
    if not models:
        typer.echo(f"sheaf: no worker serves {model} now; rows wait until one does", err=True)
    elif all(info.state == "failed" for info in models):
        raise CommandError(f"no worker could load {model}: {models[0].error}")


def _tell_end(task: Task, run_id: str, done: Progress, *, as_json: bool) -> None:
    kept = None if not done.failed or task.errors is None else task.errors.url
    if as_json:
        summary = {
            "run": run_id,
            "rows": done.rows,
            "succeeded": done.succeeded,
            "failed": done.failed,
            "resumed_from": done.resumed_from,
            "seconds": round(done.seconds, 3),
            "rows_per_second": round(done.rows_per_second, 1),
            "output": task.output.url,
            "errors": kept,
        }
        # Standard output may be the rows'.
        typer.echo(json.dumps(summary), err=task.output.is_standard)
        return
    where = "" if not done.failed else f"; those that failed: {kept or '--errors FILE would keep them'}"
    typer.echo(f"sheaf: {line(done)}{where}", err=True)
