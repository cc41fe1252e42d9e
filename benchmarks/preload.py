"""Fills a queue with messages of a plain Celery producer, as many at a time as one command takes."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import cast

import redis
from celery import Celery

_TOGETHER = 1000
_ID = "id-to-be-replaced"


def preload(client: redis.Redis, url: str, queue: str, count: int) -> None:
    """Put `count` messages on the queue, ids `job-0` and up. Only their ids differ."""
    template = _template(client, url, queue)
    _push(client, queue, (template.replace(_ID.encode(), b"job-%d" % number) for number in range(count)))


def preload_texts(client: redis.Redis, url: str, queue: str, texts: Sequence[str]) -> None:
    """One message a text, ids `job-0` and up."""
    template = _template(client, url, queue)

    def messages() -> Iterator[bytes]:
        for number, text in enumerate(texts):
            message = json.loads(template.replace(_ID.encode(), b"job-%d" % number))
            message["body"] = b64encode(json.dumps([[text], {}, {}]).encode()).decode()
            yield json.dumps(message).encode()

    _push(client, queue, messages())


def _template(client: redis.Redis, url: str, queue: str) -> bytes:
    with Celery(broker=url, backend=url, set_as_current=False) as app:
        app.send_task("sheaf.infer", args=["a text of some length"], queue=queue, task_id=_ID)
    return cast("bytes", client.lpop(queue))


def _push(client: redis.Redis, queue: str, messages: Iterator[bytes]) -> None:
    while some := list(islice(messages, _TOGETHER)):
        client.lpush(queue, *some)
