"""An installation behind `broker.key_prefix`, and clients that have set kombu's `global_keyprefix` to the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from celery.exceptions import TaskRevokedError

from broker.embedded import EmbeddedServer
from tests.conftest import free_port, wait_until
from tests.workers.conftest import MODELS, Shop, celery_app, collected_events, starting_workers, wait_until_controllable

#: Without a separator at its end, which Celery's result backend then adds for itself.
PREFIX = "shop"


@pytest.fixture(scope="module")
def prefixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    folder = tmp_path_factory.mktemp("prefixed")
    options = {"global_keyprefix": PREFIX}
    with (
        EmbeddedServer(free_port(), folder / "valkey") as server,
        starting_workers(folder) as start,
        celery_app(server.url, broker_transport_options=options, result_backend_transport_options=options) as app,
        redis.Redis.from_url(server.url) as client,
    ):
        models = {"minilm": None, "echo": MODELS["echo"], "slow": MODELS["slow"]}
        worker = start(server.url, models=models, broker={"key_prefix": PREFIX})
        wait_until_controllable(app)
        yield Shop(server.url, worker, app, client)


def test_calls_are_served_at_once_and_at_their_time(prefixed: Shop) -> None:
    now, later = prefixed.call("now", priority=9), prefixed.call("later", countdown=0.5)
    assert now.get(timeout=10) == "now"
    assert later.get(timeout=10) == "later"
    with pytest.raises(Exception, match="takes one argument"):
        prefixed.app.send_task("sheaf.infer", queue="infer.echo").get(timeout=10)


def test_a_call_can_be_revoked(prefixed: Shop) -> None:
    running = [prefixed.call(0.7, model="slow") for _ in range(4)]
    waiting = prefixed.call(0, model="slow")
    prefixed.app.control.revoke(waiting.id)
    with pytest.raises(TaskRevokedError):
        waiting.get(timeout=10)
    assert [result.get(timeout=10) for result in running] == [0.7] * 4


def test_the_worker_is_inspected_and_its_events_are_heard(prefixed: Shop) -> None:
    [tasks] = (prefixed.app.control.inspect(timeout=1).registered() or {}).values()
    assert "sheaf.infer" in tasks
    with collected_events(prefixed.app) as events:
        wait_until(lambda: events, description="events are received")
        sent = prefixed.call("seen")
        wait_until(
            lambda: (
                [event["type"] for event in list(events) if event.get("uuid") == sent.id]
                == ["task-received", "task-started", "task-succeeded"]
            ),
            description="the call is seen as a task",
        )


def test_a_client_without_the_prefix_reaches_nobody(prefixed: Shop) -> None:
    with celery_app(prefixed.url) as stranger:
        assert stranger.control.inspect(timeout=0.5).ping() is None
        unheard = stranger.send_task("sheaf.infer", args=["x"], queue="infer.echo")
        assert prefixed.call("x").get(timeout=10) == "x"
        assert unheard.state == "PENDING"
    assert prefixed.client.llen("infer.echo") == 1
    prefixed.client.delete(*keys_without_prefix(prefixed))


def test_no_key_lacks_the_prefix(prefixed: Shop) -> None:
    later = prefixed.call("later", countdown=60)
    prefixed.app.control.revoke(later.id)
    prefixed.app.control.inspect(timeout=0.5).stats()
    assert prefixed.call("x", priority=9).get(timeout=10) == "x"
    with pytest.raises(Exception, match="takes one argument"):
        prefixed.app.send_task("sheaf.infer", queue="infer.echo").get(timeout=10)
    delayed = f"{PREFIX}sheaf:delayed:infer.echo"
    wait_until(lambda: prefixed.client.zcard(delayed) == 1, description="the delayed call is put aside")
    assert keys_without_prefix(prefixed) == []


def keys_without_prefix(prefixed: Shop) -> list[bytes]:
    keys = prefixed.client.keys("*")
    return [key for key in keys if isinstance(key, bytes) and not key.startswith(PREFIX.encode())]
