"""Servers, workers and clients of a benchmark, as real processes that end with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from broker.embedded import EmbeddedServer

#: Seconds that anything may take to come up.
START_TIMEOUT_S = 60.0
PEERS = Path(__file__).parent / "peers"
REPOSITORY = Path(__file__).parent.parent


class BenchmarkError(Exception):
    """A benchmark cannot be run; the text says what is missing."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def server() -> Iterator[EmbeddedServer]:
    """An empty embedded Valkey with its append-only file on, as in production."""
    with TemporaryDirectory(prefix="sheaf-bench-") as folder, EmbeddedServer(free_port(), Path(folder)) as valkey:
        yield valkey


@contextmanager
def process(command: Sequence[str], *, environment: Mapping[str, str], folder: Path = PEERS) -> Iterator[Path]:
    """Run `command` for the time of the context, and all that it starts; yields the file that its output goes to."""
    with TemporaryDirectory(prefix="sheaf-bench-") as logs:
        log = Path(logs, "output.log")
        with log.open("wb") as output:
            running = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                cwd=folder,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        try:
            yield log
            if running.poll() is not None:
                raise BenchmarkError(f"{command[0]} ended early: {log.read_text(errors='replace')[-2000:]}")
        finally:
            running.terminate()
            with suppress(subprocess.TimeoutExpired):
                running.wait(20)
            # Servers that fork may leave workers behind, which would slow whatever is measured next.
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()


@contextmanager
def sheaf(part: Sequence[str], config: Mapping[str, object]) -> Iterator[Path]:
    """One of our own processes with these settings."""
    with TemporaryDirectory(prefix="sheaf-bench-") as folder:
        file = Path(folder, "sheaf.yaml")
        file.write_text(yaml.safe_dump(dict(config)))
        command = [sys.executable, "-m", "cli", "--config", str(file), *part]
        with process(command, environment={}, folder=REPOSITORY) as log:
            yield log


def wait_for_page(url: str, log: Path) -> None:
    """Until `url` answers with 200."""
    wait_for_answer(urllib.request.Request(url), log)


def wait_for_answer(request: urllib.request.Request, log: Path) -> bytes:
    """Send this until it is answered with 200; returns what it was answered."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                if answer.status == 200:
                    body: bytes = answer.read()
                    return body
        except OSError:
            pass
        if time.monotonic() > deadline:
            raise BenchmarkError(f"{request.full_url} did not come up: {log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.05)


def peer_python() -> str:
    """The interpreter of the virtual environment that `make bench` makes for the peers."""
    python = Path(sys.prefix) / "peers" / "bin" / "python"
    if not python.exists():
        raise BenchmarkError("the peers are not installed: run `make bench`, or .venv/.peers of the Makefile")
    return str(python)


def peer_environment() -> dict[str, str]:
    """What lets a peer import torch and the like from our own environment, after what it has itself."""
    return {"PEERS_BORROW": sysconfig.get_path("purelib")}
