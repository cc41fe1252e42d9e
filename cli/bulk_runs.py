"""`sheaf bulk list|show|pause|resume|cancel`: the runs of files and the batches of this broker, wherever they are."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from broker import Wanted
from broker.bulk_runs import MAX_LISTED
from cli.bulk_steering import Steered, unknown
from cli.bulk_views import View
from cli.lines import one_line
from cli.loading import loaded_settings
from cli.problems import CommandError

if TYPE_CHECKING:
    from rich.table import Table

T = TypeVar("T")

#: Columns of a list that no terminal wraps.
WIDE = 1000

Ids = Annotated[
    list[str], typer.Argument(metavar="ID…", help="Ids, bulk_… or batch_…, as `sheaf bulk list` shows them.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    app.command("list")(list_runs)
    app.command()(show)
    app.command()(pause)
    app.command()(resume)
    app.command()(cancel)


def list_runs(
    limit: Annotated[int, typer.Option(min=1, max=MAX_LISTED, help="Most runs and batches.")] = 20,
    as_json: Json = False,
) -> None:
    """List runs of files and batches, the newest first: those that live, and for a while those that have ended."""
    runs = _ask(lambda steered: steered.listed(limit))
    if as_json:
        typer.echo(json.dumps([run.as_json() for run in runs], indent=2))
    elif not runs:
        typer.echo("There are no bulk runs: `sheaf bulk INPUT OUTPUT --model NAME` begins one.")
    else:
        from rich.console import Console

        width = None if sys.stdout.isatty() else WIDE
        # Names of files are shown as they are, whatever is in them.
        Console(width=width, markup=False, emoji=False, highlight=False).print(_table(runs))


def show(
    run_id: Annotated[
        str, typer.Argument(metavar="ID", help="The id, bulk_… or batch_…, as `sheaf bulk list` shows it.")
    ],
    as_json: Json = False,
) -> None:
    """Show one run or batch."""
    run = _ask(lambda steered: steered.get(run_id))
    if run is None:
        raise CommandError(unknown(run_id))
    if as_json:
        typer.echo(json.dumps(run.as_json(), indent=2))
        return
    for name, value in run.as_json().items():
        typer.echo(f"{name}: {'-' if value in (None, '') else one_line(value)}")
    if run.cure:
        typer.echo(run.cure)


def pause(run_ids: Ids) -> None:
    """Have runs take no more rows and leave the workers free; they stay there until they are resumed."""
    _steer(run_ids, Wanted.PAUSE, "paused")


def resume(run_ids: Ids) -> None:
    """Have paused runs go on."""
    _steer(run_ids, Wanted.RUN, "running")


def cancel(run_ids: Ids) -> None:
    """End runs. A file's keeps its checkpoint, and --resume goes on; a batch has what was run in its output."""
    _steer(run_ids, Wanted.CANCEL, "cancelled")


def _ask(question: Callable[[Steered], Awaitable[T]]) -> T:
    async def asked() -> T:
        from bulk.client import open_broker

        async with open_broker(loaded_settings().settings) as broker:
            return await question(Steered(broker))

    return asyncio.run(asked())


def _steer(names: list[str], wanted: Wanted, done: str) -> None:
    """Want it of all of them, and tell of each whether it has done so. Exits with 1 when one has not."""

    async def all_of_them(steered: Steered) -> list[str | None]:
        return await asyncio.gather(*(steered.obeyed(name, wanted) for name in names))

    faults = _ask(all_of_them)
    for name, fault in zip(names, faults, strict=True):
        typer.echo(f"{name}: {done}" if fault is None else f"sheaf: {fault}", err=fault is not None)
    if any(faults):
        raise typer.Exit(1)


def _table(runs: list[View]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("id", "state", "model"):
        table.add_column(name, no_wrap=True)
    for name in ("rows", "failed", "rows/s", "done"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("input -> output", overflow="fold")
    table.add_column("age", justify="right", no_wrap=True)
    for run in runs:
        done = "-" if run.ratio is None else f"{run.ratio:.0%}"
        numbers = (f"{run.succeeded + run.failed:,}", f"{run.failed:,}", f"{run.rows_per_second:,.0f}", done)
        way = f"{run.input} -> {run.output or '-'}"
        table.add_row(run.id, run.state, run.model or "-", *numbers, way, _age(run.created_at))
    return table


def _age(created_at: float) -> str:
    seconds = max(0.0, time.time() - created_at)
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
