"""An S3 to talk to: moto's server in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import fsspec
import pytest

from tests.conftest import free_port, listens, wait_until


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
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


@pytest.fixture
def memory() -> Iterator[str]:
    """The URL of an empty folder in fsspec's memory."""
    yield "memory://rows"
    fsspec.filesystem("memory").store.clear()
