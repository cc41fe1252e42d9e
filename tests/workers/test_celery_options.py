"""Options that any Celery call takes, on calls that a real worker serves."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import group
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult, GroupResult

from tests.conftest import wait_until
from tests.workers.conftest import Shop, celery_app

#: Seconds after its time within which a delayed call must have begun.
LATE_S = 1.0


def values(results: Sequence[AsyncResult[Any]]) -> list[Any]:
    return [result.get(timeout=15) for result in results]


def job_lines(shop: Shop, job_id: str) -> list[dict[str, Any]]:
    """What the worker's log says of the end of this job."""
    lines = [json.loads(line) for line in shop.worker.service.log().splitlines()]
    return [line for line in lines if line.get("job_id") == job_id and line["message"] == "Job done."]


def test_a_failure_brings_its_type_message_and_traceback_to_the_caller(shop: Shop) -> None:
    failed = shop.call(-1, model="picky")
    with pytest.raises(ArithmeticError, match=r"^minus one cannot be served$") as caught:
        failed.get(timeout=10)
    assert caught.value.args == ("minus one cannot be served",)
    assert (failed.state, failed.failed()) == ("FAILURE", True)
    assert "raise ArithmeticError" in str(failed.traceback)


def test_an_error_that_no_serializer_takes_is_told_all_the_same(shop: Shop) -> None:
    with pytest.raises(Exception, match=r"^it holds a lock$") as caught:
        shop.call("unpicklable", model="wild").get(timeout=10)
    assert type(caught.value).__name__ == "Unpicklable"
    assert shop.call("goes on", model="wild").get(timeout=10) == "goes on"


def test_one_output_too_few_fails_every_row_of_its_batch(shop: Shop) -> None:
    """Nobody can tell whose output is missing: a shifted result would be worse than none."""
    outcome = shop.app.send_task("sheaf.infer", kwargs={"inputs": [1, 13, 2]}, queue="infer.picky").get(timeout=10)
    assert [row["error"]["type"] for row in outcome] == ["WrongOutputCount"] * 3
    assert "2 outputs for 3 rows" in outcome[0]["error"]["message"]


def test_of_a_call_whose_result_is_ignored_nothing_is_stored_however_it_ends(shop: Shop) -> None:
    ignored = [
        shop.call("served", ignore_result=True),
        shop.call(-1, model="picky", ignore_result=True),
        shop.call("expired", ignore_result=True, expires=-1),
    ]
    for result in ignored:
        wait_until(lambda result=result: job_lines(shop, result.id), description="it has ended")  # type: ignore[misc]  # bound now
        assert shop.stored(result.id) == {}


def test_a_call_that_has_not_begun_when_it_expires_is_revoked(shop: Shop) -> None:
    # As many as a batch holds, so that nothing else begins with them.
    blockers = [shop.call(0.8, model="slow") for _ in range(4)]
    now = datetime.now(UTC)
    late = [
        shop.call(0, model="slow", expires=0.3),
        shop.call(0, model="slow", expires=now + timedelta(seconds=0.3)),
        shop.call(0, model="slow", expires=(now + timedelta(seconds=0.3)).astimezone(ZoneInfo("Asia/Tokyo"))),
        shop.call(0, model="slow", expires=now - timedelta(hours=1)),
    ]
    early = [
        shop.call(0, model="slow", expires=60),
        shop.call(0, model="slow", expires=now.astimezone(ZoneInfo("America/New_York")) + timedelta(minutes=1)),
    ]
    assert values([*blockers, *early]) == [0.8] * 4 + [0, 0]
    for result in late:
        with pytest.raises(TaskRevokedError, match="expired"):
            result.get(timeout=10)
        assert str(result.state) == "REVOKED"


def test_delayed_calls_begin_at_their_time_whatever_zone_it_is_told_in(shop: Shop) -> None:
    now = datetime.now(UTC)
    times = {
        name: now + timedelta(seconds=1 + index / 10) for index, name in enumerate(("utc", "zone", "naive", "old"))
    }
    sent = {
        "utc": shop.call(1, eta=times["utc"]),
        "zone": shop.call(1, eta=times["zone"].astimezone(ZoneInfo("Australia/Adelaide"))),
        # Celery sends it as it is, and a worker reads it in its own zone: UTC.
        "naive": shop.call(1, eta=times["naive"].replace(tzinfo=None)),
        "countdown": shop.call(1, countdown=1.5),
    }
    times["countdown"] = times["abroad"] = now + timedelta(seconds=1.5)
    with celery_app(shop.url, timezone="America/New_York") as abroad:
        sent["abroad"] = abroad.send_task("sheaf.infer", args=[1], queue="infer.echo", countdown=1.5, expires=60)
    sent["old"] = send_with_headers(shop, "an-old-client", eta=times["old"].replace(tzinfo=None).isoformat())
    assert values(list(sent.values())) == [1] * len(sent)
    for name, result in sent.items():
        late = shop.stored(result.id)["sheaf"]["started_at"] - times[name].timestamp()
        assert 0 <= late < LATE_S, f"{name} began {late:.3f} s after its time"


