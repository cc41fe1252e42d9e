"""The queue contract, verb by verb, over each kind of server."""

from __future__ import annotations

import threading
import time
from urllib.parse import urlsplit

import pytest
import redis

from broker import (
    Broker,
    BrokerUnavailable,
    FollowUp,
    Lease,
    Leased,
    SettleAnswer,
    Settlement,
    Start,
    StartAnswer,
    UnsupportedServer,
)
from broker.connect import check_server_info
from tests.broker.conftest import QUEUE, MakeBroker, take
from tests.conftest import free_port, wait_until
from tests.proxy import Proxy

LOW = f"{QUEUE}\x06\x169"


def push(client: redis.Redis, *messages: str, queue: str = QUEUE) -> None:
    for message in messages:
        client.lpush(queue, message)


def texts(broker: Broker, n: int = 100) -> list[str]:
    return [lease.message.decode() for lease in take(broker, n).leases]


def settlement(tag: bytes, job_id: str = "job-1", result: bytes | None = b'{"status":"SUCCESS"}') -> Settlement:
    return Settlement(tag, job_id, result, recorded=False)


def held_count(client: redis.Redis, session: str = "worker-a") -> int:
    count: int = client.hlen(f"sheaf:held:{QUEUE}:{session}")
    return count


def test_lease_takes_the_oldest_messages_first_and_says_how_many_wait(client: redis.Redis, broker: Broker) -> None:
    push(client, "one", "two", "three")
    leased = take(broker, 2)
    assert [lease.message for lease in leased.leases] == [b"one", b"two"]
    assert leased.waiting == (1, 0, 0, 0)
    assert [lease.attempt for lease in leased.leases] == [1, 1]


def test_a_leased_message_is_kept_on_the_server(client: redis.Redis, broker: Broker) -> None:
    push(client, "only")
    [lease] = take(broker, 10).leases
    assert client.hget(f"sheaf:held:{QUEUE}:worker-a", lease.tag) == b"1:1:only"


def test_an_empty_queue_gives_nothing_and_leaves_nothing(client: redis.Redis, broker: Broker) -> None:
    assert take(broker, 10).leases == []
    assert client.keys("*") == []


def test_higher_priorities_are_leased_first(client: redis.Redis, broker: Broker) -> None:
    for step in (9, 6, 3):
        push(client, f"step {step}", queue=f"{QUEUE}\x06\x16{step}")
    push(client, "step 0")
    leases = take(broker, 4).leases
    assert [(lease.step, lease.message.decode()) for lease in leases] == [
        (0, "step 0"),
        (3, "step 3"),
        (6, "step 6"),
        (9, "step 9"),
    ]


def test_each_priority_is_leased_into_room_of_its_own(client: redis.Redis, broker: Broker) -> None:
    for step in (0, 3, 6, 9):
        push(client, *(f"{step} {i}" for i in range(4)), queue=f"{QUEUE}\x06\x16{step}" if step else QUEUE)
    leased = broker.lease(QUEUE, [1, 0, 9, 2])
    assert [lease.message.decode() for lease in leased.leases] == ["0 0", "6 0", "6 1", "6 2", "6 3", "9 0", "9 1"]
    assert leased.waiting == (3, 4, 0, 2)


def test_a_full_room_for_low_priority_stops_no_high_message(client: redis.Redis, broker: Broker) -> None:
    push(client, "low", queue=LOW)
    push(client, "high")
    assert [lease.message for lease in broker.lease(QUEUE, [1, 1, 1, 0]).leases] == [b"high"]


def test_what_still_waits_is_told_of_each_priority_where_there_is_no_room_too(
    client: redis.Redis, broker: Broker
) -> None:
    push(client, "high")
    push(client, "low", "low too", queue=LOW)
    broker.release(QUEUE, [lease.tag for lease in take(broker, 1).leases])
    assert broker.lease(QUEUE, [0, 0, 0, 0]) == Leased([], (1, 0, 0, 2))


def test_a_message_that_has_to_come_alone_keeps_no_other_priority_waiting(
    client: redis.Redis, make_broker: MakeBroker
) -> None:
    push(client, "lost", queue=f"{QUEUE}\x06\x163")
    take(make_broker("dead", lease_s=0.05), 1)
    other = make_broker("other")
    wait_until(lambda: other.reclaim(QUEUE).returned, description="the lease runs out")
    push(client, "high")
    push(client, "normal", queue=f"{QUEUE}\x06\x163")
    push(client, "low", queue=LOW)
    assert [texts(other) for _ in range(3)] == [["high", "low"], ["lost"], ["normal"]]


