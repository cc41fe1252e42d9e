"""`sheaf bench`: the benchmarks, for a person and for a program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.problems import CommandError

if TYPE_CHECKING:
    from benchmarks.report import Report

app = typer.Typer(no_args_is_help=True, help="Measure this machine against peers: ratios taken in one run.")

Quick = Annotated[bool, typer.Option("--quick", help="Fewer and shorter rounds.")]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers as JSON too.")]
Peers = Annotated[str, typer.Option("--peers", metavar="mosec,litserve", help="Beside these servers.")]


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


@app.command("serve")
def serve_command(peers: Peers = "mosec,litserve", quick: Quick = False, json: Json = None) -> None:
    """Embeddings over HTTP, texts of one length and of unlike lengths, beside servers that batch in memory."""
    _run(["serve"], quick, json, peers)


@app.command("efficiency")
def efficiency_command(quick: Quick = False, json: Json = None) -> None:
    """A full queue of texts, beside the bare model on the same batches and on batches in order of arrival."""
    _run(["efficiency"], quick, json)


@app.command("policy")
def policy_command(quick: Quick = False, json: Json = None) -> None:
    """Latency at 5 requests a second, beside batches that wait until they are full; a sweep of size and wait."""
    _run(["policy"], quick, json)


@app.command("depth")
def depth_command(quick: Quick = False, json: Json = None) -> None:
    """Jobs per second from a queue of a million, beside one of ten thousand; bytes per queued job."""
    _run(["depth"], quick, json)


@app.command("waiters")
def waiters_command(quick: Quick = False, json: Json = None) -> None:
    """Memory and processor time of an API process that ten thousand callers wait at."""
    _run(["waiters"], quick, json)


@app.command("webhooks")
def webhooks_command(quick: Quick = False, json: Json = None) -> None:
    """Jobs per second whose webhook's receiver is down, and whose answers, beside jobs without a webhook."""
    _run(["webhooks"], quick, json)


@app.command("bulk")
def bulk_command(quick: Quick = False, json: Json = None) -> None:
    """Rows per second of a file, beside the bare model; latency of callers while a file runs, beside alone."""
    _run(["bulk"], quick, json)


@app.command("all")
def all_command(quick: Quick = False, json: Json = None) -> None:
    """All of them, one after the other."""
    _run(
        ["drain", "submit", "latency", "serve", "efficiency", "policy", "depth", "waiters", "webhooks", "bulk"],
        quick,
        json,
    )


def _run(names: list[str], quick: bool, file: Path | None, peers: str = "mosec,litserve") -> None:
    benchmarks = _benchmarks(peers.split(","))
    from benchmarks.processes import BenchmarkError
    from benchmarks.report import write

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


def _benchmarks(peers: list[str]) -> Mapping[str, Callable[..., Report]]:
    # Every process of the service passes through this package, and needs none of these.
    from benchmarks import bulk, depth, drain, efficiency, latency, policy, serve, submit, waiters, webhooks

    return {
        "drain": drain.run,
        "submit": submit.run,
        "latency": latency.run,
        "serve": partial(serve.run, peers=peers),
        "efficiency": efficiency.run,
        "policy": policy.run,
        "depth": depth.run,
        "waiters": waiters.run,
        "webhooks": webhooks.run,
        "bulk": bulk.run,
    }
