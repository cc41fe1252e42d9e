"""The commands that run something until they are told to stop: each part on its own, or all together."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from pathlib import Path
from socket import socket
from typing import Annotated, NoReturn

import typer

from api.binding import is_loopback
from broker.embedded import EmbeddedServer
from cli.devices import chosen_devices
from cli.first_key import FirstKey
from cli.loading import loaded_settings
from cli.parent import end_with_parent
from cli.ports import check_ports
from cli.problems import CommandError
from configs import LoadedSettings

#: The setting `flower.basic_auth`, for this process and its children.
FLOWER_VARIABLE = "SHEAF_FLOWER__BASIC_AUTH"

Devices = Annotated[
    str | None,
    typer.Option(
        "--devices", metavar="auto|cpu|0,1", help="Instead of workers.devices: all GPUs, the CPU, or these GPUs."
    ),
]


def register(app: typer.Typer) -> None:
    app.command()(up)
    app.command()(api)
    app.command()(worker)
    app.command()(io)
    app.command()(flower)
    app.command()(broker)
    app.command(hidden=True)(device)
    app.command(hidden=True)(api_process)


def up(devices: Devices = None) -> None:
    """Run the whole service in the foreground: broker, workers, io worker, API, Flower.

    When all is ready it prints the addresses and a first request. Ctrl-C stops everything in order: running batches are
    finished, jobs that wait stay in the broker. A second Ctrl-C waits for nothing: running jobs go back too. With
    `broker.url: embedded` the broker is a Valkey of our own; its data is kept in broker.data_dir.
    """
    _set_devices(devices)
    loaded = _with_password(loaded_settings())
    from cli import supervision

    supervision.run_everything(loaded.settings, chosen_devices(loaded.settings.workers.devices))


def api(
    workers: Annotated[
        int | None, typer.Option("--workers", metavar="N", min=1, help="Instead of api.workers: processes on one port.")
    ] = None,
) -> None:
    """Run the HTTP front only.

    Submit with POST /v1/jobs, read with GET /v1/jobs/{id}; the pages under /docs list everything. Of several processes
    one that dies is started again.
    """
    if workers is not None:
        os.environ["SHEAF_API__WORKERS"] = str(workers)
    settings = loaded_settings().settings
    from api import server

    check_ports({"api.port": (settings.api.host, settings.api.port)})
    with server.listen(settings) as listener:
        held_back = is_loopback(listener.getsockname()[0]) and not is_loopback(settings.api.host)
        wanted = FirstKey(settings) if held_back else None
        try:
            if settings.api.workers == 1:
                server.run(settings, listener)
            else:
                from cli import supervision

                supervision.run_api(settings, listener)
        except SystemExit:
            if wanted is None or not wanted.came:
                raise
    if wanted is not None and wanted.came:
        os.execv(sys.executable, [sys.executable, "-m", "cli", *sys.argv[1:]])


def api_process(
    listener: Annotated[int, typer.Option(help="The file descriptor of the socket to accept on.")],
    folder: Annotated[Path, typer.Option(help="Where the processes share what they count.")],
    number: Annotated[int, typer.Option(help="Which of them this is.")],
) -> None:
    """Run one of several processes of the HTTP front; `sheaf api` starts these."""
    from api import server
    from telemetry.page import Place

    server.serve(loaded_settings().settings, socket(fileno=listener), Place(folder, number))


def worker(devices: Devices = None) -> None:
    """Run the workers only: one Celery worker process per device.

    Each process sees one GPU alone. One that dies is started again. SIGTERM lets running batches end and gives the
    other jobs back to the queue.
    """
    _set_devices(devices)
    settings = loaded_settings().settings
    from cli import supervision

    supervision.run_workers(settings, chosen_devices(settings.workers.devices))


def io() -> None:
    """Run the io worker only: it calls webhooks, and carries on what Celery clients hung on their calls.

    The latter are `link`, `link_error`, `chain` and `chord`. What is to follow waits in the broker while none runs.
    """
    from workers.io import main

    raise typer.Exit(main(loaded_settings().settings))


def flower() -> NoReturn:
    """Run Flower only: Celery's monitor, with every job as a task.

    On loopback with SHEAF_ENV=dev it asks for no password; anywhere else for SHEAF_FLOWER__BASIC_AUTH=user:password, or
    for one that is made and printed at the start. It only shows, unless flower.read_only is false.
    """
    settings = _with_password(loaded_settings()).settings.flower
    check_ports({"flower.port": (settings.host, settings.port)})
    # With its broker gone it would wait for that for ever, and it has nothing to lose.
    end_with_parent(signal.SIGKILL)
    environment = dict(os.environ)
    if settings.basic_auth is not None:
        # In the environment, since a command line is visible to every user of the machine.
        environment["FLOWER_BASIC_AUTH"] = settings.basic_auth.get_secret_value()
    else:
        environment["FLOWER_UNAUTHENTICATED_API"] = "true"
    command = [sys.executable, "-m", "cli.flower", "-A", "workers.app", "flower"]
    command += [f"--address={settings.host}", f"--port={settings.port}", "--max_tasks=10000", "--logging=error"]
    command.append(f"--read_only={settings.read_only}")
    os.execve(sys.executable, command, environment)


def broker() -> NoReturn:
    """Run the embedded broker only: a Valkey server on loopback whose data is kept in broker.data_dir."""
    settings = loaded_settings().settings.broker
    if not settings.embedded:
        raise CommandError(f"broker.url is {settings.url}: only with `embedded` is there a broker of ours to run")
    check_ports({"broker.embedded_port": ("127.0.0.1", settings.embedded_port)})
    EmbeddedServer(settings.embedded_port, settings.data_dir, fsync=settings.embedded_fsync).exec()


def device(
    name: Annotated[str, typer.Option("--device", help="cpu or cuda:0.")],
    index: Annotated[int, typer.Option(help="Number of this process on the machine.")] = 0,
) -> None:
    """Run the worker process of one device; `sheaf worker` starts these."""
    from workers.device import main

    raise typer.Exit(main(loaded_settings().settings, name, index))


def _set_devices(devices: str | None) -> None:
    if devices is not None:
        os.environ["SHEAF_WORKERS__DEVICES"] = devices


def _with_password(loaded: LoadedSettings) -> LoadedSettings:
    """The settings with a password for Flower where it must have one: a new one, that is printed, if none is set."""
    settings = loaded.settings.flower
    open_here = loaded.environment == "dev" and is_loopback(settings.host)
    if not settings.enabled or settings.basic_auth is not None or open_here:
        return loaded
    os.environ[FLOWER_VARIABLE] = f"sheaf:{secrets.token_urlsafe(18)}"
    made = os.environ[FLOWER_VARIABLE]
    typer.echo(
        f"Flower asks for the user:password {made}, made for this start: set flower.basic_auth for one that stays."
    )
    return loaded_settings()
