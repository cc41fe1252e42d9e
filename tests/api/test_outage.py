"""What callers get while the broker is away, or fails."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
import redis

from tests.api.front import Front, front
from tests.conftest import wait_until

JOB = {"model": "echo", "input": 1}
#: How a key looks that the API has to look up.
TOKEN = f"sheaf_{'0' * 12}_{'0' * 43}"


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """An API whose broker has gone."""
    with front(tmp_path_factory.mktemp("left"), api={"metrics": "keys"}) as made:
        with made.client() as client:
            assert client.get("/v1/jobs").status_code == 200
        made.broker.kill()
        yield made


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/readyz"),
        ("POST", "/v1/jobs"),
        ("GET", "/v1/jobs"),
        ("GET", "/v1/jobs/none"),
        ("GET", "/v1/jobs/none/events"),
        ("GET", "/v1/models"),
        ("POST", "/v1/embeddings"),
        ("GET", "/v1/files"),
        ("POST", "/v1/files"),
        ("GET", "/v1/batches"),
        ("GET", "/v2/models/echo/ready"),
    ],
)
def test_where_the_broker_is_and_what_it_lacks_is_told_to_the_log_alone(left: Front, method: str, path: str) -> None:
    sent: dict[str, object] = {"json": JOB if path == "/v1/jobs" else {"model": "minilm", "input": "a"}}
    if path == "/v1/files":
        sent = {"files": {"file": ("rows.jsonl", b"{}\n")}, "data": {"purpose": "batch"}}
    with left.client() as client:
        answer = client.request(method, path, **(sent if method == "POST" else {}))  # type: ignore[arg-type]  # of httpx
    told_to_the_log_alone(left, answer)


def test_nor_is_it_told_to_those_whose_key_cannot_be_looked_up(left: Front) -> None:
    with left.client(TOKEN) as client:
        for path in ("/metrics", "/v1/jobs", "/v1/jobs?limit=none"):
            told_to_the_log_alone(left, client.get(path))


def told_to_the_log_alone(made: Front, answer: httpx.Response) -> None:
    port = made.broker.url.rpartition(":")[2].partition("/")[0]
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:sheaf:error:broker-unavailable")
    assert answer.headers["retry-after"]
    assert not re.search(rf"127\.0\.0\.1|{port}|[Ee]rror \d|refused|connect", answer.text)
    wait_until(lambda: port in causes(made, answer), description="the log has the cause, under the request's id")


def causes(made: Front, answer: httpx.Response) -> str:
    """What the log says of why this answer was given."""
    lines = [json.loads(line) for line in made.service.log().splitlines() if line.startswith("{")]
    return " ".join(
        line["cause"] for line in lines if line.get("request_id") == answer.headers["x-request-id"] and "cause" in line
    )


def test_what_a_broker_that_takes_no_writes_says_is_not_told_either(tmp_path: Path) -> None:
    with front(tmp_path) as made, made.client() as client, redis.Redis.from_url(made.broker.url) as plain:
        plain.config_set("maxmemory", 1)
        for answer in (client.get("/readyz"), client.post("/v1/jobs", json=JOB)):
            assert (answer.status_code, answer.json()["type"]) == (503, "urn:sheaf:error:broker-unavailable")
            assert not re.search("OOM|maxmemory|script", answer.text)
            wait_until(partial(_says, "maxmemory", made, answer), description="the log has the cause")


def _says(word: str, made: Front, answer: httpx.Response) -> bool:
    return word in causes(made, answer)
