"""What is known of batches: made once, written by whoever holds their lease, cancelled by callers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import redis

from broker import (
    AsyncBroker,
    BatchEnded,
    BatchFault,
    BatchRecord,
    BatchStatus,
    BatchWishes,
    Broker,
    IdempotencyConflict,
    LeaseLost,
    TooManyBatches,
    UnknownBatch,
)
from broker.keys import PRIORITY_STEPS
from broker.message import BATCHES, decode
from tests.broker.conftest import MakeBroker


@pytest.fixture
async def batches(server_url: str, client: redis.Redis) -> AsyncIterator[AsyncBroker]:
    broker = await AsyncBroker.open(server_url)
    yield broker
    await broker.close()


def record(name: str = "batch_1", owner: str = "shop") -> BatchRecord:
    now = time.time()
    return BatchRecord(
        id=name,
        owner=owner,
        endpoint="/v1/jobs",
        input_file_id="file-1",
        completion_window="24h",
        created_at=now,
        expires_at=now + 86_400,
    )


async def submit(batches: AsyncBroker, batch: BatchRecord, *, most: int = 10, fingerprint: str = "f") -> BatchRecord:
    return await batches.batches.submit(batch, max_open=most, fingerprint=fingerprint, idempotency_key="key")


def lease(broker: Broker) -> bytes:
    """The tag of the one batch that waits."""
    [found] = broker.lease(BATCHES, [1] + [0] * (len(PRIORITY_STEPS) - 1)).leases
    return found.tag


async def test_a_batch_is_known_and_its_message_queued(batches: AsyncBroker, make_broker: MakeBroker) -> None:
    made = await submit(batches, record())
    assert await batches.batches.get(made.id) == made
    [found] = make_broker().lease(BATCHES, [9, 9, 9, 9]).leases
    message = decode(found.message)
    assert (message.task, message.id, message.kwargs) == (BATCHES, made.id, {"batch_id": made.id})


async def test_the_same_id_is_the_same_batch_or_another_request(batches: AsyncBroker, make_broker: MakeBroker) -> None:
    first = await submit(batches, record())
    assert await submit(batches, replace(record(), metadata={"second": "yes"})) == first
    with pytest.raises(IdempotencyConflict):
        await submit(batches, record(), fingerprint="other")
    assert len(make_broker().lease(BATCHES, [9, 9, 9, 9]).leases) == 1


async def test_an_owner_may_have_so_many_open(batches: AsyncBroker, make_broker: MakeBroker) -> None:
    broker = make_broker()
    first = await submit(batches, record("batch_1"), most=2)
    tag = lease(broker)
    await submit(batches, record("batch_2"), most=2)
    with pytest.raises(TooManyBatches):
        await submit(batches, record("batch_3"), most=2)
    await submit(batches, record("batch_4", owner="other"), most=2)
    await batches.batches.report(broker.session, tag, first.become(BatchStatus.COMPLETED))
    await submit(batches, record("batch_3"), most=2)


async def test_who_holds_it_writes_and_hears_of_a_cancel(batches: AsyncBroker, make_broker: MakeBroker) -> None:
    broker = make_broker()
    batch = await submit(batches, record())
    tag = lease(broker)
    begun = replace(batch, model="echo", total=3).become(BatchStatus.IN_PROGRESS)
    assert await batches.batches.report(broker.session, tag, begun) == BatchWishes()
    cancelled = await batches.batches.cancel(batch.id)
    assert cancelled is not None
    assert (cancelled.status, cancelled.shown) == (BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING)
    # Asked twice, it was asked the first time.
    assert await batches.batches.cancel(batch.id) == cancelled
    assert await batches.batches.report(broker.session, tag, begun) == BatchWishes(cancelled.cancelling_at)
    faults = (BatchFault("code", "message", 3, "body"),)
    ended = replace(begun, errors=faults).become(BatchStatus.CANCELLED)
    await batches.batches.report(broker.session, tag, ended)
    found = await batches.batches.get(batch.id)
    assert found is not None
    assert (found.shown, found.errors) == (BatchStatus.CANCELLED, faults)
    with pytest.raises(BatchEnded):
        await batches.batches.cancel(batch.id)


async def test_a_pause_is_told_until_it_is_taken_back(batches: AsyncBroker, make_broker: MakeBroker) -> None:
    broker = make_broker()
    batch = await submit(batches, record())
    paused = await batches.batches.pause(batch.id)
    assert paused is not None
    assert paused.rests
    tag = lease(broker)
    assert await batches.batches.report(broker.session, tag, replace(batch, held=True)) == BatchWishes(paused=True)
    held = await batches.batches.get(batch.id)
    assert held is not None
    assert (held.paused, held.rests) == (True, False)
    assert await batches.batches.resume(batch.id) == replace(held, paused=False)
    assert await batches.batches.report(broker.session, tag, batch.become(BatchStatus.FAILED)) == BatchWishes()
    for want in (batches.batches.pause, batches.batches.resume):
        with pytest.raises(BatchEnded):
            await want(batch.id)
        assert await want("batch_unknown") is None


async def test_what_is_wanted_of_a_batch_that_the_server_has_just_lost_is_not_kept_for_ever(
    batches: AsyncBroker, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = await submit(batches, record())
    get = batches.batches.get

    async def lost_meanwhile(batch_id: str) -> BatchRecord | None:
        found = await get(batch_id)
        monkeypatch.undo()
        client.delete(batches.keys.batch(batch_id))
        return found

    monkeypatch.setattr(batches.batches, "get", lost_meanwhile)
    assert await batches.batches.cancel(batch.id) is None
    assert client.ttl(batches.keys.batch(batch.id)) > 0


async def test_who_lost_it_writes_nothing(batches: AsyncBroker, make_broker: MakeBroker) -> None:
    broker = make_broker()
    batch = await submit(batches, record())
    tag = lease(broker)
    broker.release(BATCHES, [tag])
    with pytest.raises(LeaseLost):
        await batches.batches.report(broker.session, tag, batch.become(BatchStatus.FAILED))
    assert await batches.batches.get(batch.id) == batch


async def test_an_owners_are_listed_newest_first(batches: AsyncBroker) -> None:
    made = [
        await submit(batches, replace(record(f"batch_{number}"), created_at=1000.0 + number)) for number in range(5)
    ]
    await submit(batches, record("batch_of_other", owner="other"))
    assert await batches.batches.listed("shop", None, 3) == made[:1:-1]
    assert await batches.batches.listed("shop", "batch_2", 3) == made[1::-1]
    with pytest.raises(UnknownBatch):
        await batches.batches.listed("shop", "batch_of_other", 3)


async def test_everybodys_are_listed_newest_first(batches: AsyncBroker) -> None:
    made = [
        await submit(batches, replace(record(f"batch_{number}", owner=f"owner {number}"), created_at=1000.0 + number))
        for number in range(3)
    ]
    assert await batches.batches.newest(2) == made[:0:-1]


async def test_ids_that_a_server_lost_the_batches_of_keep_nobody_out(batches: AsyncBroker, client: redis.Redis) -> None:
    client.sadd(batches.keys.open_batches("shop"), "batch_lost", "batch_lost_too")
    await submit(batches, record(), most=1)


async def test_an_unknown_batch_is_none(batches: AsyncBroker) -> None:
    assert await batches.batches.get("batch_0") is None
    assert await batches.batches.cancel("batch_0") is None
