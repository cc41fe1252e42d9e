"""Submit, wait and read over HTTP, against real processes."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import jsonschema
import pytest
import redis

from api.schemas import Accepted, Job
from tests.api.conftest import MAX_PAYLOAD_BYTES, RunningApi
from tests.conftest import wait_until
from tests.services import answers, metric


def submit(client: httpx.Client, body: object, **headers: str) -> httpx.Response:
    return client.post("/v1/jobs", json=body, headers=headers)


def waiters(client: httpx.Client) -> float:
    return metric(client.base_url.port or 0, "sheaf_waiters")


def problem(answer: httpx.Response) -> dict[str, object]:
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, object] = answer.json()
    assert body["status"] == answer.status_code
    assert body["request_id"] == answer.headers["x-request-id"]
    return body


def test_a_submit_is_accepted_and_can_be_read_until_it_has_ended(client: httpx.Client) -> None:
    answer = submit(client, {"model": "echo", "input": {"deep": [1, "ü"]}, "metadata": {"order": 7}})
    assert answer.status_code == 202
    accepted = Accepted.model_validate_json(answer.content)
    assert answer.headers["location"] == accepted.urls.self == f"/v1/jobs/{accepted.id}"
    ended = client.get(answer.headers["location"], params={"wait": 5})
    job = Job.model_validate_json(ended.content)
    assert (job.status, job.output, job.outputs, job.metadata) == ("succeeded", {"deep": [1, "ü"]}, None, {"order": 7})
    assert job.attempt == 1
    assert job.timings is not None
    assert job.timings.batch_size >= 1
    assert job.created_at is not None
    assert job.started_at is not None
    assert job.finished_at is not None
    assert job.created_at <= job.started_at <= job.finished_at


def test_prefer_wait_returns_the_result_itself(client: httpx.Client) -> None:
    answer = submit(client, {"model": "echo", "input": "x"}, Prefer="respond-async, wait=5")
    assert answer.status_code == 200
    assert answer.json()["output"] == "x"
    assert answer.headers["preference-applied"] == "wait=5"


def test_prefer_wait_that_is_too_short_is_answered_with_202(client: httpx.Client) -> None:
    answer = submit(client, {"model": "slow", "input": 1}, Prefer="wait=0.2")
    assert answer.status_code == 202
    assert client.get(answer.headers["location"], params={"wait": 5}).json()["output"] == 1.0


def test_callers_that_vanish_while_their_batch_forms_take_nobody_along(client: httpx.Client) -> None:
    for _ in range(12):
        with suppress(httpx.ReadTimeout):
            client.post("/v1/jobs", json={"model": "slow", "input": 0.1}, headers={"Prefer": "wait=5"}, timeout=0.02)
    wait_until(lambda: waiters(client) == 0, description="nobody waits for those who have gone")
    answer = submit(client, {"model": "slow", "input": 0.0}, Prefer="wait=5")
    assert (answer.status_code, answer.json()["output"]) == (200, 0.0)


def test_a_wait_over_the_limit_is_cut_to_it(client: httpx.Client) -> None:
    answer = submit(client, {"model": "echo", "input": 1}, Prefer="wait=4000")
    assert answer.headers["preference-applied"] == "wait=5"


@pytest.mark.parametrize("preference", ["wait", "wait=soon", "wait=-1", "waiting=5"])
def test_a_preference_that_is_not_understood_is_ignored(client: httpx.Client, preference: str) -> None:
    assert submit(client, {"model": "echo", "input": 1}, Prefer=preference).status_code == 202


def test_many_rows_come_back_in_their_order_each_with_its_own_outcome(client: httpx.Client) -> None:
    job = submit(client, {"model": "picky", "inputs": [1, -1, "x", 2]}, Prefer="wait=5").json()
    assert job["status"] == "succeeded"
    assert job["output"] is None
    first, second, third, fourth = job["outputs"]
    assert (first, fourth) == ({"output": 1.0}, {"output": 2.0})
    assert second["error"] == {"type": "ArithmeticError", "message": "minus one cannot be served"}
    assert third["error"]["type"] == "ValueError"


def test_a_jobs_inference_time_is_that_of_its_batches_not_of_its_rows(client: httpx.Client) -> None:
    job = submit(client, {"model": "picky", "inputs": [0.0] * 24}, Prefer="wait=5").json()
    picky = submit(client, {"model": "slow", "inputs": [0.1, 0.1, 0.1]}, Prefer="wait=5").json()
    assert job["status"] == picky["status"] == "succeeded"
    assert 300 <= picky["timings"]["inference_ms"] < 1000
    assert job["timings"]["inference_ms"] < 1000


@pytest.mark.parametrize(("depth", "status"), [(250, 202), (251, 422), (1000, 422), (1500, 400)])
def test_json_that_is_nested_too_deeply_is_refused(client: httpx.Client, depth: int, status: int) -> None:
    body = '{"model": "echo", "input": ' + "[" * depth + "]" * depth + "}"
    answer = client.post("/v1/jobs", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status


def test_what_is_nested_as_deeply_as_may_be_comes_back_as_it_is(client: httpx.Client) -> None:
    deepest = json.loads("[" * 250 + "]" * 250)
    metadata = {"deep": deepest[0]}
    one = submit(client, {"model": "echo", "input": deepest, "metadata": metadata}, Prefer="wait=5").json()
    many = submit(client, {"model": "echo", "inputs": [deepest], "metadata": metadata}, Prefer="wait=5").json()
    assert one["output"] == many["outputs"][0]["output"] == deepest
    assert one["metadata"] == many["metadata"] == metadata


def test_a_burst_of_waiting_callers_is_served(api: RunningApi) -> None:
    """More of them than there are connections to the broker, on a process that has listened to nothing before."""

    def one(number: int) -> int:
        with httpx.Client(base_url=api.base, timeout=30) as client:
            return submit(client, {"model": "echo", "input": number}, Prefer="wait=20").status_code

    api.service.stop()
    api.service.start()
    wait_until(lambda: answers(f"{api.base}/livez"), description="the API is back")
    with ThreadPoolExecutor(150) as pool:
        assert set(pool.map(one, range(150))) <= {200, 202}


def test_results_that_nobody_reads_leave_nothing_behind_in_the_api(api: RunningApi, client: httpx.Client) -> None:
    """Celery's own client subscribes to each result, and stays so until somebody reads it (celery#3808)."""

    def listening() -> tuple[int, int]:
        connections = plain.client_list(_type="pubsub")
        return len(connections), sum(int(one["sub"]) for one in connections)

    with redis.Redis.from_url(api.broker.url) as plain:
        submit(client, {"model": "echo", "input": 0}, Prefer="wait=5")
        before = listening()
        ids = [submit(client, {"model": "echo", "input": n}).json()["id"] for n in range(40)]
        assert client.get(f"/v1/jobs/{ids[-1]}?wait=5").json()["status"] == "succeeded"
        assert listening() == before


