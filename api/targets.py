"""Whether a webhook may have the address that a caller gives; asked before its job is taken.

It is a service to callers, who learn at once of an address that would be refused. What protects is the courier's own
look at each address that it connects to.
"""

from __future__ import annotations

import asyncio
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from webhooks import Policy

#: Seconds that a look-up may take; a name that is not found by then, or not at all, is taken: it may be there later.
LOOKUP_S = 2.0
#: Seconds for which what a name led to is believed.
BELIEVED_S = 10.0
#: Names that are remembered.
MAX_NAMES = 1000
THREADS = 8

_Lookup = asyncio.Future[list[str]]


class TargetCheck:
    """One event loop's look-ups; those who ask for the same name share one."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        # Callers name the same few addresses with each of their jobs.
        self._target = lru_cache(MAX_NAMES)(policy.target)
        self._lookups: dict[str, tuple[float, _Lookup]] = {}
        self._threads = ThreadPoolExecutor(THREADS, "lookup")

    async def check(self, url: str) -> None:
        """Raises `webhooks.Refused`."""
        target = self._target(url)
        if target.trusted or target.address is not None:
            return
        for address in await self._addresses(target.host):
            self._policy.check(address)

    async def _addresses(self, host: str) -> list[str]:
        now = time.monotonic()
        until, lookup = self._lookups.get(host, (0.0, None))
        if lookup is None or now >= until:
            if len(self._lookups) >= MAX_NAMES:
                self._lookups.clear()
            lookup = asyncio.ensure_future(asyncio.get_running_loop().run_in_executor(self._threads, _resolved, host))
            self._lookups[host] = (now + BELIEVED_S, lookup)
        done, _ = await asyncio.wait([lookup], timeout=LOOKUP_S)
        return lookup.result() if done else []


def _resolved(host: str) -> list[str]:
    """The addresses that a name leads to now; none when it leads nowhere."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(address[0]) for *_, address in found]
