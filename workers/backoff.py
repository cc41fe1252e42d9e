"""How long to wait before trying the broker again."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from typing import TypeVar

from broker import BrokerUnavailable

T = TypeVar("T")

#: Pauses grow from the first to the last, seconds.
FIRST_S = 0.05
LONGEST_S = 5.0


class Backoff:
    """Exponential pauses with full jitter, so that many workers do not return all at once.

    Source: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """

    def __init__(self) -> None:
        self._failures = 0

    def reset(self) -> None:
        self._failures = 0

    def wait(self, interrupted: threading.Event) -> None:
        """Pause, longer after each failure; returns at once when `interrupted` is set."""
        interrupted.wait(self.pause_s())

    def pause_s(self) -> float:
        """The next pause, for those who wait in some other way."""
        ceiling = min(LONGEST_S, FIRST_S * 2**self._failures)
        self._failures = min(self._failures + 1, 16)
        return random.uniform(FIRST_S, max(FIRST_S, ceiling))


def persist(call: Callable[[], T], giving_up: threading.Event, log: logging.Logger, waiting: str) -> T:
    """What `call` returns, however long the broker is away; each time it is, `log` tells `waiting` and the cause.

    Raises `BrokerUnavailable` once `giving_up` is set.
    """
    backoff = Backoff()
    while True:
        try:
            return call()
        except BrokerUnavailable as error:
            if giving_up.is_set():
                raise
            log.warning(waiting, extra={"cause": str(error)})
            backoff.wait(giving_up)
