"""The proxy that other tests break connections with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from broker.embedded import EmbeddedServer
from tests.proxy import Proxy

TIMEOUT_S = 0.3


@pytest.fixture
def proxy(valkey_server: EmbeddedServer) -> Iterator[Proxy]:
    with Proxy(valkey_server.port) as proxy:
        yield proxy


@pytest.fixture
def through(proxy: Proxy) -> Iterator[redis.Redis]:
    """A client whose one connection goes through the proxy and is never made again by itself."""
    with redis.Redis(
        port=proxy.port, socket_timeout=TIMEOUT_S, retry=Retry(NoBackoff(), 0), single_connection_client=True
    ) as client:
        assert client.ping()
        yield client


def test_what_is_sent_through_it_arrives_whole(through: redis.Redis) -> None:
    through.set("large", b"x" * 1_000_000, ex=60)
    assert through.get("large") == b"x" * 1_000_000


def test_a_reset_ends_every_connection_and_lets_new_ones_in(proxy: Proxy, through: redis.Redis) -> None:
    assert proxy.reset() == 1
    with pytest.raises(redis.ConnectionError):
        through.ping()
    assert through.ping()


def test_a_frozen_connection_is_silent_until_it_is_thawed(proxy: Proxy, through: redis.Redis) -> None:
    proxy.freeze()
    with pytest.raises(redis.TimeoutError):
        through.ping()
    proxy.thaw()
    assert through.ping()


def test_an_abandoned_connection_stays_silent_beside_new_ones(proxy: Proxy, through: redis.Redis) -> None:
    assert proxy.abandon() == 1
    with redis.Redis(port=proxy.port, socket_timeout=TIMEOUT_S) as other:
        assert other.ping()
    with pytest.raises(redis.TimeoutError):
        through.ping()
