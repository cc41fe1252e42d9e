"""Real servers for the tests: the embedded Valkey, Debian's redis-server and an S3, each on a port of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import fsspec
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


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """An S3 to talk to: moto's server in a process of its own."""
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: listens(port), description="the S3 server listens")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def s3(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty bucket, and the environment in which anyone can reach it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    files = fsspec.filesystem("s3")
    if files.exists("rows"):
        files.rm("rows", recursive=True)
    files.mkdir("rows")
    return "s3://rows"


def _emptied(server: EmbeddedServer) -> str:
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    return server.url
