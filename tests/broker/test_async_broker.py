"""Submit, read and wait, as the API uses them, against the worker's verbs."""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from collections.abc import AsyncIterator

import orjson
import pytest
import redis
import uvloop

from broker import (
    AsyncBroker,
    Broker,
    BrokerUnavailable,
    IdempotencyConflict,
    JobEnded,
    JobState,
    JobStatus,
    ModelInfo,
    NewJob,
    Priority,
    QueueDepth,
    QueueFull,
    SettleAnswer,
    Settlement,
    Start,
    StartAnswer,
    Submitted,
    WorkerInfo,
)
from broker.embedded import EmbeddedServer
from broker.message import decode
from broker.results import Failure, RunFacts, encode_failure, encode_success
from tests.broker.conftest import QUEUE, new_job, take
from tests.conftest import free_port
from tests.proxy import Proxy

FACTS = RunFacts(
    model="echo",
    version="1",
    priority=3,
    attempt=1,
    many=False,
    enqueued_at=1000.0,
    started_at=1001.0,
    finished_at=1002.0,
    timings={"queue_ms": 1.5, "batch_size": 2},
)


async def submit_and_wait(front: AsyncBroker, job: NewJob, timeout_s: float) -> JobState:
    with front.waiter(job.id) as waiter:
        await front.submit(job)
        state = await front.wait(job.id, timeout_s, waiter)
    assert state is not None
    return state


@pytest.fixture
async def front(server_url: str) -> AsyncIterator[AsyncBroker]:
    opened = await AsyncBroker.open(server_url, max_queue_depth=1000)
    yield opened
    await opened.close()


def run_one(broker: Broker, output: object) -> str:
    """Lease one message and settle it with `output`, as a worker does."""
    [lease] = take(broker, 1).leases
    message = decode(lease.message)
    broker.start(QUEUE, [Start(lease.tag, message.id, True, lease.attempt)])
    broker.settle(QUEUE, [Settlement(lease.tag, message.id, encode_success(message.id, output, FACTS), True)])
    return message.id


async def test_a_submitted_job_is_queued_and_readable(front: AsyncBroker, client: redis.Redis, broker: Broker) -> None:
    job = new_job("hello")
    assert (await front.submit(job)).id == job.id
    state = await front.fetch(job.id)
    assert state is not None
    assert (state.status, state.model, state.attempt) == (JobStatus.QUEUED, "echo", 0)
    assert orjson.loads(state.metadata) == {"order": 7}
    [lease] = take(broker, 1).leases
    message = decode(lease.message)
    assert (message.id, message.kwargs, message.enqueued_at) == (job.id, {"input": "hello"}, 1000.0)


async def test_a_job_is_running_once_started_and_ended_once_settled(
    front: AsyncBroker, client: redis.Redis, broker: Broker
) -> None:
    job = new_job()
    await front.submit(job)
    [lease] = take(broker, 1).leases
    broker.start(QUEUE, [Start(lease.tag, job.id, True, 2)])
    running = await front.fetch(job.id)
    assert running is not None
    assert (running.status, running.attempt) == (JobStatus.RUNNING, 2)
    broker.settle(QUEUE, [Settlement(lease.tag, job.id, encode_success(job.id, [1.5], FACTS), True)])
    ended = await front.fetch(job.id)
    assert ended is not None
    assert (ended.status, ended.result, ended.created_at) == (JobStatus.SUCCEEDED, b"[1.5]", 1000.0)
    assert ended.timings is not None
    assert orjson.loads(ended.timings) == {"queue_ms": 1.5, "batch_size": 2}


async def test_a_failure_is_read_with_its_type_and_message(
    front: AsyncBroker, client: redis.Redis, broker: Broker
) -> None:
    job = new_job()
    await front.submit(job)
    [lease] = take(broker, 1).leases
    failure = encode_failure(job.id, Failure("ValueError", "too long"), FACTS)
    broker.settle(QUEUE, [Settlement(lease.tag, job.id, failure, True)])
    state = await front.fetch(job.id)
    assert state is not None
    assert state.error is not None
    assert (state.status, state.error.type, state.error.message) == (JobStatus.FAILED, "ValueError", "too long")


async def test_a_cancelled_job_is_not_run_and_no_result_replaces_that(
    front: AsyncBroker, client: redis.Redis, broker: Broker
) -> None:
    waiting, running = new_job("waiting"), new_job("running")
    await front.submit(running)
    [running_lease] = take(broker, 1).leases
    assert broker.start(QUEUE, [Start(running_lease.tag, running.id, True, 1)]) == [StartAnswer.RUN]
    await front.submit(waiting)
    [waiting_lease] = take(broker, 1).leases
    for job in (waiting, running):
        state = await front.cancel(job.id)
        assert state is not None
        assert (state.status, state.model) == (JobStatus.CANCELLED, "echo")
    assert broker.start(QUEUE, [Start(waiting_lease.tag, waiting.id, True, 1)]) == [StartAnswer.REVOKED]
    late = Settlement(running_lease.tag, running.id, encode_success(running.id, 1, FACTS), True)
    assert broker.settle(QUEUE, [late]) == [SettleAnswer.REVOKED]
    state = await front.fetch(running.id)
    assert state is not None
    assert state.status is JobStatus.CANCELLED
    with pytest.raises(JobEnded, match="it was cancelled"):
        await front.cancel(running.id)
    assert await front.cancel("no-such-job") is None


