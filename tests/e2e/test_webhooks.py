"""Webhooks from the request to the receiver: real API, worker and io processes on one server, a real receiver."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from broker import AsyncBroker, JobEvent, NewJob, Priority, Webhook, queue_name
from broker.embedded import EmbeddedServer
from broker.message import WEBHOOKS, encode
from broker.webhooks import Notification
from tests.conftest import free_port, wait_until
from tests.receiver import Call, Receiver, Reply
from tests.services import Service, answers, metric, run_sheaf
from webhooks.signing import PREFIX
from workers.courier.failures import NoAnswer
from workers.threads import EXIT_STATUS

MODELS: dict[str, object] = {
    "minilm": None,
    "echo": {"max_batch_size": 16},
    "slow": {"handler": "tests.workers.handlers:Sleeper", "max_batch_size": 1, "max_wait_ms": 0},
    "picky": {"handler": "tests.workers.handlers:Picky", "max_batch_size": 8, "max_wait_ms": 0},
}


@dataclass(frozen=True)
class Running:
    base: str
    broker: EmbeddedServer
    io: Service
    io_port: int
    folder: Path
    receiver: Receiver

    def submit(self, path: str, model: str = "echo", row: object = "text", **fields: object) -> str:
        """Submit a job whose webhook is at this path of the receiver; returns its id."""
        webhook = {"url": self.receiver.url(path)} | dict(fields.pop("webhook", {}))  # type: ignore[call-overload]  # a test's shorthand
        body = {"model": model, "input": row, "webhook": webhook, **fields}
        answer = httpx.post(f"{self.base}/v1/jobs", json=body, headers={"x-request-id": f"request-{path[1:]}"})
        assert answer.status_code == 202, answer.text
        job_id: str = answer.json()["id"]
        return job_id

    def blocked(self, path: str) -> str:
        """Keep the device busy for a while; returns the id of the job that does."""
        job_id = self.submit(path, "slow", 2.0)
        url = f"{self.base}/v1/jobs/{job_id}"
        wait_until(lambda: httpx.get(url).json()["status"] == "running", description="the device is busy")
        return job_id

    def call(self, path: str) -> Call:
        """The first call of this path."""
        wait_until(lambda: self.receiver.calls(path), description=f"{path} is called: {self.io.log_path}")
        return self.receiver.calls(path)[0]

    def deliveries(self, job_id: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = httpx.get(f"{self.base}/v1/jobs/{job_id}/deliveries").json()["data"]
        return found

    def over(self, job_id: str) -> dict[str, Any]:
        """The job's one delivery, once it is over."""
        wait_until(
            lambda: [one["state"] for one in self.deliveries(job_id)] in (["delivered"], ["failed"]),
            description=f"the delivery is over: {self.io.log_path}",
        )
        return self.deliveries(job_id)[0]

    def sheaf(self, *arguments: str) -> str:
        done = run_sheaf("webhooks", *arguments, folder=self.folder, SHEAF_BROKER__URL=self.broker.url)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("webhooks")
    port, io_port = free_port(), free_port()
    with EmbeddedServer(free_port(), folder / "valkey") as broker, Receiver() as receiver:
        config: dict[str, object] = {
            "broker": {"url": broker.url, "lease_s": 1},
            "api": {"port": port, "public_url": "https://sheaf.example/"},
            "workers": {"metrics_port": free_port(), "shutdown_grace_s": 1},
            "io": {"metrics_port": io_port},
            "webhooks": {"allow": ["127.0.0.1"], "retry_schedule_s": [0, 0.1, 0.1]},
            "models": MODELS,
        }
        with (
            Service("api", config=config, folder=folder / "api") as api,
            Service("device", "--device", "cpu", config=config, folder=folder / "worker"),
            Service("io", config=config, folder=folder / "io") as io,
        ):
            base = f"http://127.0.0.1:{port}"
            wait_until(lambda: answers(f"{base}/readyz"), description=f"ready: {api.log_path}", timeout_s=60)
            yield Running(base, broker, io, io_port, folder, receiver)


