"""Which of the client library's errors mean that the server cannot serve now, and what becomes of the connections."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

import redis
import redis.asyncio

from broker.errors import BrokerUnavailable

T = TypeVar("T")

#: What a server adds to an error that a script ran into: of no use to a caller.
_SCRIPT = re.compile(r"\s*script: .*", re.DOTALL)

#: First words of error answers that end by themselves: a server that loads, fails over, is full or is read-only.
#: UNBLOCKED is what a blocking command is told when its server turns into a replica.
PASSING = (
    "OOM",
    "LOADING",
    "READONLY",
    "UNBLOCKED",
    "MASTERDOWN",
    "MISCONF",
    "NOREPLICAS",
    "BUSY",
    "CLUSTERDOWN",
    "TRYAGAIN",
)


@contextmanager
def translated(client: redis.Redis | None = None) -> Iterator[None]:
    """Raise `BrokerUnavailable` for every fault that is the server's and passes; let the others through as they are.

    When no answer came, the connections that lie idle in `client` are closed: if one was cut without a word, they most
    likely were too, and each would cost another timeout.
    """
    try:
        yield
    except redis.TimeoutError as error:
        if client is not None:
            client.connection_pool.disconnect(inuse_connections=False)
        raise BrokerUnavailable(str(error) or "no answer in time") from error
    except (redis.ConnectionError, OSError) as error:
        raise BrokerUnavailable(str(error) or type(error).__name__) from error
    except redis.ResponseError as error:
        if is_passing(error):
            raise BrokerUnavailable(_SCRIPT.sub("", str(error))) from error
        raise


@asynccontextmanager
async def translated_async(client: redis.asyncio.Redis) -> AsyncIterator[None]:
    """`translated` for a client of an event loop."""
    try:
        with translated(), _lost_connections():
            yield
    except BrokerUnavailable as error:
        if isinstance(error.__cause__, redis.TimeoutError):
            await client.connection_pool.disconnect(inuse_connections=False)
        raise


async def tried_twice(command: Callable[[], Awaitable[T]]) -> T:
    """What `command` returns; it is run once more, on another connection, when the pooled one was dead."""
    try:
        with _lost_connections():
            return await command()
    except redis.ConnectionError:
        return await command()


@contextmanager
def _lost_connections() -> Iterator[None]:
    """Raise the client library's error for what uvloop raises on a connection that was reset since its last use."""
    try:
        yield
    except RuntimeError as error:
        if "handler is closed" not in str(error):
            raise
        raise redis.ConnectionError("the connection was reset") from error


def is_passing(error: redis.ResponseError) -> bool:
    """True for an error answer that the same command may not get a little later."""
    # redis-py takes the first word off where it has a class for it, and a script's error carries it further inside.
    if isinstance(error, (redis.ReadOnlyError, redis.OutOfMemoryError)):
        return True
    return any(word in str(error) for word in PASSING)