def send_with_headers(shop: Shop, job_id: str, **headers: object) -> AsyncResult[Any]:
    """Send a message whose headers are not what this Celery would have written."""
    shop.app.send_task("sheaf.infer", args=[1], queue="infer.parked")
    message: dict[str, Any] = json.loads(shop.client.lpop("infer.parked") or b"")  # type: ignore[arg-type]  # one, no list
    message["headers"] |= {"id": job_id} | headers
    shop.client.lpush("infer.echo", json.dumps(message))
    return AsyncResult(job_id, app=shop.app)


def test_each_of_ten_priorities_is_served_from_the_list_that_kombu_gives_it(shop: Shop) -> None:
    sent = [shop.call(priority, priority=priority) for priority in range(10)]
    assert values(sent) == list(range(10))
    lists = [shop.stored(result.id)["sheaf"]["priority"] for result in sent]
    assert lists == [0, 0, 0, 3, 3, 3, 6, 6, 6, 9]


def test_of_a_backlog_higher_priorities_begin_before_lower_ones(shop: Shop) -> None:
    # A batch on the device and two batches ahead of it: what comes now waits in the lists.
    blockers = [shop.call(0.3, model="slow") for _ in range(12)]
    steps = {9: (9,) * 12, 6: (6, 7, 8) * 4, 3: (3, 4, 5) * 4, 0: (0, 1, 2) * 4}
    sent = {
        step: [shop.call(0.01, model="slow", priority=priority) for priority in priorities]
        for step, priorities in steps.items()
    }
    values(blockers)
    begun = {}
    for step, results in sent.items():
        assert values(results) == [0.01] * 12
        begun[step] = statistics.median(shop.stored(result.id)["sheaf"]["started_at"] for result in results)
    assert begun[0] < begun[3] < begun[6] < begun[9]


@pytest.mark.parametrize(
    "headers",
    [
        {"delivery_tag": "mine", "correlation_id": 7},
        {"nested": {"a": [1, {"b": None}]}, "a name with spaces": "größe", "": ""},
        {"retries": 3, "timelimit": [1, 2], "stamps": {"order": ["7"]}, "stamped_headers": ["order"]},
    ],
    ids=["kombu's own names", "nested", "Celery's own names"],
)
def test_headers_of_the_callers_own_change_nothing(shop: Shop, headers: dict[str, Any]) -> None:
    signature = shop.app.signature("sheaf.infer", args=["x"], queue="infer.echo")
    assert signature.apply_async(headers=headers).get(timeout=10) == "x"


@pytest.mark.parametrize(
    "task_id",
    ["a/b/../c", "two words\tand a tab", "größe-ключ-鍵-🌾", "x" * 255, "*?[a]{b}:%s\\0", "line\nbreak", "0"],
    ids=["slashes", "spaces", "unicode", "long", "patterns", "lines", "digit"],
)
def test_a_caller_may_choose_any_text_as_id(shop: Shop, task_id: str) -> None:
    sent = shop.call("x", task_id=task_id)
    assert sent.id == task_id
    assert sent.get(timeout=10) == "x"
    assert shop.stored(task_id)["task_id"] == task_id


@pytest.mark.parametrize("moment", ["at once", "while it runs", "afterwards"])
def test_a_call_that_is_sent_twice_runs_once_and_answers_both(shop: Shop, moment: str) -> None:
    def rows_run() -> float:
        return shop.worker.metric("sheaf_batch_size_sum", model="slow")

    task_id, before = f"twice {moment}", rows_run()
    first = shop.call(0.3, model="slow", task_id=task_id)
    if moment == "while it runs":
        wait_until(lambda: shop.client.keys("sheaf:held:infer.slow:*"), description="it is leased")
    elif moment == "afterwards":
        first.get(timeout=10)
    second = shop.call(0.3, model="slow", task_id=task_id)
    assert values([first, second]) == [0.3, 0.3]
    assert shop.call(0, model="slow").get(timeout=10) == 0
    wait_until(lambda: not shop.client.keys("sheaf:held:infer.slow:*"), description="no message is left")
    wait_until(lambda: rows_run() >= before + 2, description="the last call's batch is counted")
    assert rows_run() == before + 2
    assert len(job_lines(shop, task_id)) == 1


def test_a_result_can_be_read_again_from_its_id_alone_until_it_is_forgotten(shop: Shop) -> None:
    sent = shop.call({"a": [1.5, None]})
    sent.get(timeout=10)
    again: AsyncResult[Any] = AsyncResult(sent.id, app=shop.app)
    begin = time.monotonic()
    assert again.get(timeout=10) == {"a": [1.5, None]}
    assert (again.state, again.successful(), again.children) == ("SUCCESS", True, [])
    assert time.monotonic() - begin < 5
    again.forget()
    assert shop.stored(sent.id) == {}
    assert AsyncResult(sent.id, app=shop.app).state == "PENDING"


# Celery's backend saves groups with a command that redis-py has deprecated.
@pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")
def test_a_saved_group_of_twenty_comes_back_in_order(shop: Shop) -> None:
    calls = [shop.app.signature("sheaf.infer", args=[row], queue="infer.echo", priority=row % 10) for row in range(20)]
    sent = group(calls, app=shop.app).apply_async()
    sent.save()  # type: ignore[attr-defined]  # the stubs take a group's result for a call's
    found = GroupResult.restore(sent.id, app=shop.app)
    assert isinstance(found, GroupResult)
    assert found.get(timeout=10) == list(range(20))
    assert (found.completed_count(), found.successful()) == (20, True)