def test_settle_stores_publishes_and_drops_the_lease(client: redis.Redis, broker: Broker) -> None:
    push(client, "message")
    [lease] = take(broker, 1).leases
    with client.pubsub() as pubsub:  # type: ignore[no-untyped-call]  # redis-py leaves it untyped
        pubsub.subscribe("celery-task-meta-job-1")
        wait_until(lambda: pubsub.get_message(timeout=0.1), description="the subscription is confirmed")
        assert broker.settle(QUEUE, [settlement(lease.tag)]) == [SettleAnswer.SETTLED]
        published = pubsub.get_message(timeout=5)
    assert published is not None
    assert published["data"] == b'{"status":"SUCCESS"}' == client.get("celery-task-meta-job-1")
    assert 0 < client.ttl("celery-task-meta-job-1") <= 86400
    assert held_count(client) == 0


def test_a_worker_that_lost_its_lease_settles_nothing(client: redis.Redis, make_broker: MakeBroker) -> None:
    slow, other = make_broker("slow", lease_s=0.05), make_broker("other")
    push(client, "message")
    [lost] = take(slow, 1).leases
    wait_until(lambda: other.reclaim(QUEUE).returned, description="the lease runs out")
    [again] = take(other, 1).leases
    assert slow.settle(QUEUE, [settlement(lost.tag, result=b"late")]) == [SettleAnswer.LOST]
    assert client.get("celery-task-meta-job-1") is None
    assert other.settle(QUEUE, [settlement(again.tag, result=b"in time")]) == [SettleAnswer.SETTLED]
    assert client.get("celery-task-meta-job-1") == b"in time"


def test_settling_twice_does_nothing_the_second_time(client: redis.Redis, broker: Broker) -> None:
    push(client, "message")
    [lease] = take(broker, 1).leases
    broker.settle(QUEUE, [settlement(lease.tag, result=b"first")])
    assert broker.settle(QUEUE, [settlement(lease.tag, result=b"second")]) == [SettleAnswer.LOST]
    assert client.get("celery-task-meta-job-1") == b"first"


def test_a_result_that_is_there_already_is_never_overwritten(client: redis.Redis, broker: Broker) -> None:
    push(client, "message")
    [lease] = take(broker, 1).leases
    client.set("celery-task-meta-job-1", "cancelled", ex=60)
    assert broker.settle(QUEUE, [settlement(lease.tag)]) == [SettleAnswer.ENDED_BEFORE]
    assert client.get("celery-task-meta-job-1") == b"cancelled"
    assert held_count(client) == 0


def test_a_settle_that_comes_again_since_its_answer_was_lost_is_settled_and_told_once(
    client: redis.Redis, broker: Broker
) -> None:
    push(client, "message")
    [lease] = take(broker, 1).leases
    assert broker.settle(QUEUE, [settlement(lease.tag)]) == [SettleAnswer.SETTLED]
    with client.pubsub() as pubsub:  # type: ignore[no-untyped-call]  # redis-py leaves it untyped
        pubsub.subscribe("celery-task-meta-job-1")
        wait_until(lambda: pubsub.get_message(timeout=0.1), description="the subscription is confirmed")
        assert broker.settle(QUEUE, [settlement(lease.tag)]) == [SettleAnswer.SETTLED]
        assert broker.settle(QUEUE, [settlement(lease.tag, result=None)]) == [SettleAnswer.LOST]
        client.publish("celery-task-meta-job-1", "the end")
        assert pubsub.get_message(timeout=5)["data"] == b"the end"


def test_tags_are_not_given_out_again_by_a_server_that_lost_its_last_writes(
    client: redis.Redis, broker: Broker
) -> None:
    push(client, "one", "two")
    before = {lease.tag for lease in take(broker, 2).leases}
    client.flushdb()
    push(client, "three", "four")
    after = {lease.tag for lease in take(broker, 2).leases}
    assert min(map(int, after)) > max(map(int, before))


def test_renewals_give_up_within_the_lease_and_find_a_new_connection(server_url: str, client: redis.Redis) -> None:
    with Proxy(urlsplit(server_url).port or 0) as proxy:
        behind = Broker(proxy.url, "worker-a", lease_s=2.0, read_timeout_s=30.0)
        push(client, "message")
        take(behind, 1)
        assert behind.renew([QUEUE]) == [True]
        assert proxy.abandon() == 2
        begin = time.monotonic()
        with pytest.raises(BrokerUnavailable):
            behind.renew([QUEUE])
        assert behind.renew([QUEUE]) == [True]
        assert time.monotonic() - begin < 2.0
        behind.close()


