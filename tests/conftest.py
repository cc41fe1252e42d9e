"""Real servers for the tests: the embedded Valkey and Debian's redis-server, each on a port of its own."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import redis

from broker.embedded import EmbeddedServer

#: How keys of ours begin that live until their work is done (leases, delayed and dead messages), or of which
#: there is one per queue or installation (counters, the list of workers).
PERMANENT_KEYS = (
    "sheaf:returned:",
    "sheaf:holders:",
    "sheaf:held:",
    "sheaf:lease-sequence:",
    "sheaf:delayed",
    "sheaf:dead:",
    "sheaf:workers",
    "sheaf:served:",
    "sheaf:keys",
    "sheaf:webhook-secrets:",
    "sheaf:file:",
    "sheaf:files:",
    "sheaf:expiring-files",
    "sheaf:file-bytes",
)


def wait_until(predicate: Callable[[], object], *, description: str, timeout_s: float = 15.0) -> None:
    """Poll until `predicate` holds; fail the test with `description` when it does not within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {timeout_s} s in vain: {description}")
        time.sleep(0.01)


def free_port() -> int:
    """A TCP port on loopback that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def listens(port: int) -> bool:
    """Whether anything accepts connections on this port of loopback."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def program(name: str) -> str:
    """The path of a program that a test needs. Without it the test fails in CI, and is skipped elsewhere."""
    found = shutil.which(name)
    if found is None:
        lacking(name)
    return found


def lacking(name: str) -> NoReturn:
    """Something that a test needs is not there: the test fails in CI, and is skipped elsewhere."""
    if os.environ.get("CI"):
        pytest.fail(f"{name} is missing: `make test` installs it on Debian as root")
    pytest.skip(f"{name} is not installed")


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(free_port(), tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    binary = program("redis-server")
    with EmbeddedServer(free_port(), tmp_path_factory.mktemp("redis"), binary=binary) as server:
        yield server


@pytest.fixture
def valkey_url(valkey_server: EmbeddedServer) -> str:
    """URL of an empty embedded Valkey."""
    return _emptied(valkey_server)


@pytest.fixture(params=["valkey", "redis"])
def server_url(request: pytest.FixtureRequest) -> str:
    """URL of an empty server; the test runs over each kind."""
    server: EmbeddedServer = request.getfixturevalue(f"{request.param}_server")
    return _emptied(server)


@pytest.fixture
def new_valkey(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server of the test's own, which it may kill and start again."""
    with EmbeddedServer(free_port(), tmp_path / "valkey") as server:
        yield server


def _emptied(server: EmbeddedServer) -> str:
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    return server.url
