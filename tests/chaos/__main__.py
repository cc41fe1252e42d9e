"""`python -m tests.chaos`: the chaos run, for a person and for a program."""

from __future__ import annotations

import json as json_format
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from tests.chaos.cluster import ChaosError
from tests.chaos.run import run

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    minutes: Annotated[
        float, typer.Option(help="How long things are broken; start and end come on top.", min=0.1)
    ] = 10,
    seed: Annotated[int, typer.Option(help="Decides what is submitted and broken, in which order and when.")] = 1,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON too.")] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where the run's logs and data go, and stay. Else a temporary one, kept after a failure."),
    ] = None,
) -> None:
    """Submit jobs over HTTP and with Celery while workers and the broker are killed, frozen, restarted and cut off.

    In the end every accepted job must be settled once, with the right output, or be with the dead letters, with a
    reason. The table says so; the exit status is 1 when it is not so, and 2 when the run could not be carried out.
    """
    signal.signal(signal.SIGTERM, _end)
    place = folder or Path(tempfile.mkdtemp(prefix="sheaf-chaos-"))
    try:
        report = run(place.resolve(), minutes, seed, lambda text: typer.echo(text, err=True))
    except ChaosError as error:
        typer.echo(f"chaos: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(report.as_table())
    if json is not None:
        json.write_text(json_format.dumps(report.as_json(), indent=2) + "\n")
    if report.passed and folder is None:
        shutil.rmtree(place)
    elif not report.passed:
        typer.echo(f"The logs are in {place}.", err=True)
    raise typer.Exit(0 if report.passed else 1)


def _end(_number: int, _frame: FrameType | None) -> None:
    """End as with Ctrl-C: what was started is ended too."""
    sys.exit(143)


if __name__ == "__main__":
    app()
