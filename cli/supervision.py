"""Runs the parts of the service as processes, by supervisord inside this process.

Order: broker, workers and io worker, API, Flower start together and wait for one another; they are stopped one after
the other the other way round, so that the broker is there until the last batch is settled.
"""

from __future__ import annotations

import fcntl
import logging
import os
import pwd
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Sequence
from configparser import RawConfigParser
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from supervisor import events
from supervisor.medusa.asyncore_25 import ExitNow
from supervisor.options import ServerOptions
from supervisor.supervisord import Supervisor

from broker.embedded import EmbeddedServer
from cli.devices import Device
from cli.parent import SUPERVISOR_VARIABLE
from cli.ports import check_ports
from cli.ready import announce_when_ready
from configs import Settings
from telemetry.logs import configure

log = logging.getLogger(__name__)

#: Seconds beyond its own grace that a process gets to stop before it is killed.
STOP_MARGIN_S = 15
#: How the names of those processes begin that hold jobs.
WORKER_NAMES = ("worker", "io")
#: Start attempts in a row, each a second later than the one before it; more than any outage needs.
START_RETRIES = 10_000
#: supervisord closes the files below this number in its children; a socket that they are to inherit lies above.
FIRST_INHERITED_FILE = 64
#: In a program's arguments: which of its copies it is.
NUMBER = "{number}"


@dataclass(frozen=True, slots=True)
class Program:
    """One supervised process, or several copies. A lower `priority` starts earlier and stops later."""

    name: str
    arguments: tuple[str, ...]
    priority: int
    stop_timeout_s: int = STOP_MARGIN_S
    environment: dict[str, str] = field(default_factory=dict)
    copies: int = 1


def run_everything(settings: Settings, devices: Sequence[Device]) -> None:
    """Run all parts until SIGINT or SIGTERM; says when they are ready. Raises `CommandError` for a taken port."""
    ports = {
        "api.port": (settings.api.host, settings.api.port),
        "io.metrics_port": (settings.workers.metrics_host, settings.io.metrics_port),
        **_metrics_ports(settings, devices),
    }
    programs = _worker_programs(settings, devices)
    programs.append(Program("io", ("io",), 20, _worker_stop_timeout_s(settings)))
    # With several processes it supervises them itself.
    programs.append(Program("api", ("api",), 30, 2 * STOP_MARGIN_S))
    if settings.broker.embedded:
        ports["broker.embedded_port"] = ("127.0.0.1", settings.broker.embedded_port)
        programs.append(Program("broker", ("broker",), 10))
        EmbeddedServer(settings.broker.embedded_port, settings.broker.data_dir).check_data_dir()
    if settings.flower.enabled:
        ports["flower.port"] = (settings.flower.host, settings.flower.port)
        programs.append(Program("flower", ("flower",), 40))
    check_ports(ports)
    watcher = threading.Thread(target=announce_when_ready, args=(settings, len(devices)), daemon=True)
    _supervise(settings, programs, watcher)


def run_workers(settings: Settings, devices: Sequence[Device]) -> None:
    """Run one worker process per device until SIGINT or SIGTERM."""
    check_ports(_metrics_ports(settings, devices))
    _supervise(settings, _worker_programs(settings, devices), None)


def run_api(settings: Settings, listener: socket.socket) -> None:
    """Run `api.workers` processes that all accept on this socket until SIGINT or SIGTERM.

    One that dies takes nobody else's connection along, not even those that wait to be accepted.
    """
    inherited = fcntl.fcntl(listener, fcntl.F_DUPFD, FIRST_INHERITED_FILE)
    # What was decided when the socket was opened holds for them, too.
    environment = {"SHEAF_API__HOST": listener.getsockname()[0]}
    try:
        with tempfile.TemporaryDirectory(prefix="sheaf-api-") as folder:
            arguments = ("api-process", "--listener", str(inherited), "--folder", folder, "--number", NUMBER)
            program = Program("api", arguments, 30, environment=environment, copies=settings.api.workers)
            _supervise(settings, [program], None)
    finally:
        os.close(inherited)


def _worker_programs(settings: Settings, devices: Sequence[Device]) -> list[Program]:
    return [
        Program(
            name=f"worker-{index}",
            arguments=("device", "--device", device.name, "--index", str(index)),
            priority=20,
            stop_timeout_s=_worker_stop_timeout_s(settings),
            environment={"CUDA_VISIBLE_DEVICES": device.visible},
        )
        for index, device in enumerate(devices)
    ]


