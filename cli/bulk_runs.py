"""`sheaf bulk list|show|pause|resume|cancel`: the bulk runs of this broker, on whatever machine they are."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from broker import BulkRun, BulkRuns, RunState, Wanted
from broker.bulk_runs import MAX_LISTED
from cli.loading import loaded_settings
from cli.problems import CommandError

if TYPE_CHECKING:
    from rich.table import Table

T = TypeVar("T")

#: Seconds for which a run may take to do what is wanted of it.
CONFIRMED_WITHIN_S = 10.0
#: Seconds between looks at whether it has.
LOOK_EVERY_S = 0.2
#: Columns of a list that no terminal wraps.
WIDE = 1000

Ids = Annotated[list[str], typer.Argument(metavar="ID…", help="Ids of runs, bulk_…, as `sheaf bulk list` shows them.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    app.command("list")(list_runs)
    app.command()(show)
    app.command()(pause)
    app.command()(resume)
    app.command()(cancel)


def list_runs(
    limit: Annotated[int, typer.Option(min=1, max=MAX_LISTED, help="Most runs, those that were heard of last.")] = 20,
    as_json: Json = False,
) -> None:
    """List runs, the newest first: those that live, and for a week those that have ended."""
    runs = _ask(lambda registry: registry.listed(limit))
    if as_json:
        typer.echo(json.dumps([_view(run) for run in runs], indent=2))
    elif not runs:
        typer.echo("There are no bulk runs: `sheaf bulk INPUT OUTPUT --model NAME` begins one.")
    else:
        from rich.console import Console

        width = None if sys.stdout.isatty() else WIDE
        # Names of files are shown as they are, whatever is in them.
        Console(width=width, markup=False, emoji=False, highlight=False).print(_table(runs))


def show(
    run_id: Annotated[
        str, typer.Argument(metavar="ID", help="The id of a run, bulk_…, as `sheaf bulk list` shows it.")
    ],
    as_json: Json = False,
) -> None:
    """Show one run."""
    run = _ask(lambda registry: registry.get(run_id))
    if run is None:
        raise CommandError(_unknown(run_id))
    if as_json:
        typer.echo(json.dumps(_view(run), indent=2))
        return
    for name, value in _view(run).items():
        typer.echo(f"{name}: {'-' if value in (None, '') else value}")
    if how := _how_to_go_on(run):
        typer.echo(how)


def pause(run_ids: Ids) -> None:
    """Have runs take no more rows and leave the workers free; they stay there until they are resumed."""
    _steer(run_ids, Wanted.PAUSE, {RunState.PAUSED}, "paused")


def resume(run_ids: Ids) -> None:
    """Have paused runs go on."""
    # A run that goes on may be at its end before we look.
    _steer(run_ids, Wanted.RUN, {RunState.RUNNING, RunState.SUCCEEDED}, "running")


def cancel(run_ids: Ids) -> None:
    """End runs. Their checkpoints stay: the same command with --resume goes on."""
    _steer(run_ids, Wanted.CANCEL, {RunState.CANCELLED}, "cancelled")


def _ask(question: Callable[[BulkRuns], Awaitable[T]]) -> T:
    async def asked() -> T:
        async with _registry() as registry:
            return await question(registry)

    return asyncio.run(asked())


@asynccontextmanager
async def _registry() -> AsyncIterator[BulkRuns]:
    from bulk.client import open_broker

    async with open_broker(loaded_settings().settings) as broker:
        yield broker.bulk_runs


def _steer(run_ids: list[str], wanted: Wanted, confirmed: Collection[RunState], done: str) -> None:
    """Want it of all of them, and tell of each whether it has done so. Exits with 1 when one has not."""

    async def all_of_them(registry: BulkRuns) -> list[str | None]:
        return await asyncio.gather(*(_obeyed(registry, run_id, wanted, confirmed) for run_id in run_ids))

    faults = _ask(all_of_them)
    for run_id, fault in zip(run_ids, faults, strict=True):
        typer.echo(f"{run_id}: {done}" if fault is None else f"sheaf: {fault}", err=fault is not None)
    if any(faults):
        raise typer.Exit(1)


async def _obeyed(registry: BulkRuns, run_id: str, wanted: Wanted, confirmed: Collection[RunState]) -> str | None:
    """None when the run has done what is wanted, else why not."""
    run = await registry.want(run_id, wanted)
    deadline = time.monotonic() + CONFIRMED_WITHIN_S
    if run is not None and run.ended:
        return _over(run)
    while run is not None and run.state not in confirmed:
        if run.ended:
            return _over(run)
        if time.monotonic() > deadline:
            return (
                f"{run_id} has not answered for {CONFIRMED_WITHIN_S:g} s, and is {run.state}: it does so when it hears "
                f"of it; see `sheaf bulk show {run_id}`"
            )
        await asyncio.sleep(LOOK_EVERY_S)
        run = await registry.get(run_id)
    return _unknown(run_id) if run is None else None


def _over(run: BulkRun) -> str:
    why = f" ({run.error})" if run.error else ""
    how = _how_to_go_on(run)
    return f"{run.id} has ended, it is {run.state}{why}" + (f": {how}" if how else "")


def _how_to_go_on(run: BulkRun) -> str | None:
    """For a run that has ended before all was done; None where there is nothing to do, or no way to."""
    unfinished = run.state in (RunState.STOPPED, RunState.CANCELLED, RunState.FAILED)
    return "the same command with --resume goes on" if unfinished and "-" not in (run.input, run.output) else None


def _unknown(run_id: str) -> str:
    return f"there is no bulk run {run_id}: see `sheaf bulk list`; runs are kept for a week"


def _table(runs: list[BulkRun]) -> Table:
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
        numbers = (f"{run.rows:,}", f"{run.failed:,}", f"{run.rows_per_second:,.0f}", done)
        table.add_row(run.id, run.state, run.model, *numbers, f"{run.input} -> {run.output}", _age(run.created_at))
    return table


def _age(created_at: float) -> str:
    seconds = max(0.0, time.time() - created_at)
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _view(run: BulkRun) -> dict[str, object]:
    return asdict(run) | {
        "created_at": _moment(run.created_at),
        "updated_at": _moment(run.updated_at),
        "rows": run.rows,
        "rows_per_second": round(run.rows_per_second, 1),
        "ratio": None if run.ratio is None else round(run.ratio, 4),
    }


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