def test_waits_survive_connections_that_are_cut_again_and_again(api: RunningApi, client: httpx.Client) -> None:
    stop = threading.Event()

    def cut() -> None:
        with redis.Redis.from_url(api.broker.url) as plain:
            while not stop.wait(0.2):
                plain.client_kill_filter(_type="pubsub")

    cutter = threading.Thread(target=cut)
    cutter.start()
    try:
        with ThreadPoolExecutor(8) as pool:
            sent = list(pool.map(lambda n: submit(client, {"model": "echo", "input": n}, Prefer="wait=5"), range(150)))
    finally:
        stop.set()
        cutter.join()
    assert {answer.status_code for answer in sent} == {200}
    assert [answer.json()["output"] for answer in sent] == list(range(150))
    wait_until(lambda: waiters(client) == 0, description="nobody waits any more")


@pytest.mark.parametrize(
    "stored", [b'{"status": "STARTED", "result": null}', b'{"status": "SUCCESS"}', b"\x80\x05", b"[]"]
)
def test_results_of_other_applications_are_no_jobs_of_ours(
    api: RunningApi, client: httpx.Client, stored: bytes
) -> None:
    with redis.Redis.from_url(api.broker.url) as plain:
        plain.set("celery-task-meta-foreign", stored, ex=60)
    assert client.get("/v1/jobs/foreign").status_code == 404