def test_a_job_that_succeeds_is_told_of_with_its_output(running: Running) -> None:
    job_id = running.submit("/succeeded", row=[1, 2], metadata={"order": 7})
    secret = running.sheaf("secret").strip()
    told = running.call("/succeeded").verified(secret)
    assert told["type"] == "job.succeeded"
    data = told["data"]
    assert (data["id"], data["status"], data["output"], data["metadata"]) == (job_id, "succeeded", [1, 2], {"order": 7})
    assert data["urls"]["self"] == f"https://sheaf.example/v1/jobs/{job_id}"
    job = httpx.get(f"{running.base}/v1/jobs/{job_id}").json()
    shared = data.keys() & job.keys() - {"urls"}
    assert {name: job[name] for name in shared} == {name: data[name] for name in shared}
    assert {"model", "version", "created_at", "started_at", "finished_at", "attempt", "error"} <= shared


def test_a_job_that_fails_is_told_of(running: Running) -> None:
    job_id = running.submit("/failed", "picky", -1)
    told = running.call("/failed").content
    assert (told["type"], told["data"]["id"]) == ("job.failed", job_id)
    assert told["data"]["error"] == {"type": "ArithmeticError", "message": "minus one cannot be served"}


def test_a_job_that_is_cancelled_is_told_of_once(running: Running) -> None:
    blocking = running.blocked("/blocks")
    job_id = running.submit("/cancelled", "slow", 0)
    assert httpx.post(f"{running.base}/v1/jobs/{job_id}/cancel").status_code == 200
    told = running.call("/cancelled").content
    assert (told["type"], told["data"]["status"]) == ("job.cancelled", "cancelled")
    # The worker has come to its message, and dropped it, before the next one.
    assert running.over(blocking)["state"] == "delivered"
    assert running.over(running.submit("/next", "slow", 0))["state"] == "delivered"
    assert len(running.receiver.calls("/cancelled")) == 1


def test_a_job_that_expires_is_told_of(running: Running) -> None:
    running.blocked("/blocks-too")
    job_id = running.submit("/expired", "slow", 0, timeout_s=0.1)
    told = running.call("/expired").content
    assert (told["type"], told["data"]["id"], told["data"]["error"]["type"]) == ("job.expired", job_id, "expired")


def _new_job(running: Running, path: str, payload: bytes = b'{"input":1}') -> NewJob:
    webhook = Webhook(running.receiver.url(path), request_id="r")
    return NewJob(str(uuid.uuid4()), "echo", queue_name("echo"), payload, Priority.NORMAL, time.time(), webhook=webhook)


def test_a_message_that_cannot_be_read_is_told_of_as_a_failed_job(running: Running) -> None:
    job = _new_job(running, "/unreadable", b'{"neither":"input nor inputs"}')

    async def submit() -> None:
        front = await AsyncBroker.open(running.broker.url)
        await front.submit(job)
        await front.close()

    asyncio.run(submit())
    told = running.call("/unreadable").content
    assert (told["type"], told["data"]["error"]["type"]) == ("job.failed", "BadMessage")


def test_a_job_whose_worker_was_lost_too_often_is_told_of_as_failed(running: Running) -> None:
    """It is buried by the next worker that looks."""
    job = _new_job(running, "/worker-lost")
    with redis.Redis.from_url(running.broker.url) as client:
        client.hset("sheaf:held:infer.echo:dead", "1", b"2:3:" + encode(job))
        client.zadd("sheaf:holders:infer.echo", {"dead": 1})
    told = running.call("/worker-lost").content
    assert (told["type"], told["data"]["error"]["type"]) == ("job.failed", "worker_lost")


def test_only_the_ends_that_were_asked_for_are_told_of(running: Running) -> None:
    running.submit("/wanted", webhook={"events": ["job.failed"]})
    job_id = running.submit("/told")
    running.over(job_id)
    assert running.receiver.calls("/wanted") == []


def test_a_receiver_that_is_down_does_not_fail_the_job(running: Running) -> None:
    """cog#2229: webhook host down fails the prediction or holds its slot."""
    body = {"model": "echo", "input": "text", "webhook": {"url": f"http://127.0.0.1:{free_port()}/"}}
    answer = httpx.post(f"{running.base}/v1/jobs", json=body, headers={"prefer": "wait=10"})
    assert (answer.status_code, answer.json()["status"]) == (200, "succeeded")
    delivery = running.over(answer.json()["id"])
    assert (delivery["state"], len(delivery["attempts"])) == ("failed", 3)
    assert answer.json()["timings"]["inference_ms"] < 1000


