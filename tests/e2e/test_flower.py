"""Flower where others can reach it: it asks who comes, and shows only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from broker.embedded import EmbeddedServer
from tests.conftest import free_port, wait_until
from tests.services import Service, answers


@pytest.fixture(scope="module")
def flower(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Service]]:
    folder: Path = tmp_path_factory.mktemp("flower")
    port = free_port()
    with EmbeddedServer(free_port(), folder / "valkey") as broker:
        config = {"broker": {"url": broker.url}, "flower": {"port": port, "host": "127.0.0.1"}}
        with Service("flower", config=config, folder=folder, environment={"SHEAF_ENV": "prod"}) as service:
            base = f"http://127.0.0.1:{port}"
            wait_until(lambda: answers(f"{base}/healthcheck"), description=f"{service.log_path}", timeout_s=60)
            yield base, service


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
