"""Takes care that no host is called too often at once, and that none which fails holds up the others.

A host has so many calls at a time, and a few deliveries that wait for their turn, for a moment. What is beyond that is
put off: back to the broker until there may be a turn. A host that fails time after time has its breaker opened:
everything for it is put off, but for one call now and then that finds out whether it is back. Being put off counts as
no attempt.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from workers.courier.pace import Pace
from workers.courier.schedule import Answer

log = logging.getLogger(__name__)

#: Deliveries that wait here for a turn, per turn of a host.
WAITING_PER_TURN = 4
#: Longest wait here for a turn, seconds. Who waits has a place of the courier, which a host that hangs would keep.
MAX_WAIT_S = 1.0
#: Longest time for which a breaker stays open, seconds.
MAX_OPEN_S = 600.0
#: Hosts that are remembered; beyond that only those that are used.
MAX_HOSTS = 10_000


class PutOff(Exception):
    """Not now: in so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"in {seconds:g} s")
        self.seconds = seconds


class Host:
    """One host, whatever the port. Clock: `time.monotonic`."""

    def __init__(self, name: str, turns: int, breaker_failures: int, breaker_open_s: float) -> None:
        self._name = name
        self._turns = turns
        self._free = asyncio.Semaphore(turns)
        self._present = 0
        self._breaker_failures = breaker_failures
        self._breaker_open_s = breaker_open_s
        self._failures = 0
        self._open_until = 0.0
        self._open_s = breaker_open_s
        self._probing = False
        self._pace = Pace()

    @property
    def is_open(self) -> bool:
        """Its breaker is open: it is left alone, but for probes."""
        return self._failures >= self._breaker_failures

    @property
    def is_used(self) -> bool:
        """Something is called there, or about to be."""
        return self._present > 0

    @property
    def is_idle(self) -> bool:
        """There is nothing to remember of it."""
        return not self._present and not self._failures

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """For a call and what leads to it. Raises `PutOff`, at once or after a while."""
        probe = self._enter()
        try:
            await self._wait()
            try:
                if self.is_open and not probe:
                    raise PutOff(self._until_probe_s())
                self._pace.began()
                yield
            finally:
                self._free.release()
        finally:
            self._present -= 1
            if probe:
                self._probing = False

    def ended(self, answer: Answer) -> None:
        """A call has ended."""
        self._pace.ended(answer.duration_s)
        was_open = self.is_open
        if not answer.blames_host:
            if was_open:
                log.info("A host answers again.", extra={"host": self._name})
            self._failures, self._open_s = 0, self._breaker_open_s
            return
        self._failures += 1
        if self.is_open and time.monotonic() >= self._open_until:
            if was_open:
                self._open_s = min(2 * self._open_s, max(MAX_OPEN_S, self._breaker_open_s))
            self._open_until = time.monotonic() + self._open_s
            extra = {"host": self._name, "failures": self._failures, "open_s": self._open_s, "error": answer.error}
            log.warning("A host fails, and is left alone for a while.", extra=extra)

    def put_off_s(self) -> float | None:
        """For how long one more is to be put off; None when it may come."""
        if self.is_open:
            return self._until_probe_s() if self._probing or time.monotonic() < self._open_until else None
        return self._pace.until_turn_s(self._turns) if self._present >= self._turns * (1 + WAITING_PER_TURN) else None

    def _enter(self) -> bool:
        """Counts one more that is here; True for a probe. Raises `PutOff`."""
        seconds = self.put_off_s()
        if seconds is not None:
            raise PutOff(seconds)
        probe = self._probing = self.is_open
        self._present += 1
        return probe

    async def _wait(self) -> None:
        """Until there is a turn."""
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                await self._free.acquire()
        except TimeoutError:
            raise PutOff(self._pace.until_turn_s(self._turns)) from None

    def _until_probe_s(self) -> float:
        """A little later than the probe, so that what it says is known."""
        left = max(0.0, self._open_until - time.monotonic())
        return left + random.uniform(0.1, 0.3) * self._breaker_open_s


class Hosts:
    """The hosts of which there is anything to remember."""

    def __init__(self, turns: int, breaker_failures: int, breaker_open_s: float) -> None:
        self._make: Callable[[str], Host] = lambda name: Host(name, turns, breaker_failures, breaker_open_s)
        self._hosts: dict[str, Host] = {}

    def of(self, name: str) -> Host:
        host = self._hosts.get(name)
        if host is None:
            if len(self._hosts) >= MAX_HOSTS:
                self._hosts = {known: host for known, host in self._hosts.items() if host.is_used}
            host = self._hosts[name] = self._make(name)
        return host

    def put_off_s(self, name: str) -> float | None:
        """For how long one more delivery to this host is to be put off; None when it may come."""
        host = self._hosts.get(name)
        return None if host is None else host.put_off_s()

    def forget_idle(self, name: str) -> None:
        if name in self._hosts and self._hosts[name].is_idle:
            del self._hosts[name]

    @property
    def open(self) -> int:
        """How many breakers are open."""
        return sum(host.is_open for host in self._hosts.values())
