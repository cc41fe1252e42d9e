"""What calls of all sorts leave on the server."""

from __future__ import annotations

from tests.conftest import PERMANENT_KEYS, wait_until
from tests.workers.conftest import Shop

#: Ours, the queues, and kombu's table of queues.
PERMANENT = (*PERMANENT_KEYS, "infer.", "_kombu.binding")


def test_no_key_is_left_that_lives_for_ever_without_need(shop: Shop) -> None:
    shop.app.control.inspect(timeout=0.5).active()
    shop.app.control.revoke("no-such-id")
    ended = [
        shop.call("served", priority=6),
        shop.call("later", countdown=0.3),
        shop.call(-1, model="picky"),
        shop.call("expired", expires=-1),
        shop.app.send_task("another.task", queue="infer.echo"),
        shop.app.send_task("sheaf.infer", kwargs={"inputs": ["a", "b"]}, queue="infer.echo"),
    ]
    shop.call("ignored", ignore_result=True)
    shop.call("much later", countdown=600)
    shop.client.lpush("infer.echo", b"garbage")
    for result in ended:
        result.get(timeout=10, propagate=False)
    wait_until(lambda: not shop.client.keys("sheaf:held:*"), description="nothing is held any more")
    keys = [key.decode() for key in shop.client.keys("*") if isinstance(key, bytes)]
    assert {key for key in keys if shop.client.ttl(key) == -1 and not key.startswith(PERMANENT)} == set()
    assert not [key for key in keys if key.startswith(("infer.", "sheaf:returned:"))], "a queue is not empty"


def test_results_are_kept_as_long_as_the_settings_say(shop: Shop) -> None:
    sent = shop.call("x")
    sent.get(timeout=10)
    assert 86_000 < shop.client.ttl(f"celery-task-meta-{sent.id}") <= 86_400
