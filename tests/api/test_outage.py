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
from tests.api.test_events import following
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


def test_a_stream_of_events_lives_through_a_restart_of_the_broker(tmp_path: Path) -> None:
    with front(tmp_path) as made, made.client() as client:
        job_id = submitted(client)
        with following(client, job_id) as events:
            assert next(events).name == "queued"
            made.broker.stop()
            wait_until(lambda: client.get("/readyz").json()["type"].endswith("broker-unavailable"), description="away")
            made.broker.start()
            wait_until(lambda: cancelled(made, job_id), description="it is cancelled")
            assert [event.name for event in events] == ["cancelled"]


def test_a_stream_of_events_waits_for_a_broker_that_stands_and_does_not_serve(tmp_path: Path) -> None:
    with front(tmp_path) as made, made.client() as client, redis.Redis.from_url(made.broker.url) as plain:
        job_id = submitted(client)
        with following(client, job_id) as events:
            assert next(events).name == "queued"
            refuse_writes(plain)
            plain.config_set("maxmemory", 0)
            wait_until(lambda: cancelled(made, job_id), description="it is cancelled")
            assert [event.name for event in events] == ["cancelled"]


def test_a_stream_that_ends_early_goes_on_where_it_was(tmp_path: Path) -> None:
    wait_no_longer = {"max_wait_s": 0.5}
    with (
        front(tmp_path, api=wait_no_longer) as made,
        made.client() as client,
        redis.Redis.from_url(made.broker.url) as plain,
    ):
        job_id = submitted(client)
        with following(client, job_id) as events:
            seen = next(events)
            refuse_writes(plain)
            assert list(events) == []
        plain.config_set("maxmemory", 0)
        wait_until(lambda: cancelled(made, job_id), description="it is cancelled")
        with following(client, job_id, **{"Last-Event-ID": seen.id}) as events:
            assert [event.name for event in events] == ["cancelled"]


def submitted(client: httpx.Client) -> str:
    job_id: str = client.post("/v1/jobs", json=JOB).raise_for_status().json()["id"]
    return job_id


def cancelled(made: Front, job_id: str) -> bool:
    with made.client() as client:
        return client.post(f"/v1/jobs/{job_id}/cancel").status_code in (200, 409)


def refuse_writes(plain: redis.Redis) -> None:
    """From now on; whoever follows a job has looked up, and was refused."""
    refused = rejected(plain)
    plain.config_set("maxmemory", 1)
    plain.client_kill_filter(_type="pubsub")
    wait_until(lambda: rejected(plain) > refused, description="who follows looks up, and is refused")


def rejected(plain: redis.Redis) -> int:
    """How often the server refused what only those send who follow a job."""
    stats = plain.info("commandstats")
    assert isinstance(stats, dict)
    return int(stats.get("cmdstat_zadd", {}).get("rejected_calls", 0))
