"""What webhooks are to be told is queued with the result it tells of, once; and the log of deliveries."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import cast

import pytest
import redis

from broker import AsyncBroker, Broker, FollowUp, JobEvent, JobStatus, NewJob, SettleAnswer, Settlement, Webhook
from broker.deliveries import Attempt, Deliveries, Delivery, DeliveryState, Note, NoteAnswer, Postponed, PutOff
from broker.jobs import Event
from broker.message import WEBHOOKS, decode
from broker.webhooks import Notification, delivery_id
from tests.broker.conftest import QUEUE, MakeBroker, new_job, take

HOOK = Webhook("https://example.org/hook", owner="me", request_id="r-1")
TOLD = Notification(JobEvent.SUCCEEDED, "job-1", "echo", HOOK.url, "me", "r-1", 1000.0)


@pytest.fixture
async def front(server_url: str) -> AsyncIterator[AsyncBroker]:
    front = await AsyncBroker.open(server_url)
    yield front
    await front.close()


@pytest.fixture
def log(server_url: str) -> Iterator[Deliveries]:
    with Deliveries(server_url, new_secret=_numbered()) as log:
        yield log


def _numbered() -> Callable[[], str]:
    made: list[str] = []

    def make() -> str:
        made.append(f"whsec_{len(made)}")
        return made[-1]

    return make


def told(client: redis.Redis) -> list[Event]:
    return [Notification.decode(raw).event for raw in cast("list[bytes]", client.lrange(WEBHOOKS, 0, -1))]


def follow_up(job: NewJob, status: JobStatus) -> tuple[FollowUp, ...]:
    notification = Notification.of(job.webhook, status, job.id, "echo", 1.0)
    return () if notification is None else (FollowUp(WEBHOOKS, notification.encode()),)


def settle_as(broker: Broker, job: NewJob, status: JobStatus) -> SettleAnswer:
    """Ends the job that is first in the queue, as a worker does that has not heard of any revoke."""
    [lease] = take(broker, 1).leases
    assert decode(lease.message).webhook == job.webhook
    settlement = Settlement(lease.tag, job.id, b'{"status":"SUCCESS"}', recorded=True)
    settlement.follow_ups = follow_up(job, status)
    settlement.if_revoked = follow_up(job, JobStatus.CANCELLED)
    return broker.settle(QUEUE, [settlement])[0]


async def test_a_result_and_what_its_webhook_is_told_are_stored_together(
    front: AsyncBroker, client: redis.Redis, broker: Broker
) -> None:
    job = new_job(webhook=HOOK)
    await front.submit(job)
    assert settle_as(broker, job, JobStatus.SUCCEEDED) is SettleAnswer.SETTLED
    assert told(client) == [JobEvent.SUCCEEDED]
    client.delete(WEBHOOKS)


async def test_a_cancelled_job_is_told_of_once_whoever_drops_it_later(
    front: AsyncBroker, client: redis.Redis, broker: Broker
) -> None:
    job = new_job(webhook=HOOK)
    await front.submit(job)
    await front.cancel(job.id)
    assert told(client) == [JobEvent.CANCELLED]
    assert settle_as(broker, job, JobStatus.SUCCEEDED) is SettleAnswer.REVOKED
    assert told(client) == [JobEvent.CANCELLED]
    client.delete(WEBHOOKS)


async def test_a_job_that_celery_revoked_is_told_of_by_whoever_drops_it(
    front: AsyncBroker, client: redis.Redis, broker: Broker
) -> None:
    job = new_job(webhook=HOOK)
    await front.submit(job)
    celerys = {"status": "REVOKED", "result": {"exc_type": "TaskRevokedError", "exc_message": ['"sheaf":']}}
    client.set(f"celery-task-meta-{job.id}", json.dumps(celerys), ex=60)
    assert settle_as(broker, job, JobStatus.SUCCEEDED) is SettleAnswer.REVOKED
    assert told(client) == [JobEvent.CANCELLED]
    client.delete(WEBHOOKS)


async def test_a_job_that_expired_in_the_queue_is_told_of_when_it_is_read(
    front: AsyncBroker, client: redis.Redis
) -> None:
    job = new_job(webhook=HOOK, expires_at=time.time() - 1)
    await front.submit(job)
    for _ in range(2):
        state = await front.fetch(job.id)
        assert state is not None
        assert state.status is JobStatus.EXPIRED
    assert told(client) == [JobEvent.EXPIRED]
    client.delete(WEBHOOKS)


async def test_an_end_that_nobody_asked_for_is_told_to_nobody(
    front: AsyncBroker, client: redis.Redis, broker: Broker
) -> None:
    for job in (new_job(), new_job(webhook=replace(HOOK, events=(JobEvent.FAILED,)))):
        await front.submit(job)
        settle_as(broker, job, JobStatus.SUCCEEDED)
        await front.submit(cancelled := replace(job, id=f"{job.id}-2"))
        await front.cancel(cancelled.id)
        take(broker, 1)
    assert told(client) == []


def test_messages_of_lost_workers_can_be_leased_together(make_broker: MakeBroker, client: redis.Redis) -> None:
    courier = make_broker()
    client.lpush(f"sheaf:returned:{WEBHOOKS}:0", *(b"7:message" for _ in range(3)))
    client.lpush(WEBHOOKS, b"new")
    assert [lease.attempt for lease in courier.lease(WEBHOOKS, [4, 0, 0, 0], together=True).leases] == [7, 7, 7, 1]


def held(broker: Broker, client: redis.Redis, *notifications: Notification) -> list[bytes]:
    for notification in notifications:
        client.lpush(WEBHOOKS, notification.encode())
    return [lease.tag for lease in broker.lease(WEBHOOKS, [9, 0, 0, 0], together=True).leases]


def test_an_attempt_and_when_the_next_one_is_due_are_noted_together(
    broker: Broker, client: redis.Redis, log: Deliveries
) -> None:
    [tag] = held(broker, client, TOLD)
    attempt = Attempt(1001.0, 12.5, 500, "it answered 500")
    delivery = Delivery(TOLD, DeliveryState.PENDING, "{}", (attempt,), 1, 4e9)
    assert log.note(broker.session, [Note(tag, delivery, 60)]) == [NoteAnswer.NOTED]
    assert log.get(TOLD.id) == delivery
    assert [one.due_at for one in broker.delayed(WEBHOOKS, 9)] == [4e9]
    assert broker.held_tags(WEBHOOKS) == []
    assert 0 < client.ttl(f"sheaf:delivery:{TOLD.id}") <= 60


def test_who_has_lost_its_lease_notes_nothing(
    broker: Broker, make_broker: MakeBroker, client: redis.Redis, log: Deliveries
) -> None:
    [tag] = held(broker, client, TOLD)
    delivery = Delivery(TOLD, DeliveryState.DELIVERED, "{}")
    assert log.note("another session", [Note(tag, delivery, 60)]) == [NoteAnswer.LOST]
    assert log.get(TOLD.id) is None


def test_a_delivery_that_is_sent_again_leaves_its_earlier_rounds_behind(
    broker: Broker, client: redis.Redis, log: Deliveries
) -> None:
    [first] = held(broker, client, TOLD)
    pending = Delivery(TOLD, DeliveryState.PENDING, "{}", (), 3, 4e9)
    log.note(broker.session, [Note(first, pending, 60)])
    again = log.resend(TOLD.id, 60)
    assert again is not None
    assert (again.state, again.tries, again.notification.round) == (DeliveryState.PENDING, 0, 1)
    late, of_this_round = held(broker, client, TOLD)
    assert log.note(broker.session, [Note(late, pending, 60)]) == [NoteAnswer.SUPERSEDED]
    assert log.note(broker.session, [Note(of_this_round, again, 60)]) == [NoteAnswer.NOTED]
    assert log.get(TOLD.id) == again
    assert log.resend("msg_unknown", 60) is None


def test_the_newest_deliveries_are_listed_first(broker: Broker, client: redis.Redis, log: Deliveries) -> None:
    events = [replace(TOLD, job_id=f"job-{n}", at=1000.0 + n) for n in range(3)]
    tags = held(broker, client, *events)
    notes = [
        Note(tag, Delivery(event, DeliveryState.DELIVERED, "{}"), 60) for tag, event in zip(tags, events, strict=True)
    ]
    log.note(broker.session, notes)
    assert [one.notification.job_id for one in log.newest(2)] == ["job-2", "job-1"]


async def test_a_job_knows_its_deliveries(
    front: AsyncBroker, broker: Broker, client: redis.Redis, log: Deliveries
) -> None:
    [tag] = held(broker, client, TOLD)
    assert await front.deliveries.of("job-1", JobEvent) == []
    delivery = Delivery(TOLD, DeliveryState.DELIVERED, "{}")
    log.note(broker.session, [Note(tag, delivery, 60)])
    assert await front.deliveries.of("job-1", JobEvent) == [delivery]


async def test_what_an_attempt_needs_is_read_together(front: AsyncBroker, client: redis.Redis, log: Deliveries) -> None:
    job = new_job(webhook=HOOK)
    await front.submit(job)
    known, unknown = log.load([replace(TOLD, job_id=job.id), TOLD])
    assert known.subject is not None
    assert known.subject.webhook == HOOK
    assert (known.delivery, unknown.delivery, unknown.subject) == (None, None, None)
    assert known.secrets == unknown.secrets
    assert known.secrets.current == "whsec_0"


def test_a_secret_is_made_once_and_its_predecessor_signs_for_a_while(client: redis.Redis, log: Deliveries) -> None:
    [first] = log.secrets.of(["me"])
    assert log.secrets.of(["me", "me"]) == [first, first]
    rotated = log.secrets.rotate("me")
    assert log.secrets.of(["me"]) == [rotated]
    now = time.time()
    assert rotated.in_use(now, 60) == (rotated.current, first.current)
    assert rotated.in_use(now + 61, 60) == (rotated.current,)
    assert log.secrets.of(["another"])[0].current not in (rotated.current, first.current)


def postponed(tag: bytes, until: float) -> Postponed:
    return Postponed(tag, TOLD.id, until, "its host is busy: wait")


async def test_readers_see_until_when_and_why_a_delivery_is_put_off_before_its_first_attempt(
    front: AsyncBroker, broker: Broker, client: redis.Redis, log: Deliveries
) -> None:
    [tag] = held(broker, client, TOLD)
    assert await front.deliveries.of("job-1", JobEvent, TOLD) == [Delivery(TOLD, DeliveryState.PENDING, "")]
    until = round(time.time()) + 30.0
    assert log.put_off(broker.session, [postponed(tag, until)]) == 1
    seen = Delivery(TOLD, DeliveryState.PENDING, "", (), 0, until, PutOff(until, "its host is busy: wait"))
    assert log.get(TOLD.id) == seen
    assert await front.deliveries.of("job-1", JobEvent, TOLD) == [seen]
    assert await front.deliveries.of("job-1", JobEvent) == []
    assert [one.due_at for one in broker.delayed(WEBHOOKS, 9)] == [until]
    assert broker.held_tags(WEBHOOKS) == []
    assert 30 < client.ttl(f"sheaf:put-off:{TOLD.id}") <= 91


async def test_what_was_put_off_before_an_attempt_is_not_told_after_it(
    front: AsyncBroker, broker: Broker, client: redis.Redis, log: Deliveries
) -> None:
    tag, *again = held(broker, client, TOLD, TOLD, TOLD)
    until = round(time.time()) + 30.0
    log.put_off(broker.session, [postponed(tag, until)])
    attempt = Attempt(until + 1, 12.5, 500, "it answered 500")
    retried = Delivery(TOLD, DeliveryState.PENDING, "{}", (attempt,), 1, until + 5)
    failed = Delivery(TOLD, DeliveryState.FAILED, "{}", (attempt, attempt), 2)
    for tag, later in zip(again, (retried, failed), strict=True):
        assert log.note(broker.session, [Note(tag, later, 60)]) == [NoteAnswer.NOTED]
        assert log.get(TOLD.id) == later
        assert log.newest(1) == await front.deliveries.of("job-1", JobEvent) == [later]


def test_a_retry_that_is_put_off_is_listed_with_the_later_time(
    broker: Broker, client: redis.Redis, log: Deliveries
) -> None:
    first, again = held(broker, client, TOLD, TOLD)
    due = round(time.time()) - 1.0
    log.note(broker.session, [Note(first, Delivery(TOLD, DeliveryState.PENDING, "{}", (), 1, due), 60)])
    log.put_off(broker.session, [postponed(again, due + 60)])
    [seen] = log.newest(1)
    assert (seen.next_attempt_at, seen.put_off and seen.put_off.reason) == (due + 60, "its host is busy: wait")
    assert log.resend(TOLD.id, 60) is not None
    resent = log.get(TOLD.id)
    assert resent is not None
    assert (resent.next_attempt_at, resent.put_off) == (None, None)
    client.delete(WEBHOOKS)


def test_who_has_lost_its_lease_puts_nothing_off(broker: Broker, client: redis.Redis, log: Deliveries) -> None:
    [tag] = held(broker, client, TOLD)
    assert log.put_off("another session", [postponed(tag, time.time() + 30)]) == 0
    assert log.get(TOLD.id) is None
    assert broker.held_tags(WEBHOOKS) == [tag]


def test_the_id_of_a_delivery_is_the_uuid_of_its_jobs_end() -> None:
    space = uuid.UUID("6d0f5c0a-52fd-5b43-8a3c-0b1a5e2f7d11")
    for number, event in enumerate([*JobEvent] * 8):
        expected = uuid.uuid5(space, f"job-{number}/{event}")
        assert delivery_id(f"job-{number}", event) == f"msg_{expected.hex}"