def test_a_failed_job_says_why(client: httpx.Client) -> None:
    job = submit(client, {"model": "picky", "input": -1}, Prefer="wait=5").json()
    assert job["status"] == "failed"
    assert job["error"] == {"type": "ArithmeticError", "message": "minus one cannot be served"}
    assert job["output"] is None


def test_null_is_an_input_like_any_other(client: httpx.Client) -> None:
    assert submit(client, {"model": "echo", "input": None}, Prefer="wait=5").json()["output"] is None


def test_a_job_whose_time_ran_out_before_it_began_expires(client: httpx.Client) -> None:
    submit(client, {"model": "slow", "input": 1})
    late = submit(client, {"model": "slow", "input": 0, "timeout_s": 0.2}).json()
    job = client.get(late["urls"]["self"], params={"wait": 5}).json()
    assert (job["status"], job["error"]["type"]) == ("expired", "expired")


def test_a_job_that_waits_can_be_cancelled_and_its_waiters_are_told_at_once(client: httpx.Client) -> None:
    running = submit(client, {"model": "slow", "input": 1.5}).json()
    wait_until(lambda: client.get(running["urls"]["self"]).json()["status"] == "running", description="it runs")
    waiting = submit(client, {"model": "slow", "input": 0}).json()
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(client.get, waiting["urls"]["self"], params={"wait": 5})
        wait_until(lambda: waiters(client) == 1, description="it waits")
        cancelled = client.post(waiting["urls"]["cancel"])
        assert cancelled.status_code == 200
        assert cancelled.json()["status"] == "cancelled"
        told = waiter.result()
    assert told.json()["status"] == "cancelled"
    assert client.get(running["urls"]["self"]).json()["status"] == "running"
    assert client.get(running["urls"]["self"], params={"wait": 5}).json()["status"] == "succeeded"
    assert client.get(waiting["urls"]["self"]).json()["status"] == "cancelled"


def test_the_result_of_a_running_job_that_was_cancelled_is_not_kept(client: httpx.Client) -> None:
    job = submit(client, {"model": "slow", "input": 1}).json()
    wait_until(
        lambda: client.get(job["urls"]["self"]).json()["status"] == "running", description="it runs", timeout_s=10
    )
    assert client.post(job["urls"]["cancel"]).json()["status"] == "cancelled"
    # Its batch is over when the next one has run.
    submit(client, {"model": "slow", "input": 0}, Prefer="wait=5")
    assert client.get(job["urls"]["self"]).json()["status"] == "cancelled"


def test_a_job_that_has_ended_cannot_be_cancelled(client: httpx.Client) -> None:
    job = submit(client, {"model": "echo", "input": "x"}, Prefer="wait=5").json()
    answer = client.post(job["urls"]["cancel"])
    assert answer.status_code == 409
    assert problem(answer)["type"] == "urn:sheaf:error:job-ended"
    assert client.get(job["urls"]["self"]).json() == job
    assert client.post("/v1/jobs/no-such-job/cancel").status_code == 404


def test_a_high_priority_job_overtakes(client: httpx.Client) -> None:
    submit(client, {"model": "slow", "input": 0.5})
    low = [submit(client, {"model": "slow", "input": 0.1, "priority": "low"}).json() for _ in range(4)]
    high = submit(client, {"model": "slow", "input": 0.1, "priority": "high"}).json()
    done = client.get(high["urls"]["self"], params={"wait": 5}).json()
    last = client.get(low[-1]["urls"]["self"], params={"wait": 5}).json()
    assert done["priority"] == "high"
    assert last["priority"] == "low"
    assert done["finished_at"] < last["finished_at"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"model": "echo"}, "either `input`"),
        ({"model": "echo", "input": 1, "inputs": [1]}, "either `input`"),
        ({"model": "echo", "inputs": []}, "at least 1"),
        ({"model": "echo", "inputs": "text"}, "list"),
        ({"model": "echo", "input": 1, "priority": "urgent"}, "'high', 'normal' or 'low'"),
        ({"model": "echo", "input": 1, "timeout_s": 0}, "greater than 0"),
        ({"model": "echo", "input": 1, "surprise": 1}, "surprise"),
        ({"model": "echo", "input": 1, "metadata": []}, "dictionary"),
        ({"input": 1}, "model: Field required"),
        ([1], "a JSON object is expected"),
    ],
)
def test_a_wrong_body_is_refused_with_the_field_and_what_to_do(client: httpx.Client, body: object, said: str) -> None:
    answer = submit(client, body)
    assert answer.status_code == 422
    found = problem(answer)
    assert found["type"] == "urn:sheaf:error:invalid-request"
    assert said in str(found["detail"])