def test_after_one_timeout_no_other_silent_connection_is_tried(server_url: str, client: redis.Redis) -> None:
    with Proxy(urlsplit(server_url).port or 0) as proxy:
        behind = Broker(proxy.url, "worker-a", read_timeout_s=0.5)
        waiters = [threading.Thread(target=behind.wait, args=(QUEUE, 0, 0.2)) for _ in range(3)]
        for waiter in waiters:
            waiter.start()
        for waiter in waiters:
            waiter.join()
        assert proxy.abandon() == 3
        with pytest.raises(BrokerUnavailable):
            behind.held_tags(QUEUE)
        assert behind.held_tags(QUEUE) == []
        behind.close()


def test_a_waiter_whose_server_becomes_a_replica_finds_it_unavailable(client: redis.Redis, broker: Broker) -> None:
    faults: list[BaseException] = []

    def wait() -> None:
        try:
            broker.wait(QUEUE, 0, 10)
        except BrokerUnavailable as error:
            faults.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    wait_until(lambda: client.info("clients")["blocked_clients"] == 1, description="it waits")
    client.replicaof("127.0.0.1", free_port())
    try:
        waiter.join(5)
        with pytest.raises(BrokerUnavailable):
            broker.check_server()
    finally:
        client.replicaof("NO", "ONE")
    assert "UNBLOCKED" in str(faults)
    broker.check_server()


def test_follow_ups_are_queued_with_the_result_and_only_by_the_holder(client: redis.Redis, broker: Broker) -> None:
    push(client, "message")
    [lease] = take(broker, 1).leases
    follow_ups = (FollowUp(f"{QUEUE}:next", b"a"), FollowUp(f"{QUEUE}:next", b"b"))
    job = Settlement(lease.tag, "job-1", b"{}", recorded=False, follow_ups=follow_ups)
    broker.settle(QUEUE, [job])
    broker.settle(QUEUE, [job])
    assert client.lrange(f"{QUEUE}:next", 0, -1) == [b"b", b"a"]


@pytest.mark.parametrize(
    ("stored", "answer", "queued"),
    [
        (b'{"status": "REVOKED", "result": null}', SettleAnswer.REVOKED, [b"revoked"]),
        (b'{"status":"REVOKED","result":null}', SettleAnswer.REVOKED, [b"revoked"]),
        (b'{"status": "SUCCESS", "result": "\\"status\\": \\"REVOKED\\""}', SettleAnswer.ENDED_BEFORE, []),
    ],
)
def test_of_a_job_that_was_revoked_meanwhile_follows_what_follows_that(
    client: redis.Redis, broker: Broker, stored: bytes, answer: SettleAnswer, queued: list[bytes]
) -> None:
    push(client, "message")
    [lease] = take(broker, 1).leases
    client.set("celery-task-meta-job-1", stored, ex=60)
    follow_ups, if_revoked = (FollowUp(f"{QUEUE}:next", b"a"),), (FollowUp(f"{QUEUE}:next", b"revoked"),)
    job = Settlement(lease.tag, "job-1", b"{}", recorded=False, follow_ups=follow_ups, if_revoked=if_revoked)
    assert broker.settle(QUEUE, [job]) == [answer]
    assert client.lrange(f"{QUEUE}:next", 0, -1) == queued
    assert client.get("celery-task-meta-job-1") == stored


def test_settle_of_a_batch_answers_each_job_on_its_own(client: redis.Redis, broker: Broker) -> None:
    push(client, "one", "two", "three")
    tags = [lease.tag for lease in take(broker, 3).leases]
    broker.release(QUEUE, [tags[1]])
    answers = broker.settle(QUEUE, [settlement(tag, f"job-{i}") for i, tag in enumerate(tags)])
    assert answers == [SettleAnswer.SETTLED, SettleAnswer.LOST, SettleAnswer.SETTLED]


def test_an_ignored_result_is_not_stored(client: redis.Redis, broker: Broker) -> None:
    push(client, "message")
    [lease] = take(broker, 1).leases
    assert broker.settle(QUEUE, [settlement(lease.tag, result=None)]) == [SettleAnswer.SETTLED]
    assert client.get("celery-task-meta-job-1") is None


