"""The service under chaos: a Valkey, the proxy before it, `sheaf api` and two workers, each a process of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import redis

from broker.embedded import EmbeddedServer
from tests.conftest import free_port
from tests.proxy import Proxy
from tests.services import Service, answers, metric

#: Short, so that what a killed worker held comes back while the run still lasts.
LEASE_S = 2.0
#: Shorter than the longest freeze, so that clients give up on answers that come later.
READ_TIMEOUT_S = 3.0
#: What a frozen network held back arrives within so many seconds after it flows again.
LATE_S = 2.0
WORKERS = 2
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 30.0

MODELS: dict[str, object] = {
    "minilm": None,
    "echo": {"handler": "inference.handlers.echo:Echo", "max_batch_size": 16, "max_wait_ms": 20},
    "quick": {"handler": "tests.chaos.handlers:Marked", "max_batch_size": 8, "max_wait_ms": 0},
    "slow": {"handler": "tests.chaos.handlers:Marked", "max_batch_size": 4, "max_wait_ms": 0},
}
#: Names of the models that are served.
SERVED = tuple(name for name, model in MODELS.items() if model is not None)


class ChaosError(Exception):
    """The run could not be carried out: says what did not start or end."""


class Worker:
    """One worker process, started again after each kill. Who does something to it holds `lock`."""

    def __init__(self, name: str, service: Service, metrics_port: int) -> None:
        self.name = name
        self.service = service
        self.lock = threading.Lock()
        self._metrics_port = metrics_port

    def serving(self) -> bool:
        """Whether it runs and has loaded all models; asked of the process alone, so it holds without a broker too."""
        try:
            return metric(self._metrics_port, "sheaf_model_ready") == len(SERVED)
        except OSError:
            return False


class Cluster:
    """Starts everything on entering, ends everything on leaving; all files are under `folder`."""

    def __init__(self, folder: Path, seed: int) -> None:
        if folder.is_dir() and any(folder.iterdir()):
            raise ChaosError(f"{folder} is not empty: the results of another run would be taken for this one's")
        self.folder = folder
        self.broker = EmbeddedServer(free_port(), folder / "broker")
        self.proxy = Proxy(self.broker.port, late_s=LATE_S, seed=seed)
        self.workers: list[Worker] = []
        self.api_port = free_port()
        self.api: Service | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.broker)
            stack.enter_context(self.proxy)
            self.api = self._service("api", "api", api={"port": self.api_port})
            stack.callback(self.api.kill)
            self.api.start()
            for number in range(WORKERS):
                worker = self._worker(f"worker-{number}")
                self.workers.append(worker)
                worker.service.start()
                stack.callback(worker.service.kill)
            ready = wait_for(lambda: answers(f"{self.api_url}/readyz") and all(map(Worker.serving, self.workers)))
            if not ready:
                raise ChaosError(f"the service did not get ready in {START_TIMEOUT_S:.0f} s: see {self.folder}")
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def api_url(self) -> str:
        return f"http://127.0.0.1:{self.api_port}"

    @property
    def logs(self) -> dict[str, Path]:
        """Where each process of ours writes."""
        services = {worker.name: worker.service for worker in self.workers}
        if self.api is not None:
            services["api"] = self.api
        return {name: service.log_path for name, service in services.items()}

    def direct(self) -> redis.Redis:
        """A client that goes past the proxy."""
        return redis.Redis.from_url(self.broker.url, socket_timeout=10)

    def revive(self) -> list[tuple[str, int]]:
        """Start workers again that have ended though nobody killed them; the name and exit status of each."""
        found: list[tuple[str, int]] = []
        for worker in self.workers:
            if not worker.lock.acquire(blocking=False):
                continue
            try:
                status = worker.service.process.poll()
                if status is not None:
                    found.append((worker.name, status))
                    worker.service.start()
            finally:
                worker.lock.release()
        return found

    def stop_workers(self) -> list[str]:
        """Stop the workers in order; a line for each that did not end as it should."""
        # One that was started a moment ago does not know yet what a signal means.
        wait_for(lambda: all(map(Worker.serving, self.workers)))
        statuses = {worker.name: worker.service.stop(STOP_TIMEOUT_S) for worker in self.workers}
        return [f"{name} was told to stop and ended with status {code}" for name, code in statuses.items() if code]

    def _worker(self, name: str) -> Worker:
        metrics_port = free_port()
        service = self._service(name, "device", "--device", "cpu", workers={"metrics_port": metrics_port})
        return Worker(name, service, metrics_port)

    def _service(self, name: str, *arguments: str, **sections: object) -> Service:
        broker = {
            "url": self.proxy.url,
            "lease_s": LEASE_S,
            "read_timeout_s": READ_TIMEOUT_S,
        }
        config = {"broker": broker, "models": MODELS, **sections}
        return Service(*arguments, config=config, folder=self.folder / name)


def wait_for(predicate: Callable[[], bool], *, timeout_s: float = START_TIMEOUT_S) -> bool:
    """Poll until `predicate` holds; False when it does not within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True
