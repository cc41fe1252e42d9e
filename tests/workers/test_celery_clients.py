"""What a plain Celery client, without any Sheaf code, gets from a real worker process."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable
from typing import Any, cast

import pytest
from celery import group
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from tests.conftest import wait_until
from tests.services import metrics_page, sample
from tests.workers.conftest import Shop

ECHO = "infer.echo"
LETTERS = "sheaf:dead:infer.echo"


@pytest.fixture
def counted(shop: Shop) -> Callable[..., float]:
    """How far a metric of the worker has come since the test began."""
    before = metrics_page(shop.worker.metrics_port)

    def since(name: str, **labels: str) -> float:
        return shop.worker.metric(name, **labels) - sample(before, name, **labels)

    return since


@pytest.fixture
def no_letters(shop: Shop) -> None:
    """No message is dead when the test begins."""
    shop.client.delete(LETTERS)


def test_a_result_reaches_the_caller(shop: Shop) -> None:
    assert shop.app.send_task("sheaf.infer", args=[{"a": [1]}], queue=ECHO).get(timeout=10) == {"a": [1]}


def test_fifty_calls_at_once_are_served_in_batches(shop: Shop, counted: Callable[..., float]) -> None:
    sent = [shop.app.send_task("sheaf.infer", args=[i], queue=ECHO) for i in range(50)]
    assert [result.get(timeout=10) for result in sent] == list(range(50))
    wait_until(lambda: counted("sheaf_batch_size_sum", model="echo") == 50, description="fifty rows are counted")
    assert 50 / counted("sheaf_batch_size_count", model="echo") > 1


def test_many_rows_in_one_call_come_back_in_their_order(shop: Shop) -> None:
    rows = list(range(100))
    outcome = shop.app.send_task("sheaf.infer", kwargs={"inputs": rows}, queue=ECHO).get(timeout=10)
    assert outcome == [{"output": row} for row in rows]


def test_a_group_of_calls_is_served(shop: Shop) -> None:
    calls = [shop.app.signature("sheaf.infer", args=[row], queue=ECHO) for row in range(20)]
    assert group(calls, app=shop.app).apply_async().get(timeout=10) == list(range(20))


def test_a_bad_row_fails_alone_and_with_its_own_error(shop: Shop) -> None:
    sent = {
        row: shop.app.send_task("sheaf.infer", args=[row], queue="infer.picky") for row in (1, 2, -1, 3, "nonsense")
    }
    assert [sent[row].get(timeout=10) for row in (1, 2, 3)] == [1.0, 2.0, 3.0]
    with pytest.raises(ArithmeticError, match="minus one cannot be served"):
        sent[-1].get(timeout=10)
    with pytest.raises(ValueError, match="could not convert"):
        sent["nonsense"].get(timeout=10)


def test_a_bad_row_among_many_fails_alone(shop: Shop) -> None:
    outcome = shop.app.send_task("sheaf.infer", kwargs={"inputs": [1, -1]}, queue="infer.picky").get(timeout=10)
    assert outcome[0] == {"output": 1.0}
    assert outcome[1]["error"]["type"] == "ArithmeticError"


def test_a_wrong_number_of_outputs_fails_the_batch_and_shifts_nothing(shop: Shop) -> None:
    sent = shop.app.send_task("sheaf.infer", args=[13], queue="infer.picky")
    with pytest.raises(Exception, match="output"):
        sent.get(timeout=10)
    assert shop.app.send_task("sheaf.infer", args=[5], queue="infer.picky").get(timeout=10) == 5.0


@pytest.mark.parametrize("priority", [0, 3, 5, 9])
def test_every_priority_is_served(shop: Shop, priority: int) -> None:
    sent = shop.app.send_task("sheaf.infer", args=["x"], queue=ECHO, priority=priority)
    assert sent.get(timeout=10) == "x"


def test_an_ignored_result_is_not_stored(shop: Shop, counted: Callable[..., float]) -> None:
    ignored = shop.app.send_task("sheaf.infer", args=["ignored"], queue=ECHO, ignore_result=True)
    shop.app.send_task("sheaf.infer", args=["kept"], queue=ECHO).get(timeout=10)
    wait_until(lambda: counted("sheaf_jobs_total", model="echo", status="succeeded") == 2, description="both were run")
    assert not shop.client.exists(f"celery-task-meta-{ignored.id}")


def test_an_expired_call_is_not_run(shop: Shop, counted: Callable[..., float]) -> None:
    shop.app.send_task("sheaf.infer", args=[1.0], queue="infer.slow")
    expired = shop.app.send_task("sheaf.infer", args=[0], queue="infer.slow", expires=-1)
    with pytest.raises(TaskRevokedError):
        expired.get(timeout=10)
    wait_until(lambda: counted("sheaf_jobs_total", model="slow", status="expired") == 1, description="it is counted")


def test_a_call_with_countdown_runs_when_it_is_due(shop: Shop) -> None:
    begin = time.monotonic()
    sent = shop.app.send_task("sheaf.infer", args=["later"], queue=ECHO, countdown=1.5)
    assert sent.get(timeout=15) == "later"
    assert time.monotonic() - begin >= 1.5


def test_a_revoked_call_is_not_run(shop: Shop) -> None:
    running = shop.app.send_task("sheaf.infer", args=[1.5], queue="infer.slow")
    waiting = [shop.app.send_task("sheaf.infer", args=[0.1], queue="infer.slow") for _ in range(3)]
    shop.app.control.revoke(waiting[1].id)
    assert running.get(timeout=10) == 1.5
    with pytest.raises(TaskRevokedError):
        waiting[1].get(timeout=10)
    assert [waiting[i].get(timeout=10) for i in (0, 2)] == [0.1, 0.1]


@pytest.mark.usefixtures("no_letters")
@pytest.mark.parametrize(
    ("task", "args", "kwargs", "reason"),
    [
        ("sheaf.infer", [], {}, "takes one argument"),
        ("sheaf.infer", [1, 2], {}, "takes one argument"),
        ("sheaf.infer", [], {"text": 1}, "takes one argument"),
        ("sheaf.infer", [], {"inputs": []}, "at least one row"),
        ("another.task", [1], {}, "not 'another.task'"),
    ],
)
def test_a_call_that_cannot_be_served_fails_with_a_reason_and_is_kept(
    shop: Shop,
    task: str,
    args: list[object],
    kwargs: dict[str, object],
    reason: str,
) -> None:
    sent = shop.app.send_task(task, args=args, kwargs=kwargs, queue=ECHO)
    with pytest.raises(Exception, match=reason):
        sent.get(timeout=10)
    [letter] = shop.client.lrange(LETTERS, 0, -1)
    assert sent.id in str(letter)
    assert shop.app.send_task("sheaf.infer", args=["goes on"], queue=ECHO).get(timeout=10) == "goes on"


@pytest.mark.usefixtures("no_letters")
def test_a_message_that_is_no_message_goes_to_the_dead_letters(shop: Shop, counted: Callable[..., float]) -> None:
    shop.client.lpush(ECHO, b"\xff\x00 not JSON")
    wait_until(lambda: shop.client.llen(LETTERS) == 1, description="it is with the dead letters")
    assert shop.app.send_task("sheaf.infer", args=["goes on"], queue=ECHO).get(timeout=10) == "goes on"
    wait_until(lambda: counted("sheaf_buried_total", model="echo") == 1, description="it is counted")


def test_an_unknown_id_stays_pending_for_celery(shop: Shop) -> None:
    assert AsyncResult("no-such-id", app=shop.app).state == "PENDING"


@pytest.mark.parametrize(
    ("row", "kind", "text"),
    [
        ("exit in preprocess", "SystemExit", "3"),
        ("no Encoded", "TypeError", "must return Encoded or RowError"),
        ("exit in infer", "SystemExit", "3"),
        ("interrupt", "KeyboardInterrupt", ""),
        ("surrogate", "ValueError", r"\\ud800 in a file name"),
        ("no text", "NoText", "its text could not be made"),
        ("object", "TypeError", "cannot be written as JSON"),
        ("nan", "NotFinite", "nan"),
        ("array of nan", "NotFinite", "NaN or infinity"),
    ],
)
def test_whatever_a_handler_does_to_one_row_the_others_are_served(shop: Shop, row: str, kind: str, text: str) -> None:
    def call(rows: list[object]) -> AsyncResult[Any]:
        return shop.app.send_task("sheaf.infer", kwargs={"inputs": rows}, queue="infer.wild")

    good, bad = call(["a"]), call(["b", row])
    assert good.get(timeout=10) == [{"output": "a"}]
    first, second = bad.get(timeout=10)
    assert first == {"output": "b"}
    assert second["error"]["type"] == kind
    assert re.search(text, second["error"]["message"])
    assert call(["c"]).get(timeout=10) == [{"output": "c"}]


def test_a_job_that_is_nested_too_deeply_to_be_written_fails_alone(shop: Shop) -> None:
    deep: object = []
    for _ in range(251):
        deep = [deep]
    sent = [shop.call(n) for n in range(5)]
    bad = shop.app.send_task("sheaf.infer", kwargs={"inputs": [deep]}, queue=ECHO)
    sent += [shop.call(n) for n in range(5, 10)]
    assert [result.get(timeout=10) for result in sent] == list(range(10))
    with pytest.raises(TypeError, match="JSON"):
        bad.get(timeout=10)


def test_arrays_need_not_be_contiguous(shop: Shop) -> None:
    assert shop.app.send_task("sheaf.infer", args=["every other"], queue="infer.wild").get(timeout=10) == [0, 2, 4]


@pytest.mark.usefixtures("no_letters")
@pytest.mark.parametrize(
    "headers",
    [
        {"sheaf": {"enqueued_at": "x", "request_id": "r"}},
        {"sheaf": {"enqueued_at": 1e308, "request_id": None}},
        {"sheaf": []},
        {"eta": 1e308},
        {"expires": "the day after tomorrow"},
    ],
)
def test_a_message_with_an_odd_header_is_buried_alone(
    shop: Shop, counted: Callable[..., float], headers: dict[str, object]
) -> None:
    shop.app.send_task("sheaf.infer", args=["template"], queue="infer.parked")
    message = json.loads(cast("bytes", shop.client.lpop("infer.parked")))
    one, odd, two = (str(uuid.uuid4()) for _ in range(3))
    texts = []
    for job_id in (one, odd, two):
        message["headers"] |= {"id": job_id} | (headers if job_id == odd else {"eta": None, "expires": None})
        texts.append(json.dumps(message))
        message["headers"].pop("sheaf", None)
    shop.client.lpush(ECHO, *texts)
    assert AsyncResult(one, app=shop.app).get(timeout=10) == "template"
    assert AsyncResult(two, app=shop.app).get(timeout=10) == "template"
    with pytest.raises(Exception, match="header"):
        AsyncResult(odd, app=shop.app).get(timeout=10)
    assert shop.client.llen(LETTERS) == 1
    wait_until(lambda: counted("sheaf_jobs_total", model="echo", status="failed") == 1, description="it is counted")
    assert f'"job_id":"{odd}"' in shop.worker.service.log()


def test_one_model_that_is_busy_does_not_hold_up_another(shop: Shop) -> None:
    rows = shop.app.send_task("sheaf.infer", kwargs={"inputs": [0.2] * 40}, queue="infer.slow")
    begin = time.monotonic()
    assert shop.app.send_task("sheaf.infer", args=["x"], queue=ECHO).get(timeout=10) == "x"
    assert not rows.ready(), f"it waited for all ten batches: {time.monotonic() - begin:.1f} s"
    assert len(rows.get(timeout=10)) == 40
