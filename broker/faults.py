"""Which of the client library's errors mean that the server cannot serve now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import redis

from broker.errors import BrokerUnavailable

#: First words of error answers that end by themselves: a server that loads, fails over, is full or is read-only.
PASSING = ("OOM", "LOADING", "READONLY", "MASTERDOWN", "MISCONF", "NOREPLICAS", "BUSY", "CLUSTERDOWN", "TRYAGAIN")

#: What uvloop says when something is written to a connection that has been lost a moment ago.
LOST_TRANSPORT = "the handler is closed"


@contextmanager
def lost_transports() -> Iterator[None]:
    """Raise the client library's own error where uvloop has a `RuntimeError` of its own for a lost connection."""
    try:
        yield
    except RuntimeError as error:
        if LOST_TRANSPORT not in str(error):
            raise
        raise redis.ConnectionError(str(error)) from error


@contextmanager
def translated() -> Iterator[None]:
    """Raise `BrokerUnavailable` for every fault that is the server's and passes; let the others through as they are."""
    try:
        with lost_transports():
            yield
    except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
        raise BrokerUnavailable(str(error) or type(error).__name__) from error
    except redis.ResponseError as error:
        if is_passing(error):
            raise BrokerUnavailable(str(error)) from error
        raise


def is_passing(error: redis.ResponseError) -> bool:
    """True for an error answer that the same command may not get a little later."""
    # redis-py takes the first word off where it has a class for it, and a script's error carries it further inside.
    if isinstance(error, (redis.ReadOnlyError, redis.OutOfMemoryError)):
        return True
    return any(word in str(error) for word in PASSING)
