"""A whole service for batches: API, a worker and an io worker in processes of their own, and OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import openai
from openai.types import Batch

from broker.embedded import EmbeddedServer
from tests.conftest import free_port, wait_until
from tests.services import Service, answers, run_sheaf

MODELS: dict[str, object] = {
    "minilm": {"max_batch_size": 16, "matryoshka_dimensions": [64]},
    "echo": {"max_batch_size": 16},
    "slow": {"handler": "tests.workers.handlers:Sleeper", "max_batch_size": 1, "max_wait_ms": 0},
    "picky": {"handler": "tests.workers.handlers:Picky", "max_batch_size": 8, "max_wait_ms": 0},
}
ENDED = ("completed", "failed", "expired", "cancelled")


@dataclass
class Batches:
    base: str
    broker: EmbeddedServer
    api: Service
    worker: Service
    io: Service
    folder: Path
    config: Path

    @contextmanager
    def client(self, owner: str = "somebody", *options: str) -> Iterator[openai.OpenAI]:
        """OpenAI's, with a new key of this owner."""
        made = run_sheaf("--config", str(self.config), "keys", "create", owner, *options, "--json", folder=self.folder)
        assert made.returncode == 0, made.stderr
        key = json.loads(made.stdout)["key"]
        with openai.OpenAI(api_key=key, base_url=f"{self.base}/v1", max_retries=0) as client:
            yield client

    def replace(self, service: Service) -> None:
        """kill -9, and another one."""
        service.kill()
        service.start()


@contextmanager
def running(folder: Path, models: Mapping[str, object] = MODELS, **sections: object) -> Iterator[Batches]:
    """`sections` are further settings."""
    port = free_port()
    with EmbeddedServer(free_port(), folder / "valkey") as broker:
        config: dict[str, Any] = {
            "broker": {"url": broker.url, "lease_s": 2},
            "api": {"port": port},
            "workers": {"metrics_port": free_port()},
            "io": {"metrics_port": free_port()},
            "files": {"storage": str(folder / "files")},
            "models": dict(models),
            **sections,
        }
        with (
            Service("api", config=config, folder=folder / "api") as api,
            Service("device", "--device", "cpu", config=config, folder=folder / "worker") as worker,
            Service("io", config=config, folder=folder / "io") as io,
        ):
            base = f"http://127.0.0.1:{port}"
            wait_until(lambda: answers(f"{base}/livez"), description=f"alive: {api.log_path}", timeout_s=60)
            wait_until(lambda: _ready(base), description=f"ready: {worker.log_path}", timeout_s=60)
            yield Batches(base, broker, api, worker, io, folder, folder / "api" / "sheaf.yaml")


def _ready(base: str) -> bool:
    return httpx.get(f"{base}/readyz").status_code == 200


def line(custom_id: str, body: Mapping[str, object], url: str = "/v1/embeddings", **changes: object) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body} | changes).encode()


def embedding(custom_id: str, text: object = "a text", **more: object) -> bytes:
    return line(custom_id, {"model": "minilm", "input": text, **more})


def job(custom_id: str, model: str, row: object) -> bytes:
    return line(custom_id, {"model": model, "input": row}, "/v1/jobs")


def begin(client: openai.OpenAI, lines: Sequence[bytes], endpoint: str = "/v1/embeddings", **options: Any) -> Batch:
    """Upload these lines and have them run."""
    return begin_with(client, b"".join(one + b"\n" for one in lines), endpoint, **options)


def begin_with(client: openai.OpenAI, content: bytes, endpoint: str = "/v1/embeddings", **options: Any) -> Batch:
    """As `begin`, of a file's bytes."""
    file = client.files.create(file=("requests.jsonl", BytesIO(content)), purpose="batch")
    window = options.pop("completion_window", "24h")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window=window, **options)


def end_of(client: openai.OpenAI, batch: Batch, timeout_s: float = 60.0) -> Batch:
    wait_until(
        lambda: client.batches.retrieve(batch.id).status in ENDED, description="the batch ends", timeout_s=timeout_s
    )
    return client.batches.retrieve(batch.id)


def rows_of(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """What stands in an output or error file."""
    assert file_id is not None
    return [json.loads(one) for one in client.files.content(file_id).text.splitlines()]


def answer_of(row: dict[str, Any]) -> Any:
    """The body of an answer that succeeded."""
    assert row["error"] is None
    assert row["response"]["status_code"] == 200
    return row["response"]["body"]
