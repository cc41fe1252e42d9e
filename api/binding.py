"""Where the API may listen: without any keys, only where this machine alone can reach it."""

from __future__ import annotations

import asyncio
import logging
from ipaddress import ip_address

from broker import AsyncBroker, BrokerUnavailable
from bulk.client import open_broker
from configs import Settings

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
#: Seconds between looks for a broker, and for the first key.
LOOK_EVERY_S = 0.5


def is_loopback(host: str) -> bool:
    """Whether what listens there is reached from this machine alone."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def first_key(settings: Settings) -> None:
    """Return as soon as there is an access key."""
    async with open_broker(settings) as broker:
        while not await _any(broker):  # noqa: ASYNC110  # another process makes it
            await asyncio.sleep(LOOK_EVERY_S)


async def allowed_host(settings: Settings) -> str:
    """`api.host`, or loopback when no keys are in force that would keep strangers out.

    Waits for the broker where that has to be known.
    """
    host = settings.api.host
    if settings.auth.mode == "none" or is_loopback(host):
        return host
    async with open_broker(settings) as broker:
        if await _any(broker):
            return host
    log.warning(
        "There are no keys, so the API listens on loopback only: create one with `sheaf keys create`, and it starts "
        "again where it should listen. `auth.mode: none` lets everybody in.",
        extra={"host": LOOPBACK, "instead_of": host},
    )
    return LOOPBACK


async def _any(broker: AsyncBroker) -> bool:
    while True:
        try:
            return bool(await broker.access.all())
        except BrokerUnavailable as error:
            log.warning("Waiting for the broker, to know whether there are keys.", extra={"cause": str(error)})
            await asyncio.sleep(LOOK_EVERY_S)
