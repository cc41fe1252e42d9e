"""A real worker process on a real server, with the models that these tests need."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
from celery import Celery

from tests.conftest import free_port, wait_until
from tests.services import Service, metric

MODELS: dict[str, object] = {
    "minilm": None,
    "echo": {"handler": "inference.handlers.echo:Echo", "max_batch_size": 16, "max_wait_ms": 20},
    "slow": {"handler": "tests.workers.handlers:Sleeper", "max_batch_size": 4, "max_wait_ms": 0},
    "wild": {"handler": "tests.workers.handlers:Wild", "max_batch_size": 8, "max_wait_ms": 50},
    "picky": {"handler": "tests.workers.handlers:Picky", "max_batch_size": 8, "max_wait_ms": 50},
}


@dataclass(frozen=True)
class RunningWorker:
    """A worker that has announced its models as ready."""

    url: str
    metrics_port: int
    service: Service

    def metric(self, name: str, **labels: str) -> float:
        return metric(self.metrics_port, name, **labels)


StartWorker = Callable[..., RunningWorker]


@pytest.fixture
def start_worker(tmp_path: Path) -> Iterator[StartWorker]:
    """Starts workers on a URL; all are stopped at the end of the test."""
    started: list[Service] = []

    def start(
        url: str,
        *,
        lease_s: float = 30.0,
        read_timeout_s: float = 10.0,
        models: dict[str, object] | None = None,
        ready: bool = True,
    ) -> RunningWorker:
        port = free_port()
        config: dict[str, object] = {
            "broker": {"url": url, "lease_s": lease_s, "read_timeout_s": read_timeout_s},
            "workers": {"metrics_port": port, "shutdown_grace_s": 20},
            "models": MODELS if models is None else {"minilm": None, "echo": None} | models,
        }
        index = len(started)
        service = Service("device", "--device", "cpu", config=config, folder=tmp_path / f"worker-{index}")
        service.start()
        started.append(service)
        running = RunningWorker(url, port, service)
        if ready:
            wait_until(
                lambda: _all_ready(running), description=f"the worker is ready: {service.log_path}", timeout_s=60
            )
        return running

    yield start
    for service in started:
        service.kill()


@pytest.fixture
def worker(start_worker: StartWorker, valkey_url: str) -> RunningWorker:
    return start_worker(valkey_url)


@pytest.fixture
def celery_client(valkey_url: str) -> Iterator[Celery]:
    """A Celery client as any shop has it: it knows nothing of Sheaf."""
    with celery_app(valkey_url) as app:
        yield app


@contextmanager
def celery_app(url: str) -> Iterator[Celery]:
    """A client whose sockets are all closed in the end."""
    with Celery(broker=url, backend=url, set_as_current=False) as app:
        yield app
        app.backend.result_consumer.stop()  # type: ignore[attr-defined]  # the stubs know the base class only
        app.backend.client.connection_pool.disconnect()  # type: ignore[attr-defined]
    gc.collect()


def wait_until_controllable(client: Celery) -> None:
    """Control commands reach only workers that listen already, and jobs are served before that."""
    wait_until(client.control.inspect(timeout=0.5).ping, description="the worker takes control commands")


def _all_ready(running: RunningWorker) -> bool:
    assert running.service.process.poll() is None, running.service.log()
    with redis.Redis.from_url(running.url) as client:
        announced = [client.get(key) for key in client.keys("sheaf:worker:*")]
    texts = [text.decode() for text in announced if text is not None]
    return any(
        f'"pid":{running.service.pid},' in text and '"loading"' not in text and '"state"' in text for text in texts
    )
