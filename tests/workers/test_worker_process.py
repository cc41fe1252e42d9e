"""The worker as a process: it answers while it computes, stops in order, and loses nothing."""

from __future__ import annotations

import json
import signal
import time

import pytest
import redis
from celery import Celery

from broker.embedded import EmbeddedServer
from configs import load_settings
from tests.conftest import wait_until
from tests.workers.conftest import RunningWorker, StartWorker, celery_app, held, of_task, wait_until_controllable
from workers.app import make_app

ECHO = "infer.echo"


def test_control_commands_are_answered_at_once_while_a_batch_runs(worker: RunningWorker, celery_client: Celery) -> None:
    wait_until_controllable(celery_client)
    running = celery_client.send_task("sheaf.infer", args=[10], queue="infer.slow")
    wait_until(lambda: held(worker.url, "infer.slow") == 1, description="the batch has begun")
    for _ in range(3):
        begin = time.monotonic()
        assert celery_client.control.inspect(timeout=0.9).ping()
        assert time.monotonic() - begin < 1.5
    stats = celery_client.control.inspect(timeout=2).stats()
    assert stats
    assert running.state == "PENDING"


def test_registered_tasks_name_ours(worker: RunningWorker, celery_client: Celery) -> None:
    wait_until_controllable(celery_client)
    answered = celery_client.control.inspect(timeout=2).registered() or {}
    [tasks] = answered.values()
    assert "sheaf.infer" in tasks


def test_applications_of_one_process_have_their_own_tasks() -> None:
    apps = [make_app(load_settings(None, {}).settings) for _ in range(2)]
    others = Celery(set_as_current=False)
    for app in (*apps, others):
        app.finalize()
    assert apps[0].tasks["sheaf.infer"] is not apps[1].tasks["sheaf.infer"]
    assert "sheaf.infer" not in others.tasks


def test_each_job_is_seen_as_a_task_in_events(
    worker: RunningWorker, celery_client: Celery, events: list[dict[str, object]]
) -> None:
    wait_until(
        lambda: any(event["type"] == "worker-heartbeat" for event in list(events)), description="events are received"
    )
    good = celery_client.send_task("sheaf.infer", args=["x"], queue=ECHO)
    bad = celery_client.send_task("sheaf.infer", args=[-1], queue="infer.picky")
    gone = celery_client.send_task("sheaf.infer", args=["x"], queue=ECHO, expires=-1)
    expected = {
        good.id: ["task-received", "task-started", "task-succeeded"],
        bad.id: ["task-received", "task-started", "task-failed"],
        gone.id: ["task-received", "task-revoked"],
    }
    for task_id, kinds in expected.items():
        wait_until(
            lambda task_id=task_id, kinds=kinds: of_task(events, task_id) == kinds,  # type: ignore[misc]  # bound now
            description=f"{kinds}, but got {of_task(events, task_id)}",
        )
    succeeded = next(event for event in events if event["type"] == "task-succeeded")
    assert str(succeeded["hostname"]).startswith("sheaf-cpu0@")
    assert isinstance(succeeded["runtime"], float)


def test_a_stopped_worker_finishes_its_batch_and_gives_the_rest_back(
    worker: RunningWorker, celery_client: Celery, valkey_url: str
) -> None:
    sent = [celery_client.send_task("sheaf.infer", args=[1.0], queue="infer.slow") for _ in range(20)]
    wait_until(lambda: held(valkey_url, "infer.slow") >= 8, description="a batch runs and others are prefetched")
    worker.service.send(signal.SIGTERM)
    assert worker.service.wait(20) == 0
    assert held(valkey_url, "infer.slow") == 0
    done = [result for result in sent if result.ready()]
    with redis.Redis.from_url(valkey_url) as client:
        waiting = client.llen("infer.slow") + client.llen("sheaf:returned:infer.slow:0")
    assert 0 < len(done) < 20
    assert len(done) + waiting == 20
    assert client.keys("sheaf:worker:*") == []


def test_what_a_killed_worker_held_is_run_by_another(
    start_worker: StartWorker, celery_client: Celery, valkey_url: str
) -> None:
    doomed = start_worker(valkey_url, lease_s=1.0)
    sent = [celery_client.send_task("sheaf.infer", args=[0.3], queue="infer.slow") for _ in range(6)]
    wait_until(lambda: held(valkey_url, "infer.slow") >= 4, description="it holds a batch")
    doomed.service.kill()
    start_worker(valkey_url, lease_s=1.0)
    assert [result.get(timeout=20) for result in sent] == [0.3] * 6


def test_a_worker_that_was_frozen_past_its_lease_settles_nothing_and_says_so(
    start_worker: StartWorker, celery_client: Celery, valkey_url: str
) -> None:
    frozen = start_worker(valkey_url, lease_s=1.0)
    sent = [celery_client.send_task("sheaf.infer", args=[0.5], queue="infer.slow") for _ in range(4)]
    wait_until(lambda: held(valkey_url, "infer.slow") == 4, description="it holds them")
    frozen.service.send(signal.SIGSTOP)
    other = start_worker(valkey_url, lease_s=1.0)
    assert [result.get(timeout=20) for result in sent] == [0.5] * 4
    frozen.service.send(signal.SIGCONT)
    wait_until(lambda: frozen.metric("sheaf_lost_leases_total", model="slow") >= 1, description="it noticed")
    assert "eases" in frozen.service.log()
    wait_until(
        lambda: other.metric("sheaf_jobs_total", model="slow", status="succeeded") == 4, description="all were counted"
    )
    assert frozen.metric("sheaf_jobs_total", model="slow", status="succeeded") == 0
    # It goes on as if nothing had been.
    other.service.stop()
    assert celery_client.send_task("sheaf.infer", args=["x"], queue=ECHO).get(timeout=10) == "x"


