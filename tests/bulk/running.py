"""A broker and a worker, without an API, and commands that use them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis
import yaml

from broker.embedded import EmbeddedServer
from tests.conftest import free_port, listens, wait_until
from tests.services import SHEAF, Service, run_sheaf


@dataclass
class Bulk:
    """What these tests need of a service: no API, one worker."""

    broker: EmbeddedServer
    worker: Service
    config: Path

    def bulk(self, *arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        return run_sheaf("--config", str(self.config), "bulk", *arguments, folder=folder, **environment)

    def begin(self, *arguments: str, folder: Path) -> subprocess.Popen[bytes]:
        """As `bulk`, without waiting for the end."""
        command = [SHEAF, "--config", str(self.config), "bulk", *arguments]
        with (folder / "bulk.log").open("ab") as log:
            return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)

    def replace_worker(self) -> None:
        """kill -9, and another one."""
        self.worker.kill()
        port = yaml.safe_load(self.config.read_text())["workers"]["metrics_port"]
        # Its children end with it, a moment later.
        wait_until(lambda: not listens(port), description="the port of its metrics is free")
        self.worker.start()

    def kept(self) -> list[bytes]:
        """Keys of jobs and results."""
        with redis.Redis.from_url(self.broker.url) as client:
            return [*client.keys("celery-task-meta-*"), *client.keys("sheaf:job:*"), *client.keys("sheaf:started:*")]


@contextmanager
def running(folder: Path, models: Mapping[str, object], **broker_settings: object) -> Iterator[Bulk]:
    with EmbeddedServer(free_port(), folder / "valkey") as broker:
        config: dict[str, object] = {
            "broker": {"url": broker.url, "lease_s": 3, **broker_settings},
            "workers": {"metrics_port": free_port()},
            "models": dict(models),
        }
        file = folder / "bulk.yaml"
        file.write_text(yaml.safe_dump(config))
        with Service("worker", "--devices", "cpu", config=config, folder=folder / "worker") as worker:
            yield Bulk(broker, worker, file)
