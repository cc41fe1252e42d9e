"""A real API process and a real worker process on one server; they live as long as the module's tests."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from broker.embedded import EmbeddedServer
from tests.conftest import free_port, wait_until
from tests.services import Service, answers

MAX_PAYLOAD_BYTES = 4096

MODELS: dict[str, object] = {
    "minilm": None,
    "echo": {"handler": "inference.handlers.echo:Echo", "max_batch_size": 16, "max_wait_ms": 0},
    "slow": {"handler": "tests.workers.handlers:Sleeper", "max_batch_size": 1, "max_wait_ms": 0},
    "picky": {"handler": "tests.workers.handlers:Picky", "max_batch_size": 8, "max_wait_ms": 0},
    "broken": {"handler": "no.such.module:Class"},
}


@dataclass(frozen=True)
class RunningApi:
    base: str
    service: Service
    #: None where a test wants no worker.
    worker: Service | None
    broker: EmbeddedServer
    config: dict[str, object]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApi]:
    folder = tmp_path_factory.mktemp("api")
    port = free_port()
    with EmbeddedServer(free_port(), folder / "valkey") as broker:
        config: dict[str, object] = {
            "broker": {"url": broker.url, "max_queue_depth": 50},
            "api": {"port": port, "max_payload_bytes": MAX_PAYLOAD_BYTES, "max_wait_s": 5},
            "workers": {"metrics_port": free_port()},
            "models": MODELS,
        }
        with (
            Service("api", config=config, folder=folder / "api") as service,
            Service("device", "--device", "cpu", config=config, folder=folder / "worker") as worker,
        ):
            base = f"http://127.0.0.1:{port}"
            wait_until(lambda: answers(f"{base}/readyz"), description=f"ready: {service.log_path}", timeout_s=60)
            yield RunningApi(base, service, worker, broker, config)


@pytest.fixture
def client(api: RunningApi) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=api.base, timeout=20) as client:
        yield client


def get_json(url: str) -> dict[str, object]:
    with urllib.request.urlopen(url, timeout=5) as answer:
        content: dict[str, object] = json.load(answer)
        return content