async def test_an_unknown_id_is_unknown(front: AsyncBroker, client: redis.Redis) -> None:
    assert await front.fetch("no-such-job") is None
    assert await front.wait("no-such-job", 5) is None


async def test_concurrent_submits_keep_their_order_and_lose_nothing(
    front: AsyncBroker, client: redis.Redis, broker: Broker
) -> None:
    jobs = [new_job(i) for i in range(700)]
    await asyncio.gather(*(front.submit(job) for job in jobs))
    leases = take(broker, 1000).leases
    assert [decode(lease.message).id for lease in leases] == [job.id for job in jobs]


async def test_the_depth_cap_refuses_what_is_over_it_and_stores_nothing_of_it(
    server_url: str, client: redis.Redis
) -> None:
    front = await AsyncBroker.open(server_url, max_queue_depth=3)
    answers = await asyncio.gather(*(front.submit(new_job(id=f"job-{i}")) for i in range(5)), return_exceptions=True)
    await front.close()
    assert [type(answer) for answer in answers] == [Submitted] * 3 + [QueueFull] * 2
    assert client.llen(f"{QUEUE}\x06\x163") == 3
    assert client.exists("sheaf:job:job-4") == 0


async def test_the_same_idempotency_key_stands_for_the_same_job(front: AsyncBroker, client: redis.Redis) -> None:
    first, second = (new_job(idempotency_key=("me", "key"), fingerprint="f1") for _ in range(2))
    ids = await asyncio.gather(front.submit(first), front.submit(second))
    assert {submitted.id for submitted in ids} == {first.id}
    assert client.llen(f"{QUEUE}\x06\x163") == 1
    with pytest.raises(IdempotencyConflict):
        await front.submit(new_job(idempotency_key=("me", "key"), fingerprint="f2"))


async def test_an_idempotency_key_is_forgotten_with_its_job(front: AsyncBroker, client: redis.Redis) -> None:
    first, second = (new_job(idempotency_key=("me", "key"), fingerprint="f1") for _ in range(2))
    await front.submit(first)
    client.delete(f"sheaf:job:{first.id}")
    assert (await front.submit(second)).id == second.id


async def test_a_job_whose_time_is_over_ends_though_nobody_reads_it(front: AsyncBroker, client: redis.Redis) -> None:
    now = time.time()
    over, later, begun = new_job(expires_at=now - 1), new_job(expires_at=now + 60), new_job(expires_at=now - 1)
    for job in (over, later, begun):
        await front.submit(job)
    client.set(f"sheaf:started:{begun.id}", f"1:{now:.6f}", ex=60)
    await front.expire_due()
    assert client.exists(f"celery-task-meta-{over.id}") == 1
    assert client.exists(f"celery-task-meta-{begun.id}", f"celery-task-meta-{later.id}") == 0
    assert client.zrange("sheaf:expiring", 0, -1) == [later.id.encode()]


async def test_a_job_submitted_twice_under_one_id_is_queued_once(front: AsyncBroker, client: redis.Redis) -> None:
    job = new_job()
    assert [(await front.submit(job)).id for _ in range(2)] == [job.id] * 2
    assert client.llen(f"{QUEUE}\x06\x163") == 1


async def test_waiters_hear_of_the_result(front: AsyncBroker, client: redis.Redis, broker: Broker) -> None:
    job = new_job()
    waiting = asyncio.create_task(submit_and_wait(front, job, 10))
    while client.llen(f"{QUEUE}\x06\x163") == 0:
        await asyncio.sleep(0)
    also_waiting = asyncio.create_task(front.wait(job.id, 10))
    while front.waiters < 2:
        await asyncio.sleep(0)
    run_one(broker, "answer")
    for state in await asyncio.gather(waiting, also_waiting):
        assert state is not None
        assert state.result == b'"answer"'
    assert front.waiters == 0


async def test_a_wait_that_comes_after_the_result_returns_at_once(
    front: AsyncBroker, client: redis.Redis, broker: Broker
) -> None:
    job = new_job()
    await front.submit(job)
    run_one(broker, 1)
    state = await front.wait(job.id, 30)
    assert state is not None
    assert state.ended


