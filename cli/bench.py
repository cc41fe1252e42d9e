"""`sheaf bench`: the benchmarks, for a person and for a program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.problems import CommandError

app = typer.Typer(no_args_is_help=True, help="Measure this machine against peers: ratios taken in one run.")

Quick = Annotated[bool, typer.Option("--quick", help="Fewer and shorter rounds.")]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers as JSON too.")]


@app.callback()
def _group() -> None:
    """Measure this machine against peers.

    Each benchmark starts what it needs: a Valkey, our processes, the peers'. Let nothing else run meanwhile.
    """


@app.command("drain")
def drain_command(quick: Quick = False, json: Json = None) -> None:
    """Jobs per second from a preloaded queue, beside celery-batches and Celery's threads."""
    _run(["drain"], quick, json)


@app.command("submit")
def submit_command(quick: Quick = False, json: Json = None) -> None:
    """Submits per second over HTTP, beside `send_task` in FastAPI and beside a no-op endpoint."""
    _run(["submit"], quick, json)


@app.command("latency")
def latency_command(quick: Quick = False, json: Json = None) -> None:
    """Submit to result at low load, by Celery client and over HTTP, beside a stock Celery worker."""
    _run(["latency"], quick, json)


@app.command("all")
def all_command(quick: Quick = False, json: Json = None) -> None:
    """All of them, one after the other."""
    _run(["drain", "submit", "latency"], quick, json)


def _run(names: list[str], quick: bool, file: Path | None) -> None:
    # Every process of the service passes through this package, and needs none of these.
    from benchmarks import drain, latency, submit
    from benchmarks.processes import BenchmarkError
    from benchmarks.report import Report, write

    benchmarks = {"drain": drain.run, "submit": submit.run, "latency": latency.run}
    reports: list[Report] = []
    for name in names:
        try:
            report = benchmarks[name](quick=quick)
        except BenchmarkError as error:
            raise CommandError(str(error)) from None
        typer.echo(report.as_table() + "\n")
        reports.append(report)
    if file is not None:
        write(reports, file)