@pytest.mark.parametrize("body", [b"", b"{", b'{"model": "echo", "input": NaN}', b"\xff"])
def test_a_body_that_is_no_json_is_refused(client: httpx.Client, body: bytes) -> None:
    answer = client.post("/v1/jobs", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert problem(answer)["type"] == "urn:sheaf:error:not-json"


def test_forms_are_refused(client: httpx.Client) -> None:
    answer = client.post("/v1/jobs", data={"model": "echo"})
    assert answer.status_code == 415
    assert "application/json" in str(problem(answer)["detail"])


@pytest.mark.parametrize(("charset", "status"), [("utf-16", 415), ('"latin-1"', 415), ("UTF-8", 202), ('"utf-8"', 202)])
def test_json_is_utf_8(client: httpx.Client, charset: str, status: int) -> None:
    headers = {"content-type": f"application/json; charset={charset}"}
    answer = client.post("/v1/jobs", content=b'{"model": "echo", "input": 1}', headers=headers)
    assert answer.status_code == status


def test_what_a_caller_made_up_is_not_told_back_at_length(client: httpx.Client) -> None:
    answer = submit(client, {"model": "m" * 3000, "input": 1})
    assert answer.status_code == 404
    assert len(answer.content) < 1000


def test_a_submit_and_a_read_wait_however_it_is_asked_for(client: httpx.Client) -> None:
    body = {"model": "slow", "input": 0.2}
    by_query = client.post("/v1/jobs", params={"wait": 5}, json=body)
    assert (by_query.status_code, by_query.json()["status"]) == (200, "succeeded")
    location = submit(client, body).headers["location"]
    by_header = client.get(location, headers={"Prefer": "wait=5"})
    assert (by_header.json()["status"], by_header.headers["preference-applied"]) == ("succeeded", "wait=5")
    assert client.post("/v1/jobs", params={"wait": "soon"}, json=body).status_code == 422


def test_a_wait_that_is_over_tells_how_the_job_is_by_then(client: httpx.Client) -> None:
    answer = submit(client, {"model": "slow", "input": 1.0}, Prefer="wait=0.4")
    assert (answer.status_code, answer.json()["status"]) == (202, "running")


def test_a_model_that_could_not_be_loaded_takes_no_jobs(client: httpx.Client) -> None:
    answer = submit(client, {"model": "broken", "input": 1})
    assert answer.status_code == 503
    found = problem(answer)
    assert found["type"] == "urn:sheaf:error:model-failed"
    assert "no.such.module" in str(found["detail"])
    assert answer.headers["retry-after"]


def test_an_unknown_model_is_named_with_those_that_are_known(client: httpx.Client) -> None:
    answer = submit(client, {"model": "ecco", "input": 1})
    assert answer.status_code == 404
    assert "echo" in str(problem(answer)["detail"])


def test_an_unknown_job_is_404(client: httpx.Client) -> None:
    answer = client.get("/v1/jobs/no-such-job")
    assert answer.status_code == 404
    assert problem(answer)["type"] == "urn:sheaf:error:unknown-job"
    assert client.get("/v1/jobs/no-such-job?wait=1").status_code == 404


@pytest.mark.parametrize("wait", ["soon", "-1", "nan", "inf"])
def test_a_wrong_wait_is_refused(client: httpx.Client, wait: str) -> None:
    answer = client.get("/v1/jobs/some-job", params={"wait": wait})
    assert answer.status_code == 422
    assert "wait" in str(problem(answer)["detail"])


def test_other_paths_and_methods_are_problems_too(client: httpx.Client) -> None:
    assert problem(client.get("/v2/jobs"))["type"] == "urn:sheaf:error:not-found"
    answer = client.delete("/v1/jobs")
    assert problem(answer)["type"] == "urn:sheaf:error:method-not-allowed"
    assert answer.headers["allow"] == "GET, POST"


def test_a_body_over_the_limit_is_refused_before_it_is_read(client: httpx.Client) -> None:
    answer = submit(client, {"model": "echo", "input": "x" * MAX_PAYLOAD_BYTES})
    assert answer.status_code == 413
    assert str(MAX_PAYLOAD_BYTES) in str(problem(answer)["detail"])


def test_a_chunked_body_over_the_limit_is_refused_while_it_comes(api: RunningApi) -> None:
    sent = 0

    def chunks() -> object:
        nonlocal sent
        for _ in range(1_000_000):
            sent += 1
            yield b"x" * 1024

    with httpx.Client(base_url=api.base, timeout=20) as client:
        try:
            status = client.post(
                "/v1/jobs",
                content=chunks(),  # type: ignore[arg-type]  # a generator of bytes
                headers={"content-type": "application/json"},
            ).status_code
        except (httpx.WriteError, httpx.ReadError):
            # The server answered and closed while we were still sending.
            status = 413
    assert status == 413
    assert sent < 1_000_000


def test_the_request_id_goes_through_to_the_workers_log(api: RunningApi, client: httpx.Client) -> None:
    answer = submit(
        client, {"model": "echo", "input": "secret words"}, **{"X-Request-ID": "trace-42", "Prefer": "wait=5"}
    )
    assert answer.headers["x-request-id"] == "trace-42"
    assert api.worker is not None
    worker = api.worker
    wait_until(lambda: "trace-42" in worker.log(), description="the worker's line is written")
    wait_until(lambda: "trace-42" in api.service.log(), description="the API's line is written")
    [line] = [json.loads(line) for line in api.service.log().splitlines() if "trace-42" in line]
    assert (line["route"], line["status"], line["job_id"]) == ("/v1/jobs", 200, answer.json()["id"])
    assert "secret words" not in worker.log() + api.service.log()


def test_a_strange_request_id_is_replaced(client: httpx.Client) -> None:
    answer = client.get("/livez", headers={"x-request-id": "a b\tc"})
    assert answer.headers["x-request-id"] != "a b\tc"


def test_the_same_idempotency_key_and_payload_is_the_same_job(client: httpx.Client) -> None:
    body = {"model": "echo", "input": "once"}
    first, second = (submit(client, body, **{"Idempotency-Key": "key-1"}).json()["id"] for _ in range(2))
    assert first == second
    other = submit(client, {"model": "echo", "input": "twice"}, **{"Idempotency-Key": "key-1"})
    assert other.status_code == 422
    assert problem(other)["type"] == "urn:sheaf:error:idempotency-conflict"
    tensor = {"name": "input", "shape": [1], "datatype": "BYTES", "data": ['"once"']}
    elsewhere = client.post("/v2/models/echo/infer", json={"inputs": [tensor]}, headers={"Idempotency-Key": "key-1"})
    assert problem(elsewhere)["type"] == "urn:sheaf:error:idempotency-conflict"
    assert "used for another request" in str(problem(elsewhere)["detail"])


def test_a_waiter_that_goes_away_is_forgotten(api: RunningApi, client: httpx.Client) -> None:
    job = submit(client, {"model": "slow", "input": 3}).json()
    with pytest.raises(httpx.ReadTimeout):
        client.get(job["urls"]["self"], params={"wait": 5}, timeout=0.3)
    wait_until(lambda: waiters(client) == 0, description="nobody waits any more", timeout_s=2)
    client.get(job["urls"]["self"], params={"wait": 5})


def test_submits_that_come_together_are_all_accepted_and_served(client: httpx.Client) -> None:
    def one(number: int) -> object:
        return submit(client, {"model": "echo", "input": number}, Prefer="wait=5").json()["output"]

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(one, range(200))) == list(range(200))


