"""Asks the broker until it answers."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from broker import BrokerUnavailable, QueueFull

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Longest pause between attempts to reach the broker, seconds.
MAX_BACKOFF_S = 5.0


async def patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """The broker's answer, however long it is away or full."""
    failures = 0
    while True:
        try:
            return await ask()
        except QueueFull as error:
            pause_s = min(error.retry_after_s, MAX_BACKOFF_S)
        except BrokerUnavailable as error:
            if not failures:
                log.warning("The broker is away; rows go on when it is back.", extra={"cause": str(error)})
            pause_s = min(MAX_BACKOFF_S, 0.1 * 2 ** min(failures, 10))
        failures += 1
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