async def test_a_wait_without_result_tells_the_state_at_the_timeout(front: AsyncBroker, client: redis.Redis) -> None:
    state = await submit_and_wait(front, new_job(), 0.05)
    assert state.status is JobStatus.QUEUED


async def test_the_state_of_a_job_takes_little_while_it_is_held(front: AsyncBroker, client: redis.Redis) -> None:
    job = new_job()
    await front.submit(job)
    tracemalloc.start()
    try:
        held = [await front.fetch(job.id) for _ in range(200)]
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size / len(held) < 2048


async def test_waiters_hear_of_results_after_the_broker_was_restarted(new_valkey: EmbeddedServer) -> None:
    front = await AsyncBroker.open(new_valkey.url)
    broker = Broker(new_valkey.url, "worker-a")
    job = new_job()
    waiting = asyncio.create_task(submit_and_wait(front, job, 30))
    while front.waiters < 1 or await front.fetch(job.id) is None:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(new_valkey.stop)
    await asyncio.to_thread(new_valkey.start)
    await asyncio.to_thread(run_one, broker, "still here")
    state = await waiting
    assert state.result == b'"still here"'
    broker.close()
    await front.close()


async def test_a_broker_that_does_not_answer_is_said_to_be_unavailable() -> None:
    front = await AsyncBroker.open(f"redis://127.0.0.1:{free_port()}/0")
    asked = (front.submit(new_job()), front.fetch("id"), front.wait("id", 1), front.probe(), front.overview.workers())
    for attempt in asked:
        with pytest.raises(BrokerUnavailable):
            await attempt
    await front.close()


def test_under_uvloop_too_a_lost_connection_is_replaced(valkey_server: EmbeddedServer, valkey_url: str) -> None:
    """uvloop, which the API runs on, has an error of its own for writing to a connection that is gone."""

    async def submit_and_read(proxy: Proxy) -> None:
        front = await AsyncBroker.open(proxy.url)
        for _ in range(20):
            job = new_job()
            async with asyncio.timeout(10):
                await front.submit(job)
                proxy.reset()
                assert await front.fetch(job.id) is not None
                proxy.reset()
                assert (await front.submit(job)).id == job.id
        await front.close()

    with Proxy(valkey_server.port) as proxy, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(submit_and_read(proxy))


async def test_whatever_goes_wrong_in_a_flush_reaches_its_submits(
    front: AsyncBroker, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("a fault of the client library")

    monkeypatch.setattr(front._submitter, "_evaluate", fail)
    async with asyncio.timeout(5):
        with pytest.raises(RuntimeError, match="a fault of the client library"):
            await front.submit(new_job())


async def test_a_full_server_refuses_submits_as_unavailable(front: AsyncBroker, client: redis.Redis) -> None:
    client.config_set("maxmemory", 1)
    try:
        with pytest.raises(BrokerUnavailable) as refused:
            await front.submit(new_job())
        assert "script" not in str(refused.value)
        with pytest.raises(BrokerUnavailable):
            await front.probe()
    finally:
        client.config_set("maxmemory", 0)
    assert client.keys("*") == []


async def test_a_probe_says_whether_a_submit_would_be_taken(front: AsyncBroker, client: redis.Redis) -> None:
    client.replicaof("127.0.0.1", free_port())
    try:
        with pytest.raises(BrokerUnavailable, match="read only"):
            await front.probe()
    finally:
        client.replicaof("NO", "ONE")
    await front.probe()


async def test_a_submit_that_fails_in_an_unforeseen_way_is_answered(
    front: AsyncBroker, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("unforeseen")

    with monkeypatch.context() as patched:
        patched.setattr("broker.submitting.encode", fail)
        with pytest.raises(RuntimeError, match="unforeseen"):
            await asyncio.wait_for(front.submit(new_job()), 5)
    assert await front.submit(new_job())


async def test_queue_depths_count_waiting_and_given_back_messages(
    front: AsyncBroker, client: redis.Redis, broker: Broker
) -> None:
    for priority in (Priority.HIGH, Priority.LOW, Priority.LOW):
        await front.submit(new_job(priority=priority))
    broker.release(QUEUE, [lease.tag for lease in take(broker, 2).leases])
    assert await front.overview.queue_depths([QUEUE]) == [
        QueueDepth(QUEUE, 0, 1),
        QueueDepth(QUEUE, 3, 0),
        QueueDepth(QUEUE, 6, 0),
        QueueDepth(QUEUE, 9, 2),
    ]


async def test_workers_are_listed_while_they_announce_themselves(
    front: AsyncBroker, client: redis.Redis, broker: Broker
) -> None:
    info = WorkerInfo("worker-a", "host", "cpu", 42, (ModelInfo("echo", "1", None, "fp32", "ready"),))
    assert await front.overview.workers() == []
    broker.announce(info)
    assert await front.overview.workers() == [info]
    broker.withdraw()
    assert await front.overview.workers() == []
