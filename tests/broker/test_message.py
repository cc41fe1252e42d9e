"""The message format against Celery's own reading and writing of it."""

from __future__ import annotations

import base64
from typing import Any, cast

import orjson
import pytest
import redis
from celery import Celery
from kombu import Connection, Consumer, Queue

from broker import BadMessage, NewJob, Priority
from broker.message import decode, encode
from tests.broker.conftest import QUEUE


def celery_app(url: str) -> Celery:
    return Celery(broker=url, backend=url, set_as_current=False)


def test_a_message_that_celery_sent_is_understood(server_url: str) -> None:
    with celery_app(server_url) as app:
        sent = app.send_task(
            "sheaf.infer", args=["a text"], kwargs={"k": 1}, queue=QUEUE, expires=60, countdown=5, ignore_result=True
        )
    with redis.Redis.from_url(server_url) as client:
        raw = client.rpop(QUEUE)
    message = decode(raw)
    assert (message.id, message.task, message.args, message.kwargs) == (sent.id, "sheaf.infer", ["a text"], {"k": 1})
    assert message.ignore_result
    assert not message.recorded
    assert message.eta is not None
    assert message.expires_at is not None
    assert 50 < message.expires_at - message.eta < 60


def test_a_message_that_we_wrote_is_read_by_kombu(server_url: str) -> None:
    job = NewJob("job-1", "echo", QUEUE, b'{"input":"x"}', Priority.HIGH, 1000.0, expires_at=2000.0)
    with redis.Redis.from_url(server_url) as client:
        client.lpush(QUEUE, encode(job))
    bodies: list[tuple[Any, str]] = []
    with Connection(server_url) as connection, connection.channel() as channel:
        consumer = Consumer(channel, [Queue(QUEUE)], accept=["json"], no_ack=True)
        consumer.register_callback(lambda body, message: bodies.append((body, message.headers["id"])))
        with consumer:
            connection.drain_events(timeout=5)
    [(body, job_id)] = bodies
    assert job_id == "job-1"
    assert body[:2] == [[], {"input": "x"}]


def envelope(**changes: object) -> bytes:
    message = orjson.loads(encode(NewJob("job-1", "echo", QUEUE, b'{"input":"x"}', Priority.HIGH, 1000.0)))
    return orjson.dumps(message | changes)


HEADERS = {"id": "job-1", "task": "sheaf.infer"}
#: Our own header as it was before messages named their owner.
OWN = {"enqueued_at": 1000.0, "request_id": None}


def test_the_owner_of_a_submitted_job_is_read_from_its_message() -> None:
    job = NewJob("job-1", "echo", QUEUE, b'{"input":"x"}', Priority.HIGH, 1000.0, owner="somebody")
    assert decode(encode(job)).owner == "somebody"


@pytest.mark.parametrize(
    "headers",
    [HEADERS, HEADERS | {"sheaf": OWN}, HEADERS | {"sheaf": OWN | {"owner": None}}, HEADERS | {"sheaf_owner": None}],
)
def test_a_message_that_names_no_owner_is_nobodys(headers: dict[str, object]) -> None:
    message = decode(envelope(headers=headers))
    assert (message.owner, message.recorded) == ("", "sheaf" in headers)


def test_a_celery_producer_names_the_owner_with_a_header(server_url: str) -> None:
    with celery_app(server_url) as app:
        app.send_task("sheaf.infer", args=["a text"], queue=QUEUE, headers={"sheaf_owner": "billing"})
    with redis.Redis.from_url(server_url) as client:
        raw = client.rpop(QUEUE)
    assert decode(cast("bytes", raw)).owner == "billing"


@pytest.mark.parametrize(
    ("raw", "reason", "job_id"),
    [
        (b"{", "not JSON", None),
        (b"[]", "protocol 2", None),
        (b'{"headers": {}}', "protocol 2", None),
        (b'{"headers": {}, "properties": {}, "content-type": "application/json", "body": "[1]"}', "protocol 2", None),
        (envelope(headers={}, body=base64.b64encode(b'{"task": "t", "id": "job-1"}').decode()), "protocol 1", "job-1"),
        (envelope(headers={}, body="@@@"), "protocol 2", None),
        (envelope(headers={"id": "job-1", "task": "t", "compression": "application/x-gzip"}), "compressed", "job-1"),
        (b'{"headers": {"id": 7, "task": "t"}, "properties": {}}', "not a string", None),
        (envelope(**{"content-type": "application/x-python-serialize"}), "refused", "job-1"),
        (envelope(body="@@@"), "not base64", "job-1"),
        (envelope(body=base64.b64encode(b"{nonsense").decode()), "not JSON", "job-1"),
        (envelope(body=base64.b64encode(b"[1,2]").decode()), r"\[args, kwargs, embed\]", "job-1"),
        (envelope(body=base64.b64encode(b"[1,2,3]").decode()), "not a list", "job-1"),
        (envelope(headers={"id": "job-1", "task": "t", "expires": "soon"}), "header", "job-1"),
        (envelope(headers={"id": "job-1", "task": "t", "sheaf_owner": 7}), "`sheaf_owner` is 7, not a string", "job-1"),
        (envelope(headers=HEADERS | {"sheaf": OWN | {"owner": ["a"]}}), "`sheaf` is .*not a string", "job-1"),
    ],
)
def test_a_message_that_cannot_be_read_is_refused_with_a_reason(raw: bytes, reason: str, job_id: str | None) -> None:
    with pytest.raises(BadMessage, match=reason) as caught:
        decode(raw)
    assert caught.value.job_id == job_id


def test_of_a_message_over_the_limit_only_the_id_is_read() -> None:
    raw = envelope(body="@@@")
    with pytest.raises(BadMessage, match="not base64"):
        decode(raw, len(raw))
    for oversized, job_id in ((raw, "job-1"), (b'{"body": "' + b"@" * len(raw) + b'"}', None)):
        with pytest.raises(BadMessage, match=r"broker\.max_message_bytes") as caught:
            decode(oversized, len(raw) - 1)
        assert caught.value.job_id == job_id