def test_released_messages_return_to_the_front_in_their_order_with_the_same_attempt(
    client: redis.Redis, broker: Broker
) -> None:
    push(client, "one", "two", "three", "four")
    tags = [lease.tag for lease in take(broker, 3).leases]
    assert broker.release(QUEUE, tags) == 3
    leases = take(broker, 10).leases
    assert [lease.message for lease in leases] == [b"one", b"two", b"three", b"four"]
    assert {lease.attempt for lease in leases} == {1}


def test_released_messages_keep_their_priority(client: redis.Redis, broker: Broker) -> None:
    push(client, "low", queue=LOW)
    [lease] = take(broker, 1).leases
    push(client, "high")
    broker.release(QUEUE, [lease.tag])
    assert texts(broker) == ["high", "low"]


def test_reclaim_leaves_live_leases_alone(client: redis.Redis, make_broker: MakeBroker) -> None:
    push(client, "message")
    take(make_broker("alive"), 1)
    assert make_broker("other").reclaim(QUEUE).returned == 0


def test_reclaimed_messages_return_to_the_front_with_their_attempt_counted(
    client: redis.Redis, make_broker: MakeBroker
) -> None:
    push(client, "one", "two", "three")
    take(make_broker("dead", lease_s=0.05), 2)
    other = make_broker("other")
    wait_until(lambda: other.reclaim(QUEUE).returned == 2, description="the dead worker's leases run out")
    leases = [lease for _ in range(3) for lease in take(other, 10).leases]
    assert [(lease.attempt, lease.message) for lease in leases] == [(2, b"one"), (2, b"two"), (1, b"three")]


def test_the_attempt_is_counted_whatever_the_message_holds(client: redis.Redis, make_broker: MakeBroker) -> None:
    tricky = '9:9:{"headers": {"attempt": 7}, "x": "\\u0000:1:"}\x00:'
    push(client, tricky)
    take(make_broker("dead", lease_s=0.05), 1)
    other = make_broker("other")
    wait_until(lambda: other.reclaim(QUEUE).returned, description="the dead worker's lease runs out")
    [lease] = take(other, 1).leases
    assert (lease.attempt, lease.message) == (2, tricky.encode())


def test_a_message_out_of_attempts_passes_to_the_reclaimer_who_holds_it(
    client: redis.Redis, make_broker: MakeBroker
) -> None:
    push(client, "killer")
    take(make_broker("dead", lease_s=0.05, max_attempts=1), 1)
    other = make_broker("other", max_attempts=1)
    exhausted: list[Lease] = []

    def reclaimed() -> bool:
        exhausted.extend(other.reclaim(QUEUE).exhausted)
        return bool(exhausted)

    wait_until(reclaimed, description="the lease runs out")
    assert [(lease.attempt, lease.message) for lease in exhausted] == [(1, b"killer")]
    assert take(other, 1).leases == []
    assert other.settle(QUEUE, [settlement(exhausted[0].tag)]) == [SettleAnswer.SETTLED]


def test_renewed_leases_are_not_reclaimed(client: redis.Redis, make_broker: MakeBroker) -> None:
    alive, other = make_broker("alive", lease_s=0.4), make_broker("other")
    push(client, "long")
    [lease] = take(alive, 1).leases
    end = time.monotonic() + 1.2
    while time.monotonic() < end:
        assert alive.renew([QUEUE]) == [True]
        assert other.reclaim(QUEUE).returned == 0
    assert alive.settle(QUEUE, [settlement(lease.tag)]) == [SettleAnswer.SETTLED]


def test_renew_says_that_a_reclaimed_holder_is_no_holder(client: redis.Redis, make_broker: MakeBroker) -> None:
    frozen, other = make_broker("frozen", lease_s=0.05), make_broker("other")
    push(client, "message")
    take(frozen, 1)
    wait_until(lambda: other.reclaim(QUEUE).returned, description="the frozen worker's lease runs out")
    assert frozen.renew([QUEUE, "infer.other"]) == [False, False]


def test_start_refuses_lost_and_ended_jobs_and_notes_the_others(client: redis.Redis, broker: Broker) -> None:
    push(client, "one", "two", "three")
    tags = [lease.tag for lease in take(broker, 3).leases]
    broker.release(QUEUE, [tags[0]])
    client.set("celery-task-meta-job-1", "ended", ex=60)
    answers = broker.start(QUEUE, [Start(tag, f"job-{i}", True, 1) for i, tag in enumerate(tags)])
    assert answers == [StartAnswer.LOST, StartAnswer.ENDED, StartAnswer.RUN]
    assert client.get("sheaf:started:job-0") is None
    assert str(client.get("sheaf:started:job-2")).startswith("b'1:")
    assert held_count(client) == 1


