"""A job's way as server-sent events."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from tests.api.conftest import RunningApi
from tests.conftest import wait_until
from tests.services import metric


@dataclass(frozen=True)
class Event:
    id: str
    name: str
    data: dict[str, object]


def read_events(lines: Iterator[str]) -> Iterator[Event]:
    """WHATWG's rules, as far as they matter here."""
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        else:
            if "data" in fields:
                yield Event(fields["id"], fields["event"], json.loads(fields["data"]))
            fields = {}


@contextmanager
def following(client: httpx.Client, job_id: str, **headers: str) -> Iterator[Iterator[Event]]:
    with client.stream("GET", f"/v1/jobs/{job_id}/events", headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-store"
        yield read_events(answer.iter_lines())


def submitted(client: httpx.Client, **fields: object) -> str:
    job_id: str = client.post("/v1/jobs", json={"model": "slow"} | fields).raise_for_status().json()["id"]
    return job_id


def test_a_job_is_followed_from_the_queue_to_its_end(client: httpx.Client) -> None:
    blocking = submitted(client, input=0.5)
    job_id = submitted(client, inputs=[0.3, 0.3, 0.3])
    with following(client, job_id) as events:
        told = list(events)
    names = [event.name for event in told]
    assert names[0] == "queued"
    assert names[1] == "running"
    assert set(names[2:-1]) == {"progress"}
    assert names[-1] == "succeeded"
    done = [event.data["done"] for event in told if event.name == "progress"]
    assert done == sorted(set(done), key=int)  # type: ignore[arg-type]  # numbers
    assert all(event.data["total"] == 3 for event in told if event.name == "progress")
    assert told[-1].data["outputs"] == [{"output": 0.3}] * 3
    assert told[1].data["status"] == "running"
    assert blocking != job_id


def test_who_comes_back_is_told_what_is_later(client: httpx.Client) -> None:
    job_id = submitted(client, inputs=[0.4, 0.4, 0.4])
    with following(client, job_id) as events:
        seen = next(event for event in events if event.name == "running")
    with following(client, job_id, **{"Last-Event-ID": seen.id}) as events:
        later = [event.name for event in events]
    assert "queued" not in later
    assert "running" not in later
    assert later[-1] == "succeeded"


def test_an_ended_job_tells_its_end_and_after_that_nothing(client: httpx.Client) -> None:
    job_id = submitted(client, input=0.0)
    client.get(f"/v1/jobs/{job_id}", params={"wait": 5})
    with following(client, job_id) as events:
        [event] = list(events)
    assert (event.name, event.data["output"]) == ("succeeded", 0.0)
    again = client.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": event.id})
    assert (again.status_code, again.content) == (204, b"")


def test_an_id_that_is_none_of_ours_counts_as_none(client: httpx.Client) -> None:
    job_id = submitted(client, input=0.0)
    with following(client, job_id, **{"Last-Event-ID": "soon"}) as events:
        assert [event.name for event in events][-1] == "succeeded"


def test_a_cancel_is_told_at_once(client: httpx.Client) -> None:
    """Of a job that has long to go, whether or not it has begun: a busy machine may take seconds between two calls."""
    job_id = submitted(client, inputs=[0.5] * 60)
    with following(client, job_id) as events:
        assert next(events).name in ("queued", "running")
        assert client.post(f"/v1/jobs/{job_id}/cancel").status_code == 200
        assert [event.name for event in events][-1] == "cancelled"


def test_the_head_of_the_stream_ends(client: httpx.Client) -> None:
    job_id = submitted(client, input=1.0)
    answer = client.head(f"/v1/jobs/{job_id}/events")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    client.post(f"/v1/jobs/{job_id}/cancel")


def test_an_unknown_job_cannot_be_followed(client: httpx.Client) -> None:
    assert client.get("/v1/jobs/none/events").status_code == 404


def test_followers_that_go_away_are_forgotten(api: RunningApi, client: httpx.Client) -> None:
    port = client.base_url.port or 0
    job_id = submitted(client, input=1.0)
    with following(client, job_id) as events:
        next(events)
        wait_until(lambda: metric(port, "sheaf_waiters") >= 1, description="it is followed")
    wait_until(lambda: metric(port, "sheaf_waiters") == 0, description="nobody follows it")


def test_a_server_that_stops_lets_followers_go(api: RunningApi, client: httpx.Client) -> None:
    job_id = submitted(client, input=2.0)
    ended = threading.Event()

    def follow() -> None:
        with following(client, job_id) as events:
            list(events)
        ended.set()

    thread = threading.Thread(target=follow)
    thread.start()
    wait_until(lambda: metric(client.base_url.port or 0, "sheaf_waiters") == 1, description="it is followed")
    api.service.stop()
    assert ended.wait(5)
    thread.join()
    api.service.start()
