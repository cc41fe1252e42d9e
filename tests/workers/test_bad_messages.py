"""Messages that other producers write wrongly: each is told and kept, and those behind it are served."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from celery.result import AsyncResult

from broker.dead import DeadLetter
from broker.embedded import EmbeddedServer
from tests.conftest import free_port, wait_until
from tests.services import run_sheaf
from tests.workers.conftest import Shop, celery_app, starting_workers

DEAD = "sheaf:dead:infer.echo"
MIB = 1 << 20


@pytest.fixture
def letters(shop: Shop) -> Callable[[int], list[dict[str, object]]]:
    """Waits for so many new dead letters, and returns them, the newest first."""
    before = shop.client.llen(DEAD)

    def new(count: int) -> list[dict[str, object]]:
        wait_until(lambda: shop.client.llen(DEAD) - before == count, description=f"{count} more dead letters")
        return [json.loads(raw) for raw in shop.client.lrange(DEAD, 0, count - 1)]

    return new


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"task_protocol": 1}, "protocol 1"),
        ({"task_serializer": "pickle"}, "application/x-python-serialize"),
        ({"task_serializer": "yaml"}, "application/x-yaml"),
        ({"task_compression": "gzip"}, "compress"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_producer_with_other_settings_is_told_so_at_its_call(
    shop: Shop, letters: Callable[[int], list[dict[str, object]]], settings: dict[str, object], reason: str
) -> None:
    with celery_app(shop.url, **settings) as producer:
        refused = producer.send_task("sheaf.infer", args=["x"], queue="infer.echo")
        with pytest.raises(Exception, match=reason) as caught:
            refused.get(timeout=10)
    assert type(caught.value).__name__ == "BadMessage"
    [letter] = letters(1)
    assert letter["job_id"] == refused.id
    assert reason in str(letter["reason"])
    assert shop.call("goes on").get(timeout=10) == "goes on"


def test_garbage_between_good_messages_is_buried_alone(
    shop: Shop, letters: Callable[[int], list[dict[str, object]]]
) -> None:
    """All in one list and one lease, so that a bad one could take its neighbours along."""
    shop.app.send_task("sheaf.infer", args=["template"], queue="infer.parked")
    good: dict[str, Any] = json.loads(shop.client.lpop("infer.parked") or b"")  # type: ignore[arg-type]  # one, no list

    def named(job_id: str, **changes: object) -> dict[str, object]:
        return good | {"headers": good["headers"] | {"id": job_id}} | changes

    bad: dict[str, object] = {
        "not base64": named("bad-0", body="@@@"),
        "the body is not JSON": named("bad-1", body="YWJj"),
        "[args, kwargs, embed]": named("bad-2", body="WzFd"),
        "no properties": named("bad-3", properties=None),
        "headers `id` and `task`": {"body": good["body"], "properties": good["properties"]},
        "no body": named("bad-5", body={"a": 1}),
    }
    messages: list[object] = []
    for number, message in enumerate(bad.values()):
        messages += [named(f"good-{number}"), message]
    shop.client.lpush("infer.echo", *(json.dumps(message) for message in messages), b"\x80\x04pickle", b"")
    buried = [str(letter["reason"]) for letter in letters(len(bad) + 2)]
    for reason in bad:
        assert any(reason in text for text in buried), f"{reason} is not in {buried}"
    for number in range(len(bad)):
        assert AsyncResult(f"good-{number}", app=shop.app).get(timeout=10) == "template"


@contextmanager
def cautious_shop(folder: Path, max_message_bytes: int) -> Iterator[tuple[Celery, redis.Redis, str]]:
    """A server of the test's own whose worker reads messages up to a size."""
    with (
        EmbeddedServer(free_port(), folder / "valkey") as server,
        starting_workers(folder) as start,
        celery_app(server.url) as app,
        redis.Redis.from_url(server.url) as client,
    ):
        start(server.url, broker={"max_message_bytes": max_message_bytes})
        yield app, client, server.url


def test_a_message_of_fifty_megabytes_is_buried_and_its_letter_can_be_handled(tmp_path: Path) -> None:
    with cautious_shop(tmp_path, 32 * MIB) as (app, client, url):
        huge = app.send_task("sheaf.infer", args=["x" * (50_000_000 * 3 // 4)], queue="infer.echo")
        behind = app.send_task("sheaf.infer", args=["behind it"], queue="infer.echo")
        with pytest.raises(Exception, match=r"33554432 are read at most \(broker.max_message_bytes\)"):
            huge.get(timeout=20)
        assert behind.get(timeout=10) == "behind it"

        def dead(*arguments: str) -> str:
            done = run_sheaf("dead", *arguments, folder=tmp_path, SHEAF_BROKER__URL=url)
            assert done.returncode == 0, done.stderr
            return done.stdout

        assert "broker.max_message_bytes" in dead("list", "echo").splitlines()[0]
        shown = dead("show", "echo", huge.id)
        assert "broker.max_message_bytes" in shown
        assert len(shown) < 20_000, "a terminal is no place for fifty megabytes"
        letter = client.lindex(DEAD, 0)
        assert isinstance(letter, bytes)
        assert len(DeadLetter.decode(letter).message) > 50_000_000, "it can be retried once the limit is raised"


def test_a_message_as_large_as_allowed_is_served_and_an_oversized_one_without_id_is_buried(tmp_path: Path) -> None:
    with cautious_shop(tmp_path, 2 * MIB) as (app, client, _):
        text = "x" * (MIB * 5 // 4)
        assert app.send_task("sheaf.infer", args=[text], queue="infer.echo").get(timeout=10) == text
        client.lpush("infer.echo", b"\xff" * (2 * MIB + 1))
        wait_until(lambda: client.llen(DEAD) == 1, description="it is with the dead letters")
        letter = json.loads(client.lindex(DEAD, 0) or b"")
        assert letter["job_id"] is None
        assert "not JSON" in letter["reason"]
