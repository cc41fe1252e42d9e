"""Many waiters, one pub/sub connection: each is woken when its job has ended.

Every settle names the jobs that it ended on one channel, which each API process listens to for as long as it lives; so
a wait costs the server nothing. What a waiter learns is only "look now": the truth is in the stored result. A word that
was said while nobody listened is made up for by waking every waiter once the connection stands (again). The same
connection hears what Celery clients revoke.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Self

import redis.asyncio
from redis.asyncio.client import PubSub

from broker import pidbox
from broker.errors import BrokerUnavailable
from broker.faults import translated_async
from broker.keys import Keys

log = logging.getLogger(__name__)

#: Seconds of silence after which the connection is asked whether it lives, and again until it is given up.
SILENCE_S = 5.0
#: Longest pause between attempts to reconnect, seconds.
MAX_BACKOFF_S = 2.0
#: Between the result keys in one message.
SEPARATOR = b"\n"


class Waiter:
    """One wait for one job, while its context is open. Thousands may wait at once: it is little more than a future."""

    __slots__ = ("_all", "_future", "_key", "_woken", "abandoned")

    def __init__(self, key: bytes, all_waiters: dict[bytes, list[Waiter]]) -> None:
        self._key = key
        self._all = all_waiters
        self._woken = False
        self._future: asyncio.Future[None] | None = None
        #: Whoever waited has gone.
        self.abandoned = False

    def __enter__(self) -> Self:
        self._all.setdefault(self._key, []).append(self)
        return self

    def __exit__(self, *_: object) -> None:
        others = self._all[self._key]
        others.remove(self)
        if not others:
            del self._all[self._key]

    def abandon(self) -> None:
        self.abandoned = True
        self.wake()

    def wake(self) -> None:
        self._woken = True
        self._end()

    async def wait(self, timeout_s: float) -> bool:
        """True when woken, False after the timeout. May be called again."""
        if not self._woken:
            loop = asyncio.get_running_loop()
            self._future = loop.create_future()
            timer = loop.call_later(timeout_s, self._end)
            try:
                await self._future
            finally:
                timer.cancel()
                self._future = None
        woken, self._woken = self._woken, False
        return woken

    def _end(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


class ResultListener:
    """Owns the process' pub/sub connection, which one task alone uses, and the map from result key to waiters."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: Keys,
        control_channel: str,
        revoke: Callable[[Sequence[str]], Awaitable[None]],
    ) -> None:
        self._client = client
        self._keys = keys
        self._control_channel = control_channel
        self._revoke = revoke
        self._revoking: set[asyncio.Task[None]] = set()
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self._waiters: dict[bytes, list[Waiter]] = {}

    def __len__(self) -> int:
        return sum(len(waiters) for waiters in self._waiters.values())

    def waiter(self, job_id: str) -> Waiter:
        """A waiter that is woken when the job has ended, and whenever its end may have been missed."""
        self.start()
        return Waiter(self._keys.result(job_id).encode(), self._waiters)

    def wake_all(self) -> None:
        """Every waiter looks for itself."""
        for waiters in self._waiters.values():
            _wake(waiters)

    def start(self) -> None:
        """Listen from now on."""
        if self._task is None:
            self._task = asyncio.create_task(self._listen())

    async def close(self) -> None:
        # redis-py may swallow the cancellation while a connection breaks; the loop then ends at its next turn.
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _listen(self) -> None:
        """Hand news on, for as long as the process lives; on a new connection when the old one is gone or mute."""
        failures = 0
        while not self._closing:
            pubsub = self._client.pubsub()
            try:
                async with translated_async(self._client):
                    await pubsub.subscribe(self._keys.news, self._control_channel)
                    while not self._closing:
                        await self._hear(pubsub)
                        failures = 0
            except BrokerUnavailable as error:
                failures += 1
                log.warning("The connection that listens for results is lost.", extra={"cause": str(error)})
            except Exception:
                failures += 1
                log.exception("Listening for results failed; it goes on with a new connection.")
            finally:
                with suppress(redis.RedisError, OSError):
                    await pubsub.aclose()  # type: ignore[no-untyped-call]  # redis-py leaves it untyped
            await asyncio.sleep(min(MAX_BACKOFF_S, 0.05 * 2 ** min(failures, 10)) * random.uniform(0.5, 1.0))

    async def _hear(self, pubsub: PubSub) -> None:
        message = await pubsub.get_message(timeout=SILENCE_S)
        if message is None:
            await pubsub.ping()
            message = await pubsub.get_message(timeout=SILENCE_S)
            if message is None:
                raise BrokerUnavailable(f"no word from it for {2 * SILENCE_S:.0f} s")
        if message["type"] == "subscribe":
            self.wake_all()
        elif message["type"] != "message":
            return
        elif message["channel"].decode() == self._control_channel:
            self._heed(pidbox.revoked_ids(message["data"]))
        else:
            for key in message["data"].split(SEPARATOR):
                _wake(self._waiters.get(key, ()))

    def _heed(self, revoked: Sequence[str]) -> None:
        if revoked:
            task = asyncio.create_task(self._revoke_logged(revoked))
            self._revoking.add(task)
            task.add_done_callback(self._revoking.discard)

    async def _revoke_logged(self, revoked: Sequence[str]) -> None:
        try:
            await self._revoke(revoked)
        except BrokerUnavailable as error:
            log.warning("A revoke was heard, and the broker is away.", extra={"cause": str(error)})


def _wake(waiters: Sequence[Waiter]) -> None:
    for waiter in waiters:
        waiter.wake()
