"""Real processes of the service for tests: `sheaf …` children with settings of their own, and what they wrote."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import yaml
from prometheus_client.parser import text_string_to_metric_families

REPOSITORY = Path(__file__).parent.parent
#: The command that the project installs.
SHEAF = str(Path(sys.executable).with_name("sheaf"))


class Service:
    """One `sheaf` process in its own process group; its output goes to a file."""

    def __init__(
        self,
        *arguments: str,
        config: Mapping[str, object],
        folder: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._config = folder / "sheaf.yaml"
        self._config.write_text(yaml.safe_dump(dict(config)))
        self.log_path = folder / "output.log"
        self._command = [SHEAF, "--config", str(self._config), *arguments]
        self._folder = folder
        self._own_environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env=_environment() | self._own_environment,
                start_new_session=True,
            )

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the service has not been started"
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float) -> int:
        return self.process.wait(timeout_s)

    def stop(self, timeout_s: float = 60.0) -> int:
        """SIGTERM and wait; whatever is left of the group afterwards is killed."""
        if self.process.poll() is None:
            self.send(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        finally:
            self.kill()

    def kill(self) -> None:
        """kill -9 of the whole process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait(10)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")


def _environment() -> dict[str, str]:
    """Ours without any settings, and with this repository's own handlers in reach."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SHEAF_")}
    return inherited | {"PYTHONPATH": str(REPOSITORY)}


def run_sheaf(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a `sheaf` command to its end, as on a wide terminal without colours."""
    return subprocess.run(
        [SHEAF, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=folder,
        env=_environment() | {"COLUMNS": "200", "NO_COLOR": "1"} | environment,
    )


def metric(port: int, name: str, **labels: str) -> float:
    """The value of one sample of a process' metrics page; 0 when it is not there (yet)."""
    return sample(metrics_page(port), name, **labels)


def metrics_page(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        text: str = answer.read().decode()
    return text


def sample(page: str, name: str, **labels: str) -> float:
    """The sum of the samples with this name and these labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def answers(url: str) -> bool:
    """True when the URL answers with a 2xx."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(200 <= answer.status < 300)
    except OSError:
        return False
