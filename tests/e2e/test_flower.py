"""Flower where others can reach it: it asks who comes, and shows only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from broker.embedded import EmbeddedServer
from tests.conftest import free_port, wait_until
from tests.services import Service, answers


@contextmanager
def running(folder: Path, environment: str) -> Iterator[tuple[str, Service]]:
    port = free_port()
    with EmbeddedServer(free_port(), folder / "valkey") as broker:
        config = {"broker": {"url": broker.url}, "flower": {"port": port, "host": "127.0.0.1"}}
        with Service("flower", config=config, folder=folder, environment={"SHEAF_ENV": environment}) as service:
            base = f"http://127.0.0.1:{port}"
            wait_until(lambda: answers(f"{base}/healthcheck"), description=f"{service.log_path}", timeout_s=60)
            yield base, service


@pytest.fixture(scope="module")
def flower(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Service]]:
    with running(tmp_path_factory.mktemp("flower"), "prod") as made:
        yield made


@pytest.fixture(scope="module")
def open_flower(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One without a password."""
    with running(tmp_path_factory.mktemp("open"), "dev") as (base, _):
        yield base


PAGES = ["/", "/workers", "/tasks", "/broker", "/api/workers", "/api/tasks", "/metrics", "/static/css/flower.css"]


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.nip.io:5555"])
def test_without_a_password_it_answers_to_no_name_that_a_web_page_may_have(open_flower: str, host: str) -> None:
    with httpx.Client(base_url=open_flower, timeout=20, headers={"host": host}) as client:
        for page in PAGES:
            answer = client.get(page)
            assert (answer.status_code, "flower.basic_auth" in answer.text) == (421, True), page


@pytest.mark.parametrize("host", ["127.0.0.1:5555", "localhost:5555", "[::1]"])
def test_without_a_password_it_lets_no_other_servers_page_read_it(open_flower: str, host: str) -> None:
    foreign = {"host": host, "origin": "http://evil.example"}
    with httpx.Client(base_url=open_flower, timeout=20, headers=foreign) as client:
        for answer in [*map(client.get, PAGES), client.options("/api/tasks"), client.get("/nothing")]:
            assert answer.status_code in ((200, 204) if answer.url.path != "/nothing" else (404,)), answer.url
            assert not [name for name in answer.headers if name.startswith("access-control-")], answer.url


@pytest.mark.parametrize("page", ["/", "/workers", "/tasks", "/broker", "/api/workers", "/api/tasks", "/metrics"])
def test_beyond_dev_every_page_asks_for_the_password_that_was_printed(flower: tuple[str, Service], page: str) -> None:
    base, service = flower
    found = re.search(r"user:password (\S+?):(\S+),", service.log())
    assert found is not None
    with httpx.Client(base_url=base, timeout=20) as client:
        assert client.get(page).status_code == 401
        assert client.get(page, auth=(found[1], "another")).status_code == 401
        assert client.get(page, auth=(found[1], found[2])).status_code == 200


def test_it_changes_nothing_also_for_those_who_have_the_password(flower: tuple[str, Service]) -> None:
    base, service = flower
    found = re.search(r"user:password (\S+?):(\S+),", service.log())
    assert found is not None
    with httpx.Client(base_url=base, timeout=20, auth=(found[1], found[2])) as client:
        for action in ("task/revoke/some-id", "task/send-task/sheaf.infer", "worker/shutdown/some-worker"):
            assert client.post(f"/api/{action}", json={"args": []}).status_code == 403, action
