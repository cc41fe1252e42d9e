"""What operators ask a worker: what runs, what waits, what is delayed; and what its events tell of lost workers."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from celery import Celery

from tests.conftest import wait_until
from tests.workers.conftest import RunningWorker, StartWorker, held, wait_until_controllable

SLOW, ECHO = "infer.slow", "infer.echo"


class Worker:
    """The only worker, asked by its name, so that an answer need not wait for others."""

    def __init__(self, client: Celery) -> None:
        wait_until_controllable(client)
        [self.name] = client.control.inspect(timeout=1).ping() or {}
        self.inspect = client.control.inspect([self.name], timeout=10)

    def tells(self, what: str, *arguments: object) -> Any:
        return (getattr(self.inspect, what)(*arguments) or {})[self.name]


def test_active_reserved_and_query_task_tell_what_runs_and_what_waits(
    worker: RunningWorker, celery_client: Celery
) -> None:
    asked = Worker(celery_client)
    running = celery_client.send_task("sheaf.infer", args=[6], queue=SLOW)
    wait_until(lambda: asked.tells("active"), description="it runs")
    waiting = celery_client.send_task("sheaf.infer", args=["secret"], queue=ECHO)
    wait_until(lambda: asked.tells("reserved"), description="it is held")
    [active], [reserved] = asked.tells("active"), asked.tells("reserved")
    assert (active["id"], reserved["id"]) == (running.id, waiting.id)
    assert active["name"] == "sheaf.infer"
    assert isinstance(active["time_start"], float)
    assert active["worker_pid"] == worker.service.pid
    assert active["delivery_info"] == {"exchange": "", "routing_key": SLOW, "priority": 0}
    assert reserved["time_start"] is None
    queried = asked.tells("query_task", running.id, waiting.id, "unknown")
    assert {task_id: state for task_id, (state, _) in queried.items()} == {
        running.id: "active",
        waiting.id: "reserved",
    }


def test_commands_that_would_change_nothing_say_so(worker: RunningWorker, celery_client: Celery) -> None:
    asked = Worker(celery_client)
    answers: Any = celery_client.control.rate_limit(
        "sheaf.infer", "1/m", destination=[asked.name], reply=True, timeout=10
    )
    [answer] = answers
    assert answer == {asked.name: {"error": "not served by Sheaf: bound the batches in the model's settings"}}


def test_scheduled_tells_the_delayed_jobs_with_their_times(worker: RunningWorker, celery_client: Celery) -> None:
    asked = Worker(celery_client)
    eta = datetime(2100, 1, 1, 12, tzinfo=UTC)
    later = celery_client.send_task("sheaf.infer", args=[1], queue=ECHO, eta=eta.replace(year=2101))
    sooner = celery_client.send_task("sheaf.infer", args=[1], queue=ECHO, eta=eta, priority=3)
    wait_until(lambda: len(asked.tells("scheduled")) == 2, description="both are put aside")
    first, second = asked.tells("scheduled")
    assert first["eta"] == eta.isoformat()
    assert first["priority"] == 3
    assert [entry["request"]["id"] for entry in (first, second)] == [sooner.id, later.id]
    assert asked.tells("active") == asked.tells("reserved") == []
    assert held(worker.url, ECHO) == 0


def test_a_job_whose_worker_was_lost_is_shown_as_retried(
    start_worker: StartWorker, celery_client: Celery, valkey_url: str, events: list[dict[str, object]]
) -> None:
    # The lease is longer than a start takes: the other worker's events have to be heard by then.
    doomed = start_worker(valkey_url, lease_s=12.0)
    sent = celery_client.send_task("sheaf.infer", args=[0.5], queue=SLOW)
    wait_until(lambda: held(valkey_url, SLOW) == 1, description="it is held")
    doomed.service.kill()
    start_worker(valkey_url, lease_s=12.0)
    assert sent.get(timeout=40) == 0.5

    def kinds() -> list[object]:
        return [event["type"] for event in list(events) if event.get("uuid") == sent.id]

    expected = ["task-retried", "task-received", "task-started", "task-succeeded"]
    wait_until(lambda: kinds()[-4:] == expected, description=f"{expected}, got {kinds()}")
    [retried] = [event for event in events if event["type"] == "task-retried"]
    assert "worker_lost" in str(retried["exception"])