@pytest.mark.parametrize(
    "url, said",
    [
        ("http://169.254.169.254/latest/meta-data", "begin with https"),
        ("https://169.254.169.254/latest/meta-data", "169.254.169.254 is not public"),
        ("https://2852039166/", "169.254.169.254 is not public"),
        ("https://[::ffff:10.0.0.1]/", "not public"),
        ("https://ip6-localhost@10.0.0.1/", "user or password"),
        ("", "begin with https"),
    ],
)
def test_an_address_inside_is_refused_at_submit(running: Running, url: str, said: str) -> None:
    """gradient#40: webhook to the metadata service."""
    answer = httpx.post(f"{running.base}/v1/jobs", json={"model": "echo", "input": 1, "webhook": {"url": url}})
    assert answer.status_code == 422
    [error] = answer.json()["errors"]
    assert error["field"] == "webhook.url"
    assert said in error["message"] or not url


@pytest.mark.parametrize(
    "webhook", [{}, {"url": "https://example.org", "events": []}, {"url": 1}, {"events": ["job.x"]}]
)
def test_a_webhook_that_is_not_as_it_should_be_is_refused_with_its_path(running: Running, webhook: object) -> None:
    answer = httpx.post(f"{running.base}/v1/jobs", json={"model": "echo", "input": 1, "webhook": webhook})
    assert answer.status_code == 422
    assert all(error["field"].startswith("webhook.") for error in answer.json()["errors"])


def test_deliveries_are_listed_shown_and_sent_again_by_people(running: Running) -> None:
    running.receiver.answer("/people", 500, 500, 500, 200)
    job_id = running.submit("/people")
    failed = running.over(job_id)
    assert [attempt["status"] for attempt in failed["attempts"]] == [500] * 3
    [listed] = json.loads(running.sheaf("list", "--job", job_id, "--json"))
    assert (listed["id"], listed["state"], listed["request_id"]) == (failed["id"], "failed", "request-people")
    shown = running.sheaf("show", failed["id"])
    assert "500" in shown
    assert f'"id":"{job_id}"' in shown
    assert running.sheaf("resend", failed["id"]) == "1 queued again\n"
    wait_until(lambda: running.deliveries(job_id)[0]["state"] == "delivered", description="it is sent again")
    assert len({call.id for call in running.receiver.calls("/people")}) == 1


def test_what_is_sent_is_shown_on_one_line_and_as_it_was(running: Running) -> None:
    """U+009B begins a command to a terminal, like ESC and [."""
    metadata = {"note": "\x9b31m red \x7f \u2028 \u202e"}
    delivery = running.over(running.submit("/colours", metadata=metadata))
    shown = running.sheaf("show", delivery["id"]).removesuffix("\n").split("\n")
    assert all(line.isprintable() for line in shown)
    payload = json.loads(shown[-1].removeprefix("payload: "))
    assert payload["data"]["metadata"] == metadata


def test_an_io_worker_that_loses_a_thread_of_its_courier_ends(tmp_path: Path) -> None:
    """Living on without it, the worker would look well and call nobody: its supervisor starts another instead."""
    with EmbeddedServer(free_port(), tmp_path / "valkey") as broker, Receiver() as receiver:
        config: dict[str, object] = {
            "broker": {"url": broker.url},
            "io": {"metrics_port": free_port()},
            "webhooks": {"allow": ["127.0.0.1"]},
        }
        told = Notification(JobEvent.SUCCEEDED, "job-1", "echo", receiver.url("/first"), "", None, time.time())
        with redis.Redis.from_url(broker.url) as client, Service("io", config=config, folder=tmp_path / "io") as io:
            client.lpush(WEBHOOKS, told.encode())
            wait_until(lambda: receiver.calls("/first"), description=f"it works: {io.log_path}", timeout_s=60)
            # A fault that no thread is made for, and that does not pass.
            client.set(WEBHOOKS, "no list")
            assert io.wait(20) == EXIT_STATUS
            lines = [json.loads(line) for line in io.log().splitlines() if "A thread died" in line]
            assert lines
            assert all(line["dead_thread"].startswith("courier") for line in lines)


def test_a_secret_is_printed_and_rotated(running: Running) -> None:
    first = running.sheaf("secret").strip()
    rotated = json.loads(running.sheaf("secret", "--rotate", "--json"))
    assert rotated["previous"] == first != rotated["current"]
    assert rotated["current"].startswith(PREFIX)