def test_delayed_messages_come_back_when_due_and_not_before(client: redis.Redis, broker: Broker) -> None:
    push(client, "later", "much later")
    soon, late = (lease.tag for lease in take(broker, 2).leases)
    now = time.time()
    assert broker.schedule(QUEUE, [(soon, now + 0.2), (late, now + 3600)]) == 2
    assert broker.due(QUEUE) == 0
    assert held_count(client) == 0
    wait_until(lambda: broker.due(QUEUE), description="the first message becomes due")
    assert texts(broker) == ["later"]


def test_held_tags_tell_what_a_lost_answer_left_behind(client: redis.Redis, broker: Broker) -> None:
    push(client, *map(str, range(12)))
    tags = [lease.tag for lease in take(broker, 12).leases]
    assert broker.held_tags(QUEUE) == tags


def test_wait_returns_when_a_message_arrives_and_takes_nothing(client: redis.Redis, broker: Broker) -> None:
    answers: list[bool] = []
    waiters = [threading.Thread(target=lambda: answers.append(broker.wait(QUEUE, 3, 10))) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    wait_until(lambda: client.info("clients")["blocked_clients"] == 3, description="three clients wait")
    push(client, "message", queue=f"{QUEUE}\x06\x163")
    for waiter in waiters:
        waiter.join(5)
    assert answers == [True, True, True]
    assert texts(broker) == ["message"]


def test_wait_ends_without_a_message(client: redis.Redis, broker: Broker) -> None:
    assert broker.wait(QUEUE, 0, 0.05) is False


def test_a_full_server_can_still_be_drained(client: redis.Redis, make_broker: MakeBroker) -> None:
    worker, other = make_broker("worker", lease_s=0.05), make_broker("other")
    push(client, *(f"message {i}" for i in range(6)))
    client.config_set("maxmemory", 1)
    try:
        take(worker, 3)
        wait_until(lambda: other.reclaim(QUEUE).returned == 3, description="the lease runs out")
        run, back, later = (lease for _ in range(3) for lease in take(other, 3).leases)
        assert other.renew([QUEUE]) == [True]
        assert other.start(QUEUE, [Start(run.tag, "job-1", True, 1)]) == [StartAnswer.RUN]
        assert other.settle(QUEUE, [settlement(run.tag)]) == [SettleAnswer.SETTLED]
        assert other.release(QUEUE, [back.tag]) == 1
        assert other.schedule(QUEUE, [(later.tag, 0.0)]) == 1
        assert other.due(QUEUE) == 1
    finally:
        client.config_set("maxmemory", 0)
    assert sum(len(take(other, 10).leases) for _ in range(3)) == 5


@pytest.mark.parametrize(
    ("info", "accepted"),
    [
        ({"redis_version": "6.0.16"}, False),
        ({"redis_version": "6.2.0"}, True),
        ({"redis_version": "7.0.15"}, True),
        ({"redis_version": "7.2.4", "valkey_version": "7.2.0"}, True),
        ({"redis_version": "7.2.4", "valkey_version": "9.1.2"}, True),
    ],
)
def test_a_server_that_is_too_old_is_refused(info: dict[str, object], accepted: bool) -> None:
    if accepted:
        check_server_info(info)
    else:
        with pytest.raises(UnsupportedServer, match=r"6\.0\.16.*Redis 6\.2"):
            check_server_info(info)


def test_the_running_server_is_accepted(broker: Broker) -> None:
    broker.check_server()


def test_a_message_whose_worker_was_lost_is_leased_alone(client: redis.Redis, make_broker: MakeBroker) -> None:
    push(client, "a", "b")
    take(make_broker("dead", lease_s=0.05), 2)
    push(client, "c")
    other = make_broker("other")
    wait_until(lambda: other.reclaim(QUEUE).returned == 2, description="the lease runs out")
    leased = [[(lease.message, lease.attempt) for lease in take(other, 10).leases] for _ in range(4)]
    assert leased == [[(b"a", 2)], [(b"b", 2)], [(b"c", 1)], []]


def test_a_message_that_was_only_given_back_is_leased_with_others(client: redis.Redis, broker: Broker) -> None:
    push(client, "a", "b", "c")
    tags = [lease.tag for lease in take(broker, 2).leases]
    broker.release(QUEUE, tags)
    assert [lease.message for lease in take(broker, 10).leases] == [b"a", b"b", b"c"]
