"""How much a caller may submit: rates, quotas, and full queues."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator

import httpx
import pytest
import redis

from broker import Broker, Rate, Settlement
from broker.message import decode
from tests.api.front import Front, front
from tests.conftest import wait_until

LIMIT = 20
JOB = {"model": "echo", "input": 1}


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with front(tmp_path_factory.mktemp("gate"), broker={"max_queue_depth": LIMIT}) as made:
        yield made


@pytest.fixture(autouse=True)
def empty(gate: Front) -> None:
    with redis.Redis.from_url(gate.broker.url) as plain:
        for key in plain.scan_iter("*infer.*"):
            plain.delete(key)


def submit(client: httpx.Client, **fields: object) -> httpx.Response:
    return client.post("/v1/jobs", json=JOB | fields)


def settle_one(gate: Front) -> str:
    """What a worker does with the oldest job; returns its id."""
    worker = Broker(gate.broker.url, f"worker-{time.monotonic_ns()}")
    [lease] = worker.lease("infer.echo", [1, 1, 1, 1]).leases
    message = decode(lease.message)
    worker.settle("infer.echo", [Settlement(lease.tag, message.id, b"{}", True, counted_by=message.counted_by)])
    worker.close()
    return message.id


def test_a_rate_lets_so_many_through_and_then_says_when(gate: Front) -> None:
    with gate.client(gate.key("r", rate=Rate(3, 60))) as client:
        answers = [submit(client) for _ in range(4)]
        assert [answer.status_code for answer in answers] == [202, 202, 202, 429]
        assert [answer.headers["ratelimit"].split(";")[1] for answer in answers] == ["r=2", "r=1", "r=0", "r=0"]
        assert {answer.headers["ratelimit-policy"] for answer in answers} == {'"submits";q=3;w=60'}
        refused = answers[3]
        assert refused.json()["type"] == "urn:sheaf:error:too-fast"
        assert 1 <= int(refused.headers["retry-after"]) <= 20
        assert refused.headers["ratelimit"].endswith(f";t={refused.headers['retry-after']}")
    with gate.client(gate.key("r")) as other:
        assert submit(other).status_code == 202
        assert "ratelimit" not in submit(other).headers


def test_a_rate_is_told_of_with_whatever_the_broker_decides(gate: Front) -> None:
    job_id = str(uuid.uuid4())
    with gate.client(gate.key("told", rate=Rate(10, 3600))) as client:

        def once(**fields: object) -> httpx.Response:
            return client.post("/v1/jobs", json=JOB | fields, headers={"Idempotency-Key": "told"})

        def chosen(**fields: object) -> httpx.Response:
            return client.put(f"/v1/jobs/{job_id}", json=JOB | fields)

        answers = [once(), once(), once(input=2), chosen(), chosen(), chosen(input=2)]
        answers.append(client.post("/v1/embeddings", json={"model": "minilm", "input": "a"}))
        with gate.client(gate.key("fills")) as other:
            for _ in range(LIMIT):
                submit(other)
        answers.append(submit(client))
    assert [answer.status_code for answer in answers[:7]] == [202, 202, 422, 202, 202, 409, 504]
    assert answers[-1].json()["type"] == "urn:sheaf:error:queue-full"
    left = [answer.headers["ratelimit"].split(";")[1] for answer in answers]
    assert left[:7] == ["r=9", "r=9", "r=9", "r=8", "r=8", "r=8", "r=7"]
    assert left[-1] == left[-2]
    assert {answer.headers["ratelimit-policy"] for answer in answers} == {'"submits";q=10;w=3600'}


def test_a_rate_comes_back_with_time(gate: Front) -> None:
    with gate.client(gate.key("back", rate=Rate(2, 1))) as client:
        assert [submit(client).status_code for _ in range(3)] == [202, 202, 429]
        wait_until(lambda: submit(client).status_code == 202, description="half a second later there is one more")


def test_what_is_refused_or_repeated_does_not_count(gate: Front) -> None:
    header = {"Idempotency-Key": "once"}
    with gate.client(gate.key("repeat", rate=Rate(2, 60))) as client:
        ids = {client.post("/v1/jobs", json=JOB, headers=header).json()["id"] for _ in range(5)}
        assert len(ids) == 1
        assert submit(client, input=None, inputs=[]).status_code == 422
        assert submit(client).status_code == 202


def test_a_key_may_have_so_many_jobs_that_have_not_ended(gate: Front) -> None:
    with gate.client(gate.key("few", max_in_flight=2)) as client:
        first, second, third = submit(client), submit(client), submit(client)
        assert (first.status_code, second.status_code, third.status_code) == (202, 202, 429)
        assert third.json()["type"] == "urn:sheaf:error:too-many-open"
        assert int(third.headers["retry-after"]) >= 1
        client.post(first.json()["urls"]["cancel"])
        assert submit(client).status_code == 202
        assert submit(client).status_code == 429
        # Its first, cancelled job is leased and dropped by a worker; the second one is served.
        while settle_one(gate) != second.json()["id"]:
            pass
        assert submit(client).status_code == 202


def test_a_rate_is_told_of_also_when_too_many_jobs_are_open(gate: Front) -> None:
    with gate.client(gate.key("both", rate=Rate(5, 60), max_in_flight=1)) as client:
        accepted, refused = submit(client), submit(client)
    assert (refused.status_code, refused.json()["type"]) == (429, "urn:sheaf:error:too-many-open")
    assert accepted.headers["ratelimit"].split(";")[1] == refused.headers["ratelimit"].split(";")[1] == "r=4"


def test_a_job_that_expires_unread_is_not_open_any_more(gate: Front) -> None:
    with gate.client(gate.key("unread", max_in_flight=1)) as client:
        assert submit(client, timeout_s=0.05).status_code == 202
        wait_until(lambda: submit(client).status_code == 202, description="it has expired, though nobody looked")


def test_a_job_that_expired_is_not_open_any_more(gate: Front) -> None:
    with gate.client(gate.key("late", max_in_flight=1)) as client:
        location = submit(client, timeout_s=0.05).headers["location"]
        assert client.get(location, params={"wait": 5}).json()["status"] == "expired"
        assert submit(client).status_code == 202


def test_jobs_that_a_server_forgot_do_not_stay_open_for_ever(gate: Front) -> None:
    with gate.client(gate.key("lost", max_in_flight=1)) as client:
        job_id = submit(client).json()["id"]
        assert submit(client).status_code == 429
        with redis.Redis.from_url(gate.broker.url) as plain:
            plain.delete(f"sheaf:job:{job_id}")
        assert submit(client).status_code == 202


def test_a_full_queue_says_when_there_will_be_room_as_fast_as_it_is_drained(gate: Front) -> None:
    with gate.client(gate.key("many")) as client:
        answers = [submit(client) for _ in range(LIMIT + 1)]
        assert [answer.status_code for answer in answers] == [202] * LIMIT + [503]
        # Nothing drains it.
        assert int(answers[-1].headers["retry-after"]) == 60

        def sooner() -> bool:
            settle_one(gate)
            submit(client)
            refused = submit(client)
            assert refused.json()["type"] == "urn:sheaf:error:queue-full"
            return int(refused.headers["retry-after"]) < 60

        wait_until(sooner, description="that it is drained is noticed")


@pytest.mark.parametrize(
    ("body", "field", "said"),
    [
        ({"model": "minilm", "input": 5}, "input", "should be a valid string"),
        ({"model": "minilm", "inputs": ["a", "b", ["c"]]}, "inputs.2", "should be a valid string"),
        ({"model": "minilm", "input": None}, "input", "should be a valid string"),
        ({"model": "echo", "imput": "x"}, "imput", "did you mean `input`?"),
        ({"model": "echo", "input": 1, "webhook": {"ulr": "x"}}, "webhook.ulr", "did you mean `url`?"),
        ({"model": "echo", "input": 1, "timeout_s": -1}, "timeout_s", "greater than 0"),
        ({"model": "echo", "input": 1, "timeout_s": True}, "timeout_s", "valid number"),
        ({"model": "echo", "input": 1, "timeout_s": "5"}, "timeout_s", "valid number"),
    ],
)
def test_a_wrong_row_is_refused_with_its_path(gate: Front, body: object, field: str, said: str) -> None:
    with gate.client(gate.key("wrong")) as client:
        answer = client.post("/v1/jobs", json=body)
    assert answer.status_code == 422
    wrong = {error["field"]: error["message"] for error in answer.json()["errors"]}
    assert said in wrong[field]


@pytest.mark.parametrize(
    ("path", "body", "field", "said"),
    [
        ("/v1/embeddings", {"model": "minilm", "input": "x", "priority": "high"}, "priority", "there is no such field"),
        (
            "/v1/embeddings",
            {"model": "minilm", "input": "x", "dimension": 3},
            "dimension",
            "there is no such field; did you mean `dimensions`?",
        ),
        ("/v2/models/minilm/infer", {"inputs": [], "metadata": {}}, "metadata", "there is no such field"),
        (
            "/v2/models/minilm/infer",
            {"inputs": [{"name": "text", "shap": [1], "datatype": "BYTES", "data": ["x"]}]},
            "inputs.0.shap",
            "there is no such field; did you mean `shape`?",
        ),
        (
            "/v2/models/minilm/infer",
            {"inputs": [], "parameters": {"timeout": 3}},
            "parameters.timeout",
            "there is no such field; did you mean `timeout_s`?",
        ),
    ],
)
def test_only_fields_that_the_request_may_have_are_suggested(
    gate: Front, path: str, body: object, field: str, said: str
) -> None:
    with gate.client(gate.key("wrong")) as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 422
    wrong = {error["field"]: error["message"] for error in answer.json()["errors"]}
    assert wrong[field] == said


@pytest.mark.parametrize("field", ["input", "inputs", "metadata"])
def test_a_field_that_is_nested_too_deeply_is_named(gate: Front, field: str) -> None:
    deepest = json.loads("[" * 250 + "]" * 250)

    def job(row: list[object]) -> dict[str, object]:
        given = {"input": row, "inputs": [1, row], "metadata": {"deep": row[0]}}
        return {"model": "echo", field: given[field]} | ({"input": 1} if field == "metadata" else {})

    with gate.client(gate.key("wrong")) as client:
        assert client.post("/v1/jobs", json=job(deepest)).status_code == 202
        answer = client.post("/v1/jobs", json=job([deepest]))
    assert answer.status_code == 422
    assert answer.json()["errors"] == [{"field": field, "message": "it is nested too deeply: 250 levels at most"}]


@pytest.mark.parametrize("key", ["", "a b", "ä", "x" * 256])
def test_an_idempotency_key_that_cannot_be_one_is_named(gate: Front, key: str) -> None:
    headers = {b"idempotency-key": key.encode()}
    with gate.client(gate.key("wrong")) as client:
        answer = client.post("/v1/jobs", json=JOB, headers=headers)
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "Idempotency-Key")


@pytest.mark.parametrize("wait", ["1_0", "٣", " 5", "+5", "-1", "5.", ".5", "1e3", "inf", "nan", "0x1", ""])
def test_a_wait_that_is_no_plain_number_is_refused(gate: Front, wait: str) -> None:
    with gate.client(gate.key("wrong")) as client:
        answer = client.post("/v1/jobs", json=JOB, params={"wait": wait})
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "wait")