def test_what_does_not_exist_is_told_in_one_line(running: Running) -> None:
    for arguments, said in (
        (("resend", "msg_x"), "there is no delivery msg_x"),
        (("resend",), "name deliveries by their id, or give --failed"),
    ):
        done = run_sheaf("webhooks", *arguments, folder=running.folder, SHEAF_BROKER__URL=running.broker.url)
        assert done.returncode == 1
        assert said in done.stderr
    assert httpx.get(f"{running.base}/v1/jobs/no-such/deliveries").status_code == 404


def test_log_lines_and_metrics_tell_of_calls(running: Running) -> None:
    job_id = running.submit("/lines")
    delivery = running.over(job_id)
    lines = [json.loads(line) for line in running.io.log().splitlines() if '"A webhook was called."' in line]
    [line] = [line for line in lines if line["job_id"] == job_id]
    assert (line["delivery"], line["request_id"], line["status"]) == (delivery["id"], "request-lines", 200)
    assert running.receiver.url("") not in json.dumps(line)
    assert metric(running.io_port, "sheaf_webhook_deliveries_total", outcome="delivered") >= 1
    text = httpx.get(f"{running.base}/metrics").text
    assert 'sheaf_queue_depth{priority="0",queue="sheaf.webhooks"}' in text


def test_no_word_of_a_receivers_answer_is_logged_or_told_to_the_jobs_owner(running: Running) -> None:
    """Whoever may submit could read answers of inner services that webhooks.allow opens."""
    running.receiver.answer("/repeats", Reply(400, body=b"bad input: the text of a user"))
    job_id = running.submit("/repeats")
    delivery = running.over(job_id)
    assert delivery["attempts"][-1]["error"] == "it answered 400"
    assert "the text of a user" not in httpx.get(f"{running.base}/v1/jobs/{job_id}/deliveries").text
    assert "the text of a user" not in running.io.log()
    assert "it answered 400: bad input: the text of a user" in running.sheaf("show", delivery["id"])


def test_of_a_port_that_speaks_no_http_its_owner_reads_nothing_and_people_one_line(running: Running) -> None:
    running.receiver.answer("/mail", Reply(raw=b"220 mail.inside\r\n\x1b[31m"))
    job_id = running.submit("/mail")
    delivery = running.over(job_id)
    assert [attempt["error"] for attempt in delivery["attempts"]] == [NoAnswer.NOT_HTTP] * 3
    assert "mail.inside" not in json.dumps(delivery)
    [listed] = running.sheaf("list", "--job", job_id).splitlines()
    assert "mail.inside" in listed
    assert listed.isprintable()
    attempts = [line for line in running.sheaf("show", delivery["id"]).splitlines() if line.startswith("attempt: ")]
    assert len(attempts) == 3
    assert all("mail.inside" in line and line.isprintable() for line in attempts)


def test_a_connection_that_failed_is_told_to_the_jobs_owner_without_an_address(running: Running) -> None:
    body = {"model": "echo", "input": 1, "webhook": {"url": f"http://127.0.0.1:{free_port()}/"}}
    job_id = httpx.post(f"{running.base}/v1/jobs", json=body).json()["id"]
    delivery = running.over(job_id)
    assert {attempt["error"] for attempt in delivery["attempts"]} == {NoAnswer.REFUSED}
    assert "127.0.0.1" not in json.dumps(delivery["attempts"])
    assert "Connect call failed" in running.sheaf("show", delivery["id"])


def test_a_killed_io_worker_loses_no_delivery(running: Running) -> None:
    running.receiver.answer("/killed", Reply(hang=True), 200)
    job_id = running.submit("/killed")
    running.call("/killed")
    others = [running.submit("/beside") for _ in range(5)]
    running.io.kill()
    later = running.submit("/beside")
    assert running.deliveries(job_id)[0]["state"] == "pending"
    running.io.start()
    assert running.over(job_id)["state"] == "delivered"
    assert len({(call.id, call.body) for call in running.receiver.calls("/killed")}) == 1
    assert {running.over(other)["state"] for other in (*others, later)} == {"delivered"}


def test_an_io_worker_that_is_told_to_stop_ends_its_calls_and_goes(running: Running) -> None:
    running.receiver.answer("/unanswered", Reply(hang=True), 200)
    job_id = running.submit("/unanswered")
    running.call("/unanswered")
    assert running.io.stop() == 0
    assert running.deliveries(job_id)[0]["state"] == "pending"
    running.io.start()
    assert running.over(job_id)["state"] == "delivered"
