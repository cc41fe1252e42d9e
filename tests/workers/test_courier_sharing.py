"""How a courier's places and turns are shared between hosts and owners, on a real server, calling real receivers."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from broker.deliveries import DeliveryState
from broker.message import WEBHOOKS
from broker.webhooks import Notification
from tests.conftest import wait_until
from tests.receiver import Receiver, Reply
from tests.workers.post import Post
from workers.courier.pause import Reason

#: Longer than anything here is waited for: what hangs does so for the whole of a test.
FOREVER: dict[str, Any] = {"timeout_s": 300, "allow": ["127.0.0.0/8", "::ffff:127.0.0.0/104", "localhost"]}


@contextmanager
def mute() -> Iterator[int]:
    """Something that takes connections and never answers, at every address of this machine; its port."""
    with socket.create_server(("", 0), backlog=2000) as server:
        yield int(server.getsockname()[1])


def flood(post: Post, port: int, *, owner: str, hosts: int, each: int) -> list[Notification]:
    urls = [f"http://127.1.{host // 250}.{1 + host % 250}:{port}/" for host in range(hosts)]
    return [post.tell(url, owner=owner) for url in urls for _ in range(each)]


def test_hosts_that_hang_delay_no_other_host(post: Post) -> None:
    """cog#2229, seen from the queue: a dead receiver holds nobody else's slot."""
    with Receiver(address="127.0.0.2") as dead:
        hanging = dead.answer("/hangs", Reply(hang=True))
        with post.courier(**FOREVER, max_per_host=8, max_in_flight=128) as courier:
            for _ in range(300):
                post.tell(hanging)
            begin = time.monotonic()
            post.over(*(post.tell() for _ in range(20)))
            assert time.monotonic() - begin < 3
            assert len(dead.calls("/hangs")) == 4
            courier.hurry()
    assert post.client.llen(WEBHOOKS) + post.put_aside() == 300


def test_many_deliveries_to_one_host_are_made_a_few_at_a_time(post: Post) -> None:
    told = [post.tell() for _ in range(60)]
    with post.courier(max_per_host=4):
        deliveries = post.over(*told)
    assert all(len(delivery.attempts) == 1 for delivery in deliveries)
    assert len(post.receiver.calls()) == 60


def test_a_host_that_fails_in_a_row_is_left_alone_until_a_probe_succeeds(post: Post) -> None:
    url = post.receiver.answer("/ill", 500)
    told = [post.tell(url) for _ in range(3)]
    with post.courier(breaker_failures=3, breaker_open_s=1, retry_schedule_s=(0,) * 9):
        wait_until(lambda: post.metric("sheaf_webhook_breakers_open") == 1, description="its breaker opens")
        before = len(post.receiver.calls("/ill"))
        more = [post.tell(url) for _ in range(20)]
        wait_until(lambda: post.put_aside() >= 20, description="what came is put off")
        assert len(post.receiver.calls("/ill")) <= before + 1
        assert sum(post.attempts(one) == 0 for one in more) >= 19
        post.receiver.answer("/ill", 200)
        deliveries = post.over(*told, *more)
        wait_until(lambda: post.metric("sheaf_webhook_breakers_open") == 0, description="its breaker closes")
    assert {delivery.state for delivery in deliveries} == {DeliveryState.DELIVERED}


def test_what_is_put_off_for_longer_than_all_its_attempts_would_take_has_failed(post: Post) -> None:
    url = post.receiver.answer("/ill", 500)
    with post.courier(breaker_failures=1, breaker_open_s=600, retry_schedule_s=(0,)):
        post.over(post.tell(url))
        old = replace(post.tell(url), job_id="old", at=time.time() - 7200)
        post.client.lpush(WEBHOOKS, old.encode())
        [delivery] = post.over(old)
    assert delivery.attempts[0].error == "not called any more: its host failed all the time"
    assert len(post.receiver.calls("/ill")) == 1


def test_a_host_that_hangs_keeps_no_places_but_those_of_its_calls(post: Post) -> None:
    url = post.receiver.answer("/hangs", Reply(hang=True))
    with post.courier(**FOREVER, max_per_host=4) as courier:
        for _ in range(8):
            post.tell(url)
        wait_until(lambda: post.in_flight() > 2, description="some wait for their turn")
        wait_until(lambda: post.in_flight() == 2, description="who waited is put off")
        assert len(post.receiver.calls("/hangs")) == 2
        courier.hurry()


def test_a_hosts_turns_are_shared_by_all_spellings_of_its_address(post: Post) -> None:
    with Receiver() as other, post.courier(**FOREVER, max_per_host=4) as courier:
        ports = [receiver.port for receiver in (post.receiver, other)]
        for receiver in (post.receiver, other):
            receiver.answer("/hangs", Reply(hang=True))
        for host in ("127.0.0.1", "[::ffff:127.0.0.1]", "[0:0::FFFF:7F00:1]"):
            for port in ports:
                for _ in range(5):
                    post.tell(f"http://{host}:{port}/hangs")
        wait_until(lambda: post.put_aside() == 28, description="all but two are put off")
        assert sum(len(receiver.calls("/hangs")) for receiver in (post.receiver, other)) == 2
        courier.hurry()


