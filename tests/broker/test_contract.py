"""The queue contract as a whole: any sequence of its verbs, beside a model of it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import hypothesis.strategies as st
import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from broker import AsyncBroker, Broker, Lease, Priority, SettleAnswer, Settlement
from broker.keys import PRIORITY_STEPS
from broker.message import decode
from tests.broker.conftest import QUEUE, new_job
from tests.conftest import wait_until

OWNERS = st.sampled_from(["", "a", "b", "c"])
PRIORITIES = st.sampled_from([Priority.HIGH, Priority.LOW])
ROOMS = st.lists(st.integers(0, 9), min_size=4, max_size=4)
LEASE_S = 0.001
#: So that a handful of jobs is a flood.
SHORT_LIST = 3


@dataclass
class Level:
    """One priority: what waits, oldest first."""

    #: `(attempt, id)`, next one first.
    returned: list[tuple[int, str]] = field(default_factory=list)
    #: By owner; in what order owners take turns is not modelled.
    fresh: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def __len__(self) -> int:
        return len(self.returned) + sum(map(len, self.fresh.values()))


class Queue(RuleBasedStateMachine):
    """Several owners submit, one worker leases, settles and gives back, another dies with what it has leased."""

    url: str

    @initialize()
    def begin(self) -> None:
        self.client = redis.Redis.from_url(self.url)
        self.client.flushall()
        self.runner = asyncio.Runner()
        self.front = self.runner.run(AsyncBroker.open(self.url, max_queue_depth=0))
        self.worker = Broker(self.url, "worker")
        self.levels = [Level() for _ in PRIORITY_STEPS]
        self.held: list[Lease] = []
        self.made = 0

    def teardown(self) -> None:
        try:
            self.drain()
        finally:
            self.runner.run(self.front.close())
            self.runner.close()
            self.worker.close()
            self.client.close()

    def drain(self) -> None:
        # What a purge leaves behind goes with the next message.
        for priority in (Priority.HIGH, Priority.LOW):
            self.submit("", priority, 1)
        while any(self.levels):
            self.take(self.worker, [5, 5, 5, 5])
        keys = cast("list[bytes]", self.client.keys("*"))
        left = {key.decode() for key in keys if self.client.ttl(key) == -1}
        assert left <= {f"sheaf:{kind}" for kind in _STAYING}, left

    @rule(owner=OWNERS, priority=PRIORITIES, count=st.integers(1, 8))
    def submit_some(self, owner: str, priority: Priority, count: int) -> None:
        self.submit(owner, priority, count)

    @rule(rooms=ROOMS)
    def lease(self, rooms: list[int]) -> None:
        self.held += self.take(self.worker, rooms)

    @precondition(lambda self: self.held)
    @rule(count=st.integers(1, 9))
    def release(self, count: int) -> None:
        given_back, self.held = self.held[:count], self.held[count:]
        assert self.worker.release(QUEUE, [lease.tag for lease in given_back]) == len(given_back)
        for lease in reversed(given_back):
            self.level(lease).returned.insert(0, (lease.attempt, decode(lease.message).id))

    @precondition(lambda self: self.held)
    @rule(count=st.integers(1, 9))
    def settle(self, count: int) -> None:
        ended, self.held = self.held[:count], self.held[count:]
        answers = self.worker.settle(QUEUE, [_settlement(lease) for lease in ended])
        assert answers == [SettleAnswer.SETTLED] * len(ended)

    @rule(rooms=ROOMS)
    def die(self, rooms: list[int]) -> None:
        """A worker that dies as soon as it has leased; what is out of attempts fails."""
        dying = Broker(self.url, "dying", lease_s=LEASE_S)
        lost = self.take(dying, rooms)
        dying.close()
        if not lost:
            return
        moved: list[Lease] = []
        counts: list[int] = []

        def all_moved() -> bool:
            reclaimed = self.worker.reclaim(QUEUE)
            moved.extend(reclaimed.exhausted)
            counts.append(reclaimed.returned)
            return len(moved) + sum(counts) == len(lost)

        wait_until(all_moved, description="the lease runs out")
        assert {lease.message for lease in moved} == {lease.message for lease in lost if lease.attempt == 3}
        self.held += moved
        for lease in reversed(lost):
            if lease.attempt < 3:
                self.level(lease).returned.insert(0, (lease.attempt + 1, decode(lease.message).id))

    @rule()
    def purge(self) -> None:
        """Celery's purge knows Celery's lists."""
        for level, name in zip(self.levels, self.worker.keys.queue(QUEUE).waiting, strict=True):
            for message in cast("list[bytes]", self.client.lrange(name, 0, -1)):
                decoded = decode(message)
                level.fresh[decoded.owner].remove(decoded.id)
            self.client.delete(name)

    @invariant()
    def depths_are_right(self) -> None:
        depths = self.runner.run(self.front.overview.queue_depths([QUEUE]))
        assert [depth.depth for depth in depths] == list(map(len, self.levels))

    def submit(self, owner: str, priority: Priority, count: int) -> None:
        ids = [f"{owner}-{self.made + i}" for i in range(count)]
        self.made += count

        async def submit_all() -> None:
            jobs = [new_job(id=job_id, owner=owner, priority=priority) for job_id in ids]
            await asyncio.gather(*(self.front.submit(job) for job in jobs))

        self.runner.run(submit_all())
        self.levels[PRIORITY_STEPS.index(priority)].fresh[owner] += ids

    def take(self, broker: Broker, rooms: list[int]) -> list[Lease]:
        """Lease, and hold the answer against the model."""
        before = list(map(len, self.levels))
        answer = broker.lease(QUEUE, rooms)
        alone = any(lease.attempt > 1 for lease in answer.leases)
        taken = [0] * len(self.levels)
        for lease in answer.leases:
            taken[PRIORITY_STEPS.index(lease.step)] += 1
            level, message = self.level(lease), decode(lease.message)
            if level.returned:
                assert level.returned.pop(0) == (lease.attempt, message.id)
            else:
                assert level.fresh[message.owner].pop(0) == message.id
        assert not alone or len(answer.leases) == 1
        assert [lease.step for lease in answer.leases] == sorted(lease.step for lease in answer.leases)
        for level, room, waited, count in zip(self.levels, rooms, before, taken, strict=True):
            stopped = alone or (level.returned and level.returned[0][0] > 1)
            assert count <= room
            assert stopped or count == min(room, waited), (room, waited, count)
        assert answer.waiting == tuple(map(len, self.levels))
        assert answer.leases or not any(map(min, rooms, before))
        return answer.leases

    def level(self, lease: Lease) -> Level:
        return self.levels[PRIORITY_STEPS.index(lease.step)]


_STAYING = (f"holders:{QUEUE}", f"lease-sequence:{QUEUE}", f"held:{QUEUE}:worker", f"served:{QUEUE}")


def _settlement(lease: Lease) -> Settlement:
    return Settlement(lease.tag, decode(lease.message).id, b"{}", recorded=False)


@pytest.fixture
def short_lists(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr("broker.submitting.FAIR_FROM", SHORT_LIST)
        yield


@pytest.mark.usefixtures("short_lists")
def test_any_sequence_of_verbs_loses_nothing_and_keeps_each_owners_order(server_url: str) -> None:
    machine = type("QueueHere", (Queue,), {"url": server_url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