def test_what_is_held_for_a_worker_that_never_learnt_of_it_is_run(
    start_worker: StartWorker, celery_client: Celery, valkey_url: str
) -> None:
    """So it is when a lease is carried out late, after its caller has given it up and looked for what it may hold."""
    start_worker(valkey_url, broker={"read_timeout_s": 2.0})
    with redis.Redis.from_url(valkey_url) as client:
        [session] = client.zrange("sheaf:workers", 0, -1)
        sent = celery_client.send_task("sheaf.infer", args=["x"], queue="infer.elsewhere")
        message = client.rpop("infer.elsewhere")
        with client.pipeline() as lease:
            lease.hset(f"sheaf:held:{ECHO}:{session.decode()}", "1000", b"1:1:" + message)
            lease.zadd(f"sheaf:holders:{ECHO}", {session: (time.time() + 30) * 1000})
            lease.execute()
    assert sent.get(timeout=20) == "x"
    assert held(valkey_url, ECHO) == 0


def test_an_input_that_kills_its_worker_each_time_takes_no_other_job_down(
    start_worker: StartWorker, celery_client: Celery, valkey_url: str
) -> None:
    models: dict[str, object] = {
        "echo": {},
        "killer": {"handler": "tests.workers.handlers:Killer", "max_batch_size": 4},
    }
    kill = "infer.killer"
    with redis.Redis.from_url(valkey_url) as client:
        sent = {
            row: celery_client.send_task("sheaf.infer", args=[row], queue=kill) for row in (0, 0.01, -9, 0.02, 0.03)
        }
        for _ in range(3):
            doomed = start_worker(valkey_url, lease_s=1.0, models=models, ready=False)
            doomed.service.wait(60)
        start_worker(valkey_url, lease_s=1.0, models=models)
        with pytest.raises(Exception, match="its worker was lost 3 times") as caught:
            sent[-9].get(timeout=20)
        assert type(caught.value).__name__ == "worker_lost"
        assert [sent[row].get(timeout=20) for row in (0, 0.01, 0.02, 0.03)] == [0, 0.01, 0.02, 0.03]
        [letter] = client.lrange("sheaf:dead:infer.killer", 0, -1)
    assert sent[-9].id in letter.decode()


def test_a_batch_longer_than_the_lease_is_run_once(
    start_worker: StartWorker, celery_client: Celery, valkey_url: str
) -> None:
    workers = [start_worker(valkey_url, lease_s=1.0) for _ in range(2)]
    assert celery_client.send_task("sheaf.infer", args=[5], queue="infer.slow").get(timeout=20) == 5
    assert sum(worker.metric("sheaf_batch_size_sum", model="slow") for worker in workers) == 1
    assert sum(worker.metric("sheaf_reclaimed_total", model="slow") for worker in workers) == 0


def test_a_worker_goes_on_after_the_broker_was_restarted(start_worker: StartWorker, new_valkey: EmbeddedServer) -> None:
    start_worker(new_valkey.url)
    with celery_app(new_valkey.url) as before:
        assert before.send_task("sheaf.infer", args=["before"], queue=ECHO).get(timeout=10) == "before"
    new_valkey.stop()
    new_valkey.start()
    with celery_app(new_valkey.url) as after:
        assert after.send_task("sheaf.infer", args=["after"], queue=ECHO).get(timeout=20) == "after"


def test_celerys_gossip_does_not_fail_when_the_broker_is_lost(
    start_worker: StartWorker, new_valkey: EmbeddedServer
) -> None:
    running = start_worker(new_valkey.url)

    def controllable() -> bool:
        with celery_app(new_valkey.url) as client:
            try:
                return bool(client.control.inspect(timeout=0.5).ping())
            except redis.RedisError:
                # Celery's clients share a pool, which may still hold a connection of before.
                return False

    wait_until(controllable, description="the worker takes control commands")
    new_valkey.kill()
    wait_until(lambda: "Control commands wait" in running.service.log(), description="the worker has lost it")
    new_valkey.start()
    wait_until(controllable, description="it takes them again")
    assert "Gossip" not in running.service.log()


def test_the_log_has_a_line_per_batch_and_per_job(worker: RunningWorker, celery_client: Celery) -> None:
    sent = celery_client.send_task("sheaf.infer", args=["secret words"], queue=ECHO)
    sent.get(timeout=10)
    wait_until(lambda: "Batch done." in worker.service.log(), description="the lines are written")
    lines = [json.loads(line) for line in worker.service.log().splitlines()]
    [job] = [line for line in lines if line.get("job_id") == sent.id]
    assert job["status"] == "succeeded"
    assert job["batch_size"] == 1
    [batch] = [line for line in lines if line["message"] == "Batch done."]
    assert batch["model"] == "echo"
    assert job["batch"] == batch["batch"] == 1
    assert "secret words" not in worker.service.log()


def test_a_model_that_does_not_load_leaves_the_others_working(
    start_worker: StartWorker, celery_client: Celery, valkey_url: str
) -> None:
    start_worker(
        valkey_url,
        models={
            "broken": {"handler": "no.such.module:Class"},
            "echo": {"handler": "inference.handlers.echo:Echo"},
        },
    )
    assert celery_client.send_task("sheaf.infer", args=[1], queue=ECHO).get(timeout=10) == 1
    with redis.Redis.from_url(valkey_url) as client:
        [announced] = [json.loads(client.get(key) or b"") for key in client.keys("sheaf:worker:*")]
    states = {model["name"]: model["state"] for model in announced["models"]}
    assert states == {"broken": "failed", "echo": "ready"}