def test_a_hosts_breaker_is_that_of_all_spellings_of_its_name(post: Post) -> None:
    post.receiver.answer("/ill", 500)
    with post.courier(**FOREVER, breaker_failures=1, breaker_open_s=600, retry_schedule_s=(0,)):
        post.over(post.tell(f"http://localhost:{post.receiver.port}/ill"))
        told = post.tell(f"HTTP://LocalHost:{post.receiver.port}/ill")
        wait_until(lambda: post.put_aside() == 1, description="it is put off")
    seen = post.delivery(told)
    assert seen is not None
    assert (seen.attempts, seen.put_off and seen.put_off.reason) == ((), Reason.FAILING)
    assert len(post.receiver.calls("/ill")) == 1


def test_an_owners_failing_receiver_delays_no_other_owners_on_its_host(post: Post) -> None:
    ill = post.receiver.answer("/ill", 500)
    with post.courier(breaker_failures=3, breaker_open_s=600, retry_schedule_s=(0, 300)):
        for _ in range(12):
            post.tell(ill, owner="failing")
        wait_until(lambda: post.metric("sheaf_webhook_breakers_open") == 1, description="that owner's breaker opens")
        deliveries = post.over(*(post.tell(owner="well") for _ in range(20)))
        assert {len(delivery.attempts) for delivery in deliveries} == {1}
        assert post.metric("sheaf_webhook_breakers_open") == 1
        later = post.tell(owner="failing")
        wait_until(lambda: post.reason(later), description="that owner's are put off, to wherever on the host")


@pytest.mark.parametrize("owners", [1, 3])
def test_owners_whose_calls_hang_delay_no_other_owners_on_their_host(post: Post, owners: int) -> None:
    hanging = post.receiver.answer("/hangs", Reply(hang=True))
    with post.courier(**FOREVER, max_per_host=16) as courier:
        for owner in range(owners):
            for _ in range(50):
                post.tell(hanging, owner=f"hanging-{owner}")
        wait_until(lambda: not post.client.llen(WEBHOOKS), description="all are leased")
        begin = time.monotonic()
        post.over(*(post.tell() for _ in range(20)))
        assert time.monotonic() - begin < 5
        assert len(post.receiver.calls("/hangs")) < 16
        courier.hurry()
    assert post.client.llen(WEBHOOKS) + post.put_aside() == 50 * owners


def test_however_many_owners_call_it_a_host_gets_no_more_calls_than_it_may(post: Post) -> None:
    hanging = post.receiver.answer("/hangs", Reply(hang=True))
    with post.courier(**FOREVER, max_per_host=4) as courier:
        for number in range(40):
            post.tell(hanging, owner=f"owner-{number % 10}")
        wait_until(lambda: post.put_aside() == 36, description="all but as many as it may get are put off")
        assert len(post.receiver.calls("/hangs")) == 4
        courier.hurry()


@pytest.mark.parametrize("most, expected", [(1, 1), (6, 3)])
def test_an_owner_alone_has_half_of_a_hosts_turns_and_one_at_least(post: Post, most: int, expected: int) -> None:
    hanging = post.receiver.answer("/hangs", Reply(hang=True))
    with post.courier(**FOREVER, max_per_host=most) as courier:
        told = [post.tell(hanging) for _ in range(20)]
        wait_until(lambda: post.put_aside() == 20 - expected, description="the others are put off")
        assert len(post.receiver.calls("/hangs")) == expected
        assert {post.reason(one) for one in told} == {None, Reason.HOST_BUSY}
        courier.hurry()


@pytest.mark.parametrize("owners", [1, 3])
def test_owners_whose_hosts_all_hang_keep_nobody_elses_delivery_waiting(post: Post, owners: int) -> None:
    """However many hosts an owner makes up: one name server is enough for any number of names."""
    with mute() as port, post.courier(**FOREVER, max_in_flight=64) as courier:
        for owner in range(owners):
            flood(post, port, owner=f"flood-{owner}", hosts=100, each=3)
        wait_until(lambda: not post.client.llen(WEBHOOKS), description="the floods are begun or put off")
        assert post.in_flight() >= 32
        post.over(*(post.tell() for _ in range(20)))
        assert 32 <= post.in_flight() < 64
        courier.hurry()
    assert post.client.llen(WEBHOOKS) + post.put_aside() == 300 * owners


def test_a_delivery_behind_another_owners_flood_comes_long_before_the_flood_ends(post: Post) -> None:
    with mute() as port:
        flood(post, port, owner="flood", hosts=500, each=10)
        told = post.tell()
        with post.courier(**FOREVER, max_in_flight=64) as courier:
            post.over(told)
            courier.hurry()
    assert post.client.llen(WEBHOOKS) + post.put_aside() == 5000


def test_jobs_of_nobody_in_particular_are_one_owners(post: Post) -> None:
    with mute() as port, post.courier(**FOREVER, max_in_flight=16) as courier:
        told = flood(post, port, owner="", hosts=30, each=2)
        wait_until(lambda: post.in_flight() == 8 and post.put_aside() == 52, description="they have half of all places")
        assert [post.reason(one) for one in told].count(Reason.OWNER_BUSY) == 52
        post.over(post.tell())
        courier.hurry()


def test_an_owner_alone_has_its_deliveries_made_though_they_are_more_than_its_places(post: Post) -> None:
    told = [post.tell(f"http://127.0.0.1:{post.receiver.port}/hook") for _ in range(200)]
    with post.courier(max_in_flight=4):
        deliveries = post.over(*told)
    assert all(len(delivery.attempts) == 1 for delivery in deliveries)
    assert len(post.receiver.calls()) == 200
