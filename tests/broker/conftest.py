"""Broker clients over each kind of server, and the check that no key is left behind without a TTL."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import orjson
import pytest
import redis

from broker import Broker, Leased, NewJob, Priority
from broker.keys import PRIORITY_STEPS
from broker.message import BATCHES
from tests.conftest import PERMANENT_KEYS

QUEUE = "infer.echo"
MakeBroker = Callable[..., Broker]

PERMANENT = (*PERMANENT_KEYS, QUEUE, BATCHES)


def take(broker: Broker, n: int) -> Leased:
    """Lease up to `n` messages of each priority."""
    return broker.lease(QUEUE, [n] * len(PRIORITY_STEPS))


def new_job(value: object = "text", **changes: object) -> NewJob:
    fields: dict[str, object] = {
        "id": str(uuid.uuid4()),
        "model": "echo",
        "queue": QUEUE,
        "payload": orjson.dumps({"input": value}),
        "priority": Priority.NORMAL,
        "created_at": 1000.0,
        "metadata": b'{"order":7}',
    }
    return NewJob(**(fields | changes))  # type: ignore[arg-type]  # a test's shorthand


@pytest.fixture
def client(server_url: str) -> Iterator[redis.Redis]:
    """A plain client on the test's server; afterwards no key may be left that lives for ever without need."""
    with redis.Redis.from_url(server_url) as plain:
        yield plain
        keys = [key.decode() for key in plain.keys("*")]
        leaked = [key for key in keys if plain.ttl(key) == -1 and not key.startswith(PERMANENT)]
        assert not leaked, f"keys without a TTL: {leaked}"


@pytest.fixture
def make_broker(server_url: str, client: redis.Redis) -> Iterator[MakeBroker]:
    made: list[Broker] = []

    def make(session: str = "worker-a", *, lease_s: float = 30.0, max_attempts: int = 3) -> Broker:
        made.append(Broker(server_url, session, lease_s=lease_s, max_attempts=max_attempts))
        return made[-1]

    yield make
    for broker in made:
        broker.close()


@pytest.fixture
def broker(make_broker: MakeBroker) -> Broker:
    return make_broker()
