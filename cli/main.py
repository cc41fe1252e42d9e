"""The `sheaf` command: its global options, its commands, and one line for every error that a person can mend."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from broker.errors import BrokerError
from cli import bench, bulk, config, dead, keys, services, tune, webhooks
from cli.loading import CONFIG_VARIABLE, loaded_settings
from cli.parent import end_with_parent
from cli.problems import CommandError
from configs import SettingsError
from telemetry.metrics import MetricsPortTaken

app = typer.Typer(
    name="sheaf",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    epilog="Start with `sheaf up`, then open http://127.0.0.1:8000/docs. Every setting: `sheaf config show`.",
)
app.add_typer(config.app, name="config")
app.add_typer(bench.app, name="bench")
app.add_typer(dead.app, name="dead")
app.add_typer(webhooks.app, name="webhooks")
app.add_typer(keys.app, name="keys")
app.add_typer(bulk.app, name="bulk")
services.register(app)
tune.register(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(installed_version("sheaf"))
        raise typer.Exit


@app.callback()
def global_options(
    file: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="One more YAML layer, above base.yaml and {SHEAF_ENV}.yaml."),
    ] = None,
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Asynchronous GPU inference on Celery and Redis.

    Jobs come in over HTTP or from any Celery client, wait in Redis, and are run in batches by one worker per device.
    """
    if file is not None:
        # Child processes and Celery's own commands read it too.
        os.environ[CONFIG_VARIABLE] = str(file.resolve())
    # A user's own handlers are found from where the command is run, as Celery finds its apps.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


@app.command()
def version() -> None:
    """Print the version."""
    _print_version(True)


@app.command()
def openapi() -> None:
    """Print the OpenAPI document of the HTTP API."""
    from api.app import document

    typer.echo(json.dumps(document(loaded_settings().settings), indent=2, sort_keys=True))


def main() -> NoReturn:
    """The entry point; ends the process."""
    end_with_parent()
    try:
        app(standalone_mode=True)
    except SettingsError as error:
        _fail(2, *error.faults)
    except CommandError as error:
        _fail(error.exit_code, str(error))
    except (BrokerError, MetricsPortTaken) as error:
        _fail(1, str(error))
    sys.exit(0)


def _fail(code: int, *lines: str) -> NoReturn:
    for line in lines:
        typer.echo(f"sheaf: {line}", err=True)
    sys.exit(code)
