"""Many waiters, one pub/sub connection: each hears when its job's result is published.

A result published while the connection is down is never heard, so after each reconnect every waiter is woken to look
for itself. What a waiter learns is only "look now": the truth is in the stored result.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import redis.asyncio
from redis.asyncio.client import PubSub

from broker.errors import BrokerUnavailable
from broker.faults import translated
from broker.keys import Keys

log = logging.getLogger(__name__)

#: Seconds of silence after which the connection is asked whether it lives, and again until it is given up.
SILENCE_S = 5.0
#: Longest pause between attempts to reconnect, seconds.
MAX_BACKOFF_S = 2.0


class Waiter:
    """One wait for one job."""

    __slots__ = ("_woken", "listening", "payload")

    def __init__(self) -> None:
        self._woken = asyncio.Event()
        #: Set once the server has confirmed the subscription.
        self.listening = asyncio.Event()
        #: The published result, when that is what woke the waiter.
        self.payload: bytes | None = None

    def wake(self, payload: bytes | None) -> None:
        self.payload = payload
        self._woken.set()

    async def wait(self, timeout_s: float) -> bool:
        """True when woken, False after the timeout. May be called again."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._woken.wait()
        woken = self._woken.is_set()
        self._woken.clear()
        return woken


class ResultListener:
    """Owns the process' pub/sub connection and the map from channel to waiters."""

    def __init__(self, client: redis.asyncio.Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self._pubsub: PubSub | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiters: dict[bytes, set[Waiter]] = {}

    def __len__(self) -> int:
        return sum(len(waiters) for waiters in self._waiters.values())

    @asynccontextmanager
    async def waiter(self, job_id: str) -> AsyncIterator[Waiter]:
        """A waiter that hears of the job's result from now on. Raises `BrokerUnavailable` when it cannot listen."""
        channel = self._keys.result(job_id).encode()
        waiter = Waiter()
        waiters = self._waiters.setdefault(channel, set())
        waiters.add(waiter)
        try:
            with translated():
                async with asyncio.timeout(SILENCE_S):
                    await self._subscribe(channel, waiter, first=len(waiters) == 1)
            yield waiter
        finally:
            waiters.discard(waiter)
            if not waiters and self._waiters.get(channel) is waiters:
                del self._waiters[channel]
                if self._pubsub is not None:
                    with suppress(BrokerUnavailable), translated():
                        await self._pubsub.unsubscribe(channel)

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            with suppress(asyncio.CancelledError):
                await self._reader
        if self._pubsub is not None:
            await self._pubsub.aclose()  # type: ignore[no-untyped-call]  # redis-py leaves it untyped

    async def _subscribe(self, channel: bytes, waiter: Waiter, *, first: bool) -> None:
        if self._pubsub is None:
            self._pubsub = self._client.pubsub()
        await self._pubsub.subscribe(channel)
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read(self._pubsub))
        await waiter.listening.wait()

    async def _read(self, pubsub: PubSub) -> None:
        """Hand messages on, for as long as the process lives; reconnect when the connection is gone or mute."""
        failures = 0
        while True:
            try:
                with translated():
                    await self._hear(pubsub)
                failures = 0
            except BrokerUnavailable as error:
                failures += 1
                log.warning(
                    "The connection that listens for results is lost; reconnecting.", extra={"cause": str(error)}
                )
                await asyncio.sleep(min(MAX_BACKOFF_S, 0.05 * 2**failures) * random.uniform(0.5, 1.0))
                await self._reconnect(pubsub)

    async def _hear(self, pubsub: PubSub) -> None:
        message = await pubsub.get_message(timeout=SILENCE_S)
        if message is None:
            await pubsub.ping()
            message = await pubsub.get_message(timeout=SILENCE_S)
            if message is None:
                raise BrokerUnavailable(f"no word from it for {2 * SILENCE_S:.0f} s")
        waiters = self._waiters.get(message["channel"], ()) if message["channel"] else ()
        if message["type"] == "subscribe":
            for waiter in waiters:
                waiter.listening.set()
        elif message["type"] == "message":
            for waiter in waiters:
                waiter.wake(message["data"])

    async def _reconnect(self, pubsub: PubSub) -> None:
        with suppress(BrokerUnavailable), translated():
            if pubsub.connection is not None:
                await pubsub.connection.disconnect()
            # Connecting subscribes again to all channels that were subscribed.
            await pubsub.connect()  # type: ignore[no-untyped-call]  # redis-py leaves it untyped
            for waiters in self._waiters.values():
                for waiter in waiters:
                    waiter.wake(None)