def _worker_stop_timeout_s(settings: Settings) -> int:
    return int(settings.workers.shutdown_grace_s) + STOP_MARGIN_S


def _metrics_ports(settings: Settings, devices: Sequence[Device]) -> dict[str, tuple[str, int]]:
    workers = settings.workers
    return {
        "workers.metrics_port" + (f" + {index}" if index else ""): (workers.metrics_host, workers.metrics_port + index)
        for index in range(len(devices))
    }


def _supervise(settings: Settings, programs: Sequence[Program], watcher: threading.Thread | None) -> None:
    configure(settings.logging.level, settings.logging.format, service="supervisor")
    _append_to_output()
    os.environ[SUPERVISOR_VARIABLE] = str(os.getpid())
    with tempfile.TemporaryDirectory(prefix="sheaf-") as folder:
        path = Path(folder, "supervisord.conf")
        with path.open("w") as file:
            _configuration(programs, folder).write(file)
        options = ServerOptions()
        options.realize(["--configuration", str(path)])
        options.first, options.test = True, False
        if watcher is not None:
            watcher.start()
        # supervisord ends its loop with this exception when all processes have ended.
        with suppress(ExitNow):
            _Supervisor(options).main()
    # What this process may turn into is nobody's child of its own.
    del os.environ[SUPERVISOR_VARIABLE]


def _append_to_output() -> None:
    """supervisord opens our output anew for its children; a file would otherwise be written over at two places."""
    flags = fcntl.fcntl(sys.stdout.fileno(), fcntl.F_GETFL)
    fcntl.fcntl(sys.stdout.fileno(), fcntl.F_SETFL, flags | os.O_APPEND)


class _Supervisor(Supervisor):  # type: ignore[misc]  # supervisor carries no types
    hurried = False

    def runforever(self) -> None:
        events.subscribe(events.ProcessStateExitedEvent, self._log_exit)
        events.subscribe(events.ProcessStateBackoffEvent, self._log_exit)
        events.subscribe(events.SupervisorStoppingEvent, lambda _: log.info("Stopping."))
        super().runforever()

    def handle_signal(self) -> None:
        """A second signal to stop, or SIGQUIT: workers give everything back at once."""
        number = self.options.get_signal()
        if number is None:
            return
        again = number in (signal.SIGTERM, signal.SIGINT) and self.stopping
        if (again or number == signal.SIGQUIT) and not self.hurried:
            self.hurried = True
            log.warning("Stopping at once.")
            for group in self.process_groups.values():
                for process in group.processes.values():
                    if process.config.name.startswith(WORKER_NAMES):
                        process.signal(signal.SIGQUIT)
        self.options.signal_receiver.receive(number, None)
        super().handle_signal()

    def _log_exit(self, event: events.ProcessStateEvent) -> None:
        if not self.stopping:
            program = event.process.config.name
            log.error("A process ended by itself; it is started again.", extra={"program": program})


def _configuration(programs: Sequence[Program], folder: str) -> RawConfigParser:
    config = RawConfigParser()
    config["supervisord"] = {
        "nodaemon": "true",
        "silent": "true",
        "logfile": os.devnull,
        "logfile_maxbytes": "0",
        "minfds": str(FIRST_INHERITED_FILE),
        "pidfile": str(Path(folder, "supervisord.pid")),
        "childlogdir": folder,
        "directory": _escaped(os.getcwd()),
    }
    if os.geteuid() == 0:
        # Says that running as root is meant.
        config["supervisord"]["user"] = pwd.getpwuid(0).pw_name
    for program in programs:
        command = [sys.executable, "-m", "cli", *program.arguments]
        config[f"program:{program.name}"] = {
            "command": _escaped(" ".join(_quoted(part) for part in command)).replace(NUMBER, "%(process_num)d"),
            "process_name": program.name if program.copies == 1 else f"{program.name}-%(process_num)d",
            "numprocs": str(program.copies),
            "priority": str(program.priority),
            "environment": ",".join(f'{name}="{_escaped(value)}"' for name, value in program.environment.items()),
            "autorestart": "true",
            "startsecs": "1",
            "startretries": str(START_RETRIES),
            "stopsignal": "TERM",
            "stopwaitsecs": str(program.stop_timeout_s),
            "killasgroup": "true",
            "redirect_stderr": "true",
            "stdout_logfile": "/dev/fd/1",
            "stdout_logfile_maxbytes": "0",
        }
    return config


def _escaped(text: str) -> str:
    """supervisord expands percent signs."""
    return text.replace("%", "%%")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
