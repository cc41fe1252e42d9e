"""A real worker process on a real server, with the models that these tests need."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from celery.events import EventReceiver
from celery.result import AsyncResult

from broker.deliveries import Deliveries
from broker.embedded import EmbeddedServer
from tests.conftest import free_port, wait_until
from tests.receiver import Receiver
from tests.services import Service, metric
from tests.workers.post import Post
from webhooks import new_secret

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
    with starting_workers(tmp_path) as start:
        yield start


@contextmanager
def starting_workers(folder: Path) -> Iterator[StartWorker]:
    """Starts workers that keep their files in `folder`; all are killed in the end."""
    started: list[Service] = []

    def start(
        url: str,
        *,
        lease_s: float = 30.0,
        models: dict[str, object] | None = None,
        ready: bool = True,
        broker: Mapping[str, object] | None = None,
    ) -> RunningWorker:
        port = free_port()
        config: dict[str, object] = {
            "broker": {"url": url, "lease_s": lease_s} | dict(broker or {}),
            "workers": {"metrics_port": port, "shutdown_grace_s": 20},
            "models": MODELS if models is None else {"minilm": None, "echo": None} | models,
        }
        index = len(started)
        service = Service("device", "--device", "cpu", config=config, folder=folder / f"worker-{index}")
        service.start()
        started.append(service)
        running = RunningWorker(url, port, service)
        if ready:
            wait_until(
                lambda: announced(url, service), description=f"the worker is ready: {service.log_path}", timeout_s=60
            )
        return running

    try:
        yield start
    finally:
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


@dataclass(frozen=True)
class Shop:
    """A server, a worker and a plain client that tests share."""

    url: str
    worker: RunningWorker
    app: Celery
    client: redis.Redis

    def call(self, row: object, *, model: str = "echo", **options: Any) -> AsyncResult[Any]:
        """Send one row, as a client that knows nothing of Sheaf does."""
        return self.app.send_task("sheaf.infer", args=[row], queue=f"infer.{model}", **options)

    def stored(self, job_id: str) -> dict[str, Any]:
        """The stored result with all its fields; empty while there is none."""
        found: dict[str, Any] = json.loads(self.client.get(f"celery-task-meta-{job_id}") or b"{}")
        return found


@pytest.fixture(scope="package")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """Its worker serves the small models; what a test sends is no other test's business."""
    folder = tmp_path_factory.mktemp("shop")
    models = {name: MODELS[name] for name in ("slow", "wild", "picky")}
    with (
        EmbeddedServer(free_port(), folder / "valkey") as server,
        starting_workers(folder) as start,
        celery_app(server.url) as app,
        redis.Redis.from_url(server.url) as client,
    ):
        worker = start(server.url, models={"minilm": None, "echo": MODELS["echo"]} | models)
        wait_until_controllable(app)
        yield Shop(server.url, worker, app, client)


@contextmanager
def celery_app(url: str, **settings: object) -> Iterator[Celery]:
    """A client whose sockets are all closed in the end."""
    with Celery(broker=url, backend=url, set_as_current=False) as app:
        app.conf.update(settings)
        try:
            yield app
        finally:
            app.backend.result_consumer.stop()  # type: ignore[attr-defined]  # the stubs know the base class only
            app.backend.client.connection_pool.disconnect()  # type: ignore[attr-defined]
    gc.collect()


@contextmanager
def collected_events(app: Celery) -> Iterator[list[dict[str, object]]]:
    """Every event on the broker from now on."""
    events: list[dict[str, object]] = []
    with app.connection_for_read() as connection:
        receiver = EventReceiver(connection, handlers={"*": events.append}, app=app)
        thread = threading.Thread(target=receiver.capture, kwargs={"wakeup": False})
        thread.start()
        try:
            yield events
        finally:
            receiver.should_stop = True
            thread.join()


@pytest.fixture
def events(celery_client: Celery) -> Iterator[list[dict[str, object]]]:
    """Every event on the broker during a test."""
    with collected_events(celery_client) as collected:
        yield collected


def of_task(events: list[dict[str, object]], task_id: str) -> list[str]:
    """Types of the events of a task, in order."""
    return [str(event["type"]) for event in list(events) if event.get("uuid") == task_id]


def held(url: str, queue: str) -> int:
    """How many messages of a queue workers hold."""
    with redis.Redis.from_url(url) as client:
        return sum(client.hlen(key) for key in client.keys(f"sheaf:held:{queue}:*"))


def wait_until_controllable(client: Celery) -> None:
    """Control commands reach only workers that listen already, and jobs are served before that."""
    wait_until(client.control.inspect(timeout=0.5).ping, description="the worker takes control commands")


def announced(url: str, service: Service) -> bool:
    """True when this process has announced itself, and loads nothing any more."""
    assert service.process.poll() is None, service.log()
    with redis.Redis.from_url(url) as client:
        found = [client.get(key) for key in client.keys("*sheaf:worker:*")]
    texts = [text.decode() for text in found if text is not None]
    return any(f'"pid":{service.pid},' in text and '"loading"' not in text and '"state"' in text for text in texts)


@pytest.fixture
def post(valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Post]:
    # A stop waits for the waiter.
    monkeypatch.setattr("workers.courier.courier.WAIT_S", 0.05)
    with Receiver() as receiver, Deliveries(valkey_url, new_secret=new_secret) as log:
        made = Post(valkey_url, receiver, log)
        yield made
        made.client.close()
