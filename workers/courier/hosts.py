"""Takes care that no host is called too often at once, and that calls which fail or hang hold up none of another's.

A host has so many calls at a time, which owners share; and each owner a few deliveries that wait for their turn there,
for a moment. What is beyond that is put off: back to the broker until there may be a turn. An owner's calls to a host
that fail time after time open that owner's breaker: all it has for the host is put off, but for probes. Being put off
counts as no attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from weakref import WeakValueDictionary

from workers.courier.breaker import Breaker
from workers.courier.pace import Pace
from workers.courier.pause import Pause, PutOff, Reason
from workers.courier.schedule import Answer
from workers.courier.turns import Turns

#: Deliveries of an owner that wait here for a turn, per turn that it may have when alone.
WAITING_PER_TURN = 4
#: Longest wait here for a turn, seconds. Who waits has a place of the courier, which a host that hangs would keep.
MAX_WAIT_S = 1.0
#: Routes that are remembered; beyond that only those that are used.
MAX_ROUTES = 10_000

#: Is told how the call of a turn ended.
Ended = Callable[[Answer], None]


class Route:
    """One owner's way to one host, whatever the port."""

    def __init__(self, owner: str, turns: Turns, most_waiting: int, breaker: Breaker) -> None:
        self._owner = owner
        self._turns = turns
        self._most_waiting = most_waiting
        self._breaker = breaker
        self._present = 0
        self._pace = Pace()

    @property
    def is_open(self) -> bool:
        """Its breaker is open."""
        return self._breaker.is_open

    @property
    def is_used(self) -> bool:
        """Something is called there, or about to be."""
        return self._present > 0

    @property
    def is_idle(self) -> bool:
        """There is nothing to remember of it."""
        return not self._present and self._breaker.is_untouched

    def pause(self) -> Pause | None:
        """For how long one more is to be put off; None when it may come."""
        seconds = self._breaker.put_off_s()
        if seconds is not None:
            return Pause(seconds, Reason.FAILING)
        return self._until_turn() if self._turns.waiting(self._owner) >= self._most_waiting else None

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """For a call and what leads to it. Raises `PutOff`, at once or after a while."""
        pause = self.pause()
        if pause is not None:
            raise PutOff(pause)
        probe = self._breaker.begin()
        self._present += 1
        try:
            await self._wait()
            try:
                if self.is_open and not probe:
                    raise PutOff(Pause(self._breaker.until_probe_s(), Reason.FAILING))
                self._pace.began()
                yield
            finally:
                self._turns.give_back(self._owner)
        finally:
            self._present -= 1
            if probe:
                self._breaker.probed()

    def ended(self, answer: Answer) -> None:
        """A call has ended."""
        self._pace.ended(answer.duration_s)
        self._breaker.ended(answer)

    async def _wait(self) -> None:
        """Until there is a turn."""
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                await self._turns.take(self._owner)
        except TimeoutError:
            raise PutOff(self._until_turn()) from None

    def _until_turn(self) -> Pause:
        return Pause(self._pace.until_turn_s(max(1, self._turns.held(self._owner))), Reason.HOST_BUSY)


class Hosts:
    """The routes of which there is anything to remember."""

    def __init__(self, turns: int, breaker_failures: int, breaker_open_s: float) -> None:
        self._most_turns = turns
        self._new_breaker = partial(Breaker, failures=breaker_failures, open_s=breaker_open_s)
        self._routes: dict[tuple[str, str], Route] = {}
        #: By host, as long as one of its routes is remembered.
        self._turns: WeakValueDictionary[str, Turns] = WeakValueDictionary()
        #: How many breakers are open.
        self.open = 0

    def pause(self, host: str, owner: str) -> Pause | None:
        """For how long one more delivery of this owner to this host is to be put off; None when it may come."""
        route = self._routes.get((host, owner))
        return None if route is None else route.pause()

    @asynccontextmanager
    async def turn(self, host: str, owner: str) -> AsyncIterator[Ended]:
        """For a call and what leads to it. Raises `PutOff`, at once or after a while."""
        route = self._route(host, owner)
        try:
            async with route.turn():
                yield partial(self._ended, route)
        finally:
            if route.is_idle:
                self._routes.pop((host, owner), None)

    def _ended(self, route: Route, answer: Answer) -> None:
        was_open = route.is_open
        route.ended(answer)
        self.open += route.is_open - was_open

    def _route(self, host: str, owner: str) -> Route:
        route = self._routes.get((host, owner))
        if route is None:
            if len(self._routes) >= MAX_ROUTES:
                self._routes = {known: route for known, route in self._routes.items() if route.is_used}
                self.open = sum(route.is_open for route in self._routes.values())
            turns = self._turns.setdefault(host, Turns(self._most_turns))
            most_waiting = WAITING_PER_TURN * max(1, self._most_turns // 2)
            route = Route(owner, turns, most_waiting, self._new_breaker(host, owner))
            self._routes[host, owner] = route
        return route
