"""Lists of a caller's jobs, ids of its choice, repeated submits, places in the queue."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import httpx
import pytest

from api.schemas import JobList
from broker import Broker
from tests.api.front import Front, front

JOB = {"model": "echo", "input": 1}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with front(tmp_path_factory.mktemp("shelf")) as made:
        yield made


@pytest.fixture
def client(shelf: Front) -> Iterator[httpx.Client]:
    """Of an owner who is new."""
    with shelf.client(shelf.key(f"owner-{uuid.uuid4().hex}")) as client:
        yield client


def submitted(client: httpx.Client, **fields: object) -> str:
    answer = client.post("/v1/jobs", json=JOB | fields)
    assert answer.status_code == 202
    job_id: str = answer.json()["id"]
    return job_id


def pages(client: httpx.Client, **query: str | int) -> list[list[str]]:
    """Ids, page by page."""
    found: list[list[str]] = []
    while True:
        page = JobList.model_validate_json(client.get("/v1/jobs", params=query).raise_for_status().content)
        found.append([job.id for job in page.data])
        if page.next_cursor is None:
            return found
        query["cursor"] = page.next_cursor


def test_a_list_is_the_newest_first_in_pages_without_gaps(client: httpx.Client) -> None:
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda _: submitted(client), range(25)))
    found = pages(client, limit=10)
    assert [len(page) for page in found] == [10, 10, 5]
    assert sorted(chain(*found)) == sorted(ids)
    created = [job["created_at"] for job in client.get("/v1/jobs", params={"limit": 25}).json()["data"]]
    assert created == sorted(created, reverse=True)


def test_jobs_submitted_while_somebody_turns_pages_shift_nothing(client: httpx.Client) -> None:
    ids = [submitted(client) for _ in range(6)]
    first = client.get("/v1/jobs", params={"limit": 3}).json()
    submitted(client)
    second = client.get("/v1/jobs", params={"limit": 3, "cursor": first["next_cursor"]}).json()
    assert [job["id"] for job in first["data"] + second["data"]] == ids[::-1]


def test_filters(client: httpx.Client) -> None:
    cancelled = submitted(client)
    client.post(f"/v1/jobs/{cancelled}/cancel")
    text = submitted(client, model="minilm", input="a text")
    assert pages(client, status="cancelled") == [[cancelled]]
    assert pages(client, status="queued", model="minilm") == [[text]]
    assert pages(client, model="none") == [[]]


def test_a_list_tells_no_answers(client: httpx.Client) -> None:
    submitted(client)
    [job] = client.get("/v1/jobs").json()["data"]
    assert "output" not in job
    assert job["urls"]["self"] == f"/v1/jobs/{job['id']}"


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"cursor": "!"}, "cursor"),
        ({"cursor": "eA"}, "cursor"),
        ({"status": "done"}, "status"),
        ({"limit": "0"}, "limit"),
        ({"limit": "101"}, "limit"),
    ],
)
def test_a_wrong_query_is_refused(client: httpx.Client, query: dict[str, str], field: str) -> None:
    answer = client.get("/v1/jobs", params=query)
    assert answer.status_code == 422
    assert [error["field"] for error in answer.json()["errors"]] == [field]


def test_the_same_submit_at_once_and_later_gets_the_first_answer(client: httpx.Client) -> None:
    def repeat(_: int) -> httpx.Response:
        return client.post("/v1/jobs", json=JOB, headers={"Idempotency-Key": "k"})

    with ThreadPoolExecutor(8) as pool:
        answers = [*pool.map(repeat, range(16)), repeat(0)]
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.content for answer in answers}) == 1
    assert sorted(answer.headers.get("idempotency-replayed", "") for answer in answers) == ["", *["true"] * 16]
    assert len(pages(client)[0]) == 1
    other = client.post("/v1/jobs", json=JOB | {"input": 2}, headers={"Idempotency-Key": "k"})
    assert (other.status_code, other.json()["type"]) == (422, "urn:sheaf:error:idempotency-conflict")
    elsewhere = client.put(f"/v1/jobs/{uuid.uuid4()}", json=JOB, headers={"Idempotency-Key": "k"})
    assert elsewhere.status_code == 422


def test_a_job_under_a_chosen_id_can_be_submitted_again_and_is_one_job(client: httpx.Client) -> None:
    url = f"/v1/jobs/{uuid.uuid4()}"
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: client.put(url, json=JOB), range(8)))
    assert {answer.status_code for answer in answers} == {202}
    assert {answer.headers["location"] for answer in answers} == {url}
    assert len({answer.content for answer in answers}) == 1
    assert len(pages(client)[0]) == 1
    other = client.put(url, json=JOB | {"input": 2})
    assert (other.status_code, other.json()["type"]) == (409, "urn:sheaf:error:id-taken")


@pytest.mark.parametrize("job_id", ["7", "order-12", "7D444840-9DC0-11D1-B245-5FFDCE74FAD2", "%00", "a" * 200])
def test_a_chosen_id_is_a_uuid(client: httpx.Client, job_id: str) -> None:
    answer = client.put(f"/v1/jobs/{job_id}", json=JOB)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "job_id"


def test_the_place_in_the_queue_counts_down(shelf: Front, client: httpx.Client) -> None:
    worker = Broker(shelf.broker.url, "worker")
    while worker.lease("infer.echo", [50] * 4).leases:
        pass
    ids = [submitted(client) for _ in range(5)]

    def places() -> list[object]:
        return [client.get(f"/v1/jobs/{job_id}").json()["queue_position"] for job_id in ids]

    assert places() == [1, 2, 3, 4, 5]
    low = submitted(client, priority="low")
    assert client.get(f"/v1/jobs/{low}").json()["queue_position"] == 6
    urgent = submitted(client, priority="high")
    assert places() == [2, 3, 4, 5, 6]
    assert len(worker.lease("infer.echo", [1, 2, 0, 0]).leases) == 3
    worker.close()
    assert places()[2:] == [1, 2, 3]
    assert client.get(f"/v1/jobs/{low}").json()["queue_position"] == 4
    assert urgent
