"""What owners get of a queue: equal shares, whoever came first and however much of it there is."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import redis

from broker import AsyncBroker, Broker, Priority, QueueDepth, QueueFull, Submitted
from broker.message import decode
from broker.submitting import FAIR_FROM
from tests.broker.conftest import QUEUE, MakeBroker, new_job, take

NORMAL = f"{QUEUE}\x06\x163"


@pytest.fixture
async def front(server_url: str) -> AsyncIterator[AsyncBroker]:
    opened = await AsyncBroker.open(server_url, max_queue_depth=0)
    yield opened
    await opened.close()


async def submit(front: AsyncBroker, owner: str, count: int, first: int = 0, **changes: object) -> None:
    """Jobs `owner-0`, `owner-1`, … in this order."""
    jobs = [new_job(id=f"{owner}-{first + i}", owner=owner, **changes) for i in range(count)]
    await asyncio.gather(*(front.submit(job) for job in jobs))


def leased(broker: Broker, n: int) -> list[str]:
    """The ids of up to `n` messages of each priority, leased now."""
    return [decode(lease.message).id for lease in take(broker, n).leases]


def drained(broker: Broker, at_a_time: int) -> list[str]:
    """The ids of all that waits, in the order of leases."""
    ids: list[str] = []
    while some := leased(broker, at_a_time):
        ids += some
    return ids


def owners(ids: list[str]) -> list[str]:
    return [job_id.rpartition("-")[0] for job_id in ids]


def numbers(ids: list[str], owner: str) -> list[int]:
    return [int(job_id.rpartition("-")[2]) for job_id in ids if job_id.startswith(f"{owner}-")]


async def test_a_trickle_overtakes_a_flood(front: AsyncBroker, client: redis.Redis, broker: Broker) -> None:
    await submit(front, "flood", 10_000)
    await submit(front, "trickle", 5)
    assert numbers(leased(broker, 64), "trickle") == [0, 1, 2, 3, 4]
    assert len(drained(broker, 1000)) == 10_005 - 64


async def test_a_trickle_overtakes_a_flood_of_nobody_in_particular(
    front: AsyncBroker, client: redis.Redis, broker: Broker
) -> None:
    await submit(front, "", 1000)
    await submit(front, "trickle", 5)
    assert numbers(leased(broker, 64), "trickle") == [0, 1, 2, 3, 4]
    assert len(drained(broker, 1000)) == 1005 - 64


async def test_what_is_short_is_celerys_list_alone(front: AsyncBroker, client: redis.Redis, broker: Broker) -> None:
    await submit(front, "a", FAIR_FROM - 1)
    await submit(front, "b", 1)
    assert client.llen(NORMAL) == FAIR_FROM
    assert client.keys("sheaf:owned*") == client.keys("sheaf:rotation*") == []
    assert owners(drained(broker, 10)) == ["a"] * (FAIR_FROM - 1) + ["b"]


@pytest.mark.parametrize("at_a_time", [1, 2, 7, 30, 64, 5000])
async def test_three_owners_and_celerys_list_get_equal_shares(
    front: AsyncBroker, client: redis.Redis, broker: Broker, at_a_time: int
) -> None:
    await submit(front, "", 400)
    for owner in ("a", "b", "c"):
        await submit(front, owner, 100)
    ids = drained(broker, at_a_time)
    assert len(ids) == 700
    if at_a_time <= 64:
        begin = ids[: 400 - 400 % at_a_time]
        counts = Counter(owners(begin))
        assert max(counts.values()) - min(counts.values()) <= 1, counts


async def test_leases_of_one_message_take_turns(front: AsyncBroker, client: redis.Redis, broker: Broker) -> None:
    await submit(front, "", 200)
    await submit(front, "a", 3)
    await submit(front, "b", 3)
    assert owners([one for _ in range(12) for one in leased(broker, 1)]) == ["", "a", "b"] * 3 + [""] * 3
    drained(broker, 100)


async def test_an_owner_has_turns_from_when_nothing_of_theirs_is_in_celerys_list(
    front: AsyncBroker, client: redis.Redis, broker: Broker
) -> None:
    await submit(front, "", 2)
    await submit(front, "a", 1)
    await submit(front, "", FAIR_FROM, first=2)
    await submit(front, "a", 3, first=1)
    assert owners([one for _ in range(9) for one in leased(broker, 1)]) == ["", "", "a", "a", "", "a", "", "a", ""]
    drained(broker, 100)


async def test_a_place_in_celerys_list_is_told_rightly_when_some_were_taken_before(
    front: AsyncBroker, client: redis.Redis, broker: Broker
) -> None:
    await submit(front, "b", FAIR_FROM)
    leased(broker, FAIR_FROM // 2)
    await submit(front, "a", FAIR_FROM)
    ids = leased(broker, FAIR_FROM // 2 + 10)
    ids += [one for _ in range(2) for one in leased(broker, 1)]
    assert numbers(ids, "a") == list(range(12))
    drained(broker, 100)


async def test_whom_the_next_slot_would_have_come_to_is_first_at_the_next_lease(
    front: AsyncBroker, client: redis.Redis, broker: Broker
) -> None:
    await submit(front, "", 100)
    for owner in ("a", "b", "c"):
        await submit(front, owner, 50)
    assert Counter(owners(leased(broker, 5))) == {"": 2, "a": 1, "b": 1, "c": 1}
    assert owners([one for _ in range(4) for one in leased(broker, 1)]) == ["a", "b", "c", ""]
    drained(broker, 100)


async def test_what_one_owner_cannot_use_goes_to_the_others(
    front: AsyncBroker, client: redis.Redis, broker: Broker
) -> None:
    await submit(front, "", FAIR_FROM)
    await submit(front, "few", 2)
    await submit(front, "many", 100)
    assert Counter(owners(leased(broker, 60))) == {"": 29, "few": 2, "many": 29}
    drained(broker, 100)


async def test_more_owners_than_slots_all_get_their_turns(
    front: AsyncBroker, client: redis.Redis, broker: Broker
) -> None:
    await submit(front, "", FAIR_FROM)
    for i in range(30):
        await submit(front, f"owner{i}", 2)
    first_lap = owners(leased(broker, 11) + leased(broker, 10) + leased(broker, 10))
    assert sorted(first_lap) == sorted(["", *(f"owner{i}" for i in range(30))])
    drained(broker, 100)


async def test_more_owners_than_one_round_deals_to_lose_nothing(
    front: AsyncBroker, client: redis.Redis, broker: Broker
) -> None:
    await submit(front, "", FAIR_FROM)
    await asyncio.gather(*(submit(front, f"owner{i}", 1) for i in range(5000)))
    assert len(leased(broker, 6000)) == 5000 + FAIR_FROM
    assert client.keys("sheaf:*o*:infer.echo:3*") == []


@pytest.mark.parametrize("at_a_time", [1, 5, 64, 300])
async def test_the_jobs_of_an_owner_stay_in_their_order(
    front: AsyncBroker, client: redis.Redis, broker: Broker, at_a_time: int
) -> None:
    ids: list[str] = []
    for batch in range(6):
        await submit(front, "a", 150, first=150 * batch)
        await submit(front, "b", 30, first=30 * batch)
        await submit(front, "", 10, first=10 * batch)
        # Celery's list runs empty beside the owners' lists at some of these sizes.
        for _ in range(max(1, 300 // at_a_time)):
            ids += leased(broker, at_a_time)
    ids += drained(broker, at_a_time)
    for owner, count in (("a", 900), ("b", 180), ("", 60)):
        assert numbers(ids, owner) == list(range(count))


async def test_an_owner_whose_list_ran_empty_is_back_in_celerys_list(
    front: AsyncBroker, client: redis.Redis, broker: Broker
) -> None:
    await submit(front, "", FAIR_FROM)
    await submit(front, "a", 1)
    drained(broker, 100)
    await submit(front, "a", 1, first=1)
    assert client.llen(NORMAL) == 1
    assert drained(broker, 100) == ["a-1"]


async def test_owners_share_each_priority_by_itself(front: AsyncBroker, client: redis.Redis, broker: Broker) -> None:
    await submit(front, "", 100, priority=Priority.LOW)
    await submit(front, "a", 3, priority=Priority.LOW)
    await submit(front, "a", 3, first=3, priority=Priority.HIGH)
    assert client.llen(QUEUE) == 3
    answer = broker.lease(QUEUE, [1, 1, 1, 4])
    assert owners([decode(lease.message).id for lease in answer.leases]) == ["a", "", "", "a", "a"]
    assert answer.waiting == (2, 0, 0, 99)
    drained(broker, 100)


async def test_lists_of_owners_count_in_the_depth(front: AsyncBroker, client: redis.Redis, broker: Broker) -> None:
    await submit(front, "a", 100, priority=Priority.LOW)
    await submit(front, "b", 10, priority=Priority.LOW)
    assert client.llen(f"{QUEUE}\x06\x169") == FAIR_FROM
    assert (await front.overview.queue_depths([QUEUE, "infer.other"]))[:4] == [
        *(QueueDepth(QUEUE, step, 0) for step in (0, 3, 6)),
        QueueDepth(QUEUE, 9, 110),
    ]
    answer = take(broker, 20)
    assert answer.waiting == (0, 0, 0, 90)
    assert (await front.overview.queue_depths([QUEUE]))[3] == QueueDepth(QUEUE, 9, 90)
    drained(broker, 100)


async def test_the_depth_cap_counts_lists_of_owners(server_url: str, client: redis.Redis, broker: Broker) -> None:
    front = await AsyncBroker.open(server_url, max_queue_depth=FAIR_FROM + 2)
    await submit(front, "a", FAIR_FROM + 1)
    jobs = [new_job(id=f"b-{i}", owner="b") for i in range(2)]
    answers = await asyncio.gather(*(front.submit(job) for job in jobs), return_exceptions=True)
    with pytest.raises(QueueFull, match=f"holds {FAIR_FROM + 2} jobs"):
        await front.submit(new_job(owner="c"))
    await front.close()
    assert [type(answer) for answer in answers] == [Submitted, QueueFull]
    assert len(drained(broker, 100)) == FAIR_FROM + 2


async def test_nothing_of_owners_is_left_when_all_is_leased(
    front: AsyncBroker, client: redis.Redis, broker: Broker
) -> None:
    for priority in Priority:
        for owner in ("a", "b", ""):
            await submit(front, f"{owner}", 100, first=100 * priority, priority=priority)
    kinds = ("owned", "owned-depths", "rotation", "places")
    assert all(client.keys(f"sheaf:{kind}:*") for kind in kinds)
    drained(broker, 77)
    assert [key for kind in kinds for key in client.keys(f"sheaf:{kind}:*")] == []


async def test_a_message_that_was_given_back_is_first_of_all(
    front: AsyncBroker, client: redis.Redis, broker: Broker
) -> None:
    await submit(front, "a", 100)
    await submit(front, "b", 10)
    given_back = take(broker, 70).leases
    broker.release(QUEUE, [lease.tag for lease in given_back])
    assert [lease.message for lease in take(broker, 70).leases] == [lease.message for lease in given_back]
    drained(broker, 100)


async def test_an_empty_celery_list_keeps_nobody_from_their_turns_whoever_emptied_it(
    front: AsyncBroker, client: redis.Redis, broker: Broker
) -> None:
    """`celery purge` does."""
    await submit(front, "a", 100)
    client.delete(NORMAL)
    answer = take(broker, 10)
    assert [decode(lease.message).id for lease in answer.leases] == [f"a-{i}" for i in range(FAIR_FROM, FAIR_FROM + 10)]
    assert answer.waiting == (0, 100 - FAIR_FROM - 10, 0, 0)
    drained(broker, 100)


@pytest.mark.parametrize("purged", [False, True])
async def test_lists_of_owners_can_be_drained_on_a_full_server(
    front: AsyncBroker, client: redis.Redis, broker: Broker, purged: bool
) -> None:
    await submit(front, "a", 100)
    await submit(front, "b", 40)
    if purged:
        client.delete(NORMAL)
    client.config_set("maxmemory", 1)
    try:
        assert len(drained(broker, 7)) == (140 - FAIR_FROM if purged else 140)
    finally:
        client.config_set("maxmemory", 0)


async def test_a_job_of_an_owner_that_is_submitted_twice_is_queued_once(
    front: AsyncBroker, client: redis.Redis, broker: Broker
) -> None:
    await submit(front, "", FAIR_FROM)
    for _ in range(2):
        await submit(front, "a", 3)
    assert numbers(drained(broker, 100), "a") == [0, 1, 2]


async def test_a_worker_that_died_gives_back_what_it_had_of_owners(
    front: AsyncBroker, client: redis.Redis, make_broker: MakeBroker
) -> None:
    await submit(front, "a", 66)
    dead, other = make_broker("dead", lease_s=0.001), make_broker("other")
    assert len(take(dead, 100).leases) == 66
    await asyncio.sleep(0.002)
    assert other.reclaim(QUEUE).returned == 66
    assert [number for _ in range(66) for number in numbers(leased(other, 100), "a")] == list(range(66))
