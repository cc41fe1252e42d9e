"""Callers share the queue, over HTTP and without a worker: what a worker would lease first is what counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from broker import Broker
from broker.embedded import EmbeddedServer
from broker.message import decode
from tests.conftest import free_port, wait_until
from tests.services import Service, answers

FLOOD, TRICKLE = 100, 3


@pytest.fixture
def callers(new_valkey: EmbeddedServer, tmp_path: Path) -> Iterator[httpx.Client]:
    port = free_port()
    config: dict[str, object] = {
        "broker": {"url": new_valkey.url},
        "api": {"port": port},
        "models": {"echo": {"handler": "inference.handlers.echo:Echo"}},
    }
    base = f"http://127.0.0.1:{port}"
    with Service("api", config=config, folder=tmp_path / "api") as service:
        wait_until(lambda: answers(f"{base}/livez"), description=f"alive: {service.log_path}", timeout_s=60)
        with httpx.Client(base_url=base, timeout=20) as client:
            yield client


def submit(client: httpx.Client, authorization: str, count: int) -> set[str]:
    headers = {"Authorization": authorization} if authorization else {}
    jobs = [client.post("/v1/jobs", json={"model": "echo", "input": 1}, headers=headers) for _ in range(count)]
    assert {answer.status_code for answer in jobs} == {202}
    return {answer.json()["id"] for answer in jobs}


def test_a_callers_trickle_overtakes_anothers_flood(callers: httpx.Client, new_valkey: EmbeddedServer) -> None:
    submit(callers, "Bearer flood", FLOOD)
    named = submit(callers, "bearer trickle", TRICKLE)
    nameless = submit(callers, "", TRICKLE)
    depths = [line for line in callers.get("/metrics").text.splitlines() if line.startswith("sheaf_queue_depth{")]
    broker = Broker(new_valkey.url, "worker")
    first = [decode(lease.message) for lease in broker.lease("infer.echo", [0, 2 * TRICKLE, 0, 0]).leases]
    broker.close()
    assert sum(float(line.split()[-1]) for line in depths) == FLOOD + 2 * TRICKLE
    assert named <= {message.id for message in first}
    # Those without a token share as one, with what is ahead of them in Celery's list.
    assert not nameless & {message.id for message in first}
    [owner] = {message.owner for message in first if message.id in named}
    assert len(owner) == 16
    assert "trickle" not in owner
