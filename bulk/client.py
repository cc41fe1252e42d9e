"""The broker of a bulk run, as the settings name it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from broker import AsyncBroker
from configs import Settings


@asynccontextmanager
async def open_broker(settings: Settings) -> AsyncIterator[AsyncBroker]:
    """Needs no server until it is used."""
    client = await AsyncBroker.open(
        settings.broker.server_url,
        key_prefix=settings.broker.key_prefix,
        max_queue_depth=settings.broker.max_queue_depth,
        result_ttl_s=settings.api.result_ttl_s,
        read_timeout_s=settings.broker.read_timeout_s,
    )
    try:
        yield client
    finally:
        await client.close()