def test_a_full_queue_refuses_with_a_time_to_try_again(client: httpx.Client) -> None:
    submit(client, {"model": "slow", "input": 1})
    tried = [submit(client, {"model": "slow", "input": 0}) for _ in range(60)]
    refused = [answer for answer in tried if answer.status_code == 503]
    assert refused
    assert problem(refused[0])["type"] == "urn:sheaf:error:queue-full"
    assert int(refused[0].headers["retry-after"]) >= 1
    accepted = [answer for answer in tried if answer.status_code == 202]
    last = client.get(accepted[-1].headers["location"], params={"wait": 5}).json()
    assert last["status"] == "succeeded"


def test_a_job_of_a_plain_celery_client_can_be_read(api: RunningApi, client: httpx.Client) -> None:
    from tests.workers.conftest import celery_app

    with celery_app(api.broker.url) as app:
        sent = app.send_task("sheaf.infer", args=["hello"], queue="infer.echo")
        assert sent.get(timeout=10) == "hello"
    job = client.get(f"/v1/jobs/{sent.id}").json()
    assert (job["status"], job["model"], job["output"]) == ("succeeded", "echo", "hello")


def test_what_openapi_promises_is_what_is_answered(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    answers = document["paths"]["/v1/jobs"]["post"]["responses"]
    schema = {**answers["202"]["content"]["application/json"]["schema"], "components": document["components"]}
    jsonschema.validate(submit(client, {"model": "echo", "input": 1}).json(), schema)
    schema = {**answers["200"]["content"]["application/json"]["schema"], "components": document["components"]}
    jsonschema.validate(submit(client, {"model": "echo", "input": 1}, Prefer="wait=5").json(), schema)
    body = document["components"]["schemas"]["JobRequest"]
    expected = {"model", "input", "inputs", "priority", "timeout_s", "metadata", "webhook"}
    assert body["properties"].keys() == expected


def test_a_broker_that_is_away_is_a_503_and_nothing_else_breaks(api: RunningApi, client: httpx.Client) -> None:
    api.broker.stop()
    try:
        answer = submit(client, {"model": "echo", "input": 1})
        assert answer.status_code == 503
        assert problem(answer)["type"] == "urn:sheaf:error:broker-unavailable"
        assert answer.headers["retry-after"]
        assert client.get("/readyz").status_code == 503
        assert client.get("/livez").status_code == 200
        assert "sheaf_http_requests_total" in client.get("/metrics").text
    finally:
        api.broker.start()
    wait_until(lambda: client.get("/readyz").status_code == 200, description="it is ready again", timeout_s=30)
    assert submit(client, {"model": "echo", "input": 2}, Prefer="wait=5").json()["output"] == 2


def test_accepted_means_that_the_broker_holds_it(api: RunningApi, client: httpx.Client) -> None:
    submit(client, {"model": "slow", "input": 2})
    accepted = submit(client, {"model": "slow", "input": 0}).json()
    with redis.Redis.from_url(api.broker.url) as plain:
        assert plain.exists(f"sheaf:job:{accepted['id']}")
    client.get(accepted["urls"]["self"], params={"wait": 5})


def test_a_stopping_server_answers_those_who_wait(api: RunningApi, client: httpx.Client) -> None:
    """Last in this file: it restarts the API."""
    job = submit(client, {"model": "slow", "input": 4}).json()
    received: list[httpx.Response] = []

    def wait() -> None:
        with httpx.Client(base_url=api.base, timeout=20) as waiting:
            received.append(waiting.get(job["urls"]["self"], params={"wait": 5}))

    waiter = threading.Thread(target=wait)
    waiter.start()
    wait_until(lambda: waiters(client) == 1, description="it waits")
    begin = time.monotonic()
    assert api.service.stop() == 0
    waiter.join()
    assert time.monotonic() - begin < 3
    [answer] = received
    assert answer.status_code == 200
    assert answer.json()["status"] in ("queued", "running")
    api.service.start()
    wait_until(lambda: _alive(client), description="the API is back")


def _alive(client: httpx.Client) -> bool:
    try:
        return client.get("/livez").status_code == 200
    except httpx.TransportError:
        return False
