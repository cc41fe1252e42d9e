"""The broker for one event loop, as the settings name it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from broker import AsyncBroker
from configs import Settings


@asynccontextmanager
async def open_broker(settings: Settings, queues: Sequence[str] = ()) -> AsyncIterator[AsyncBroker]:
    """Needs no server until it is used. How fast `queues` are drained is watched meanwhile."""
    client = await AsyncBroker.open(
        settings.broker.server_url,
        key_prefix=settings.broker.key_prefix,
        max_queue_depth=settings.broker.max_queue_depth,
        result_ttl_s=settings.api.result_ttl_s,
        read_timeout_s=settings.broker.read_timeout_s,
        queues=queues,
    )
    try:
        yield client
    finally:
        await client.close()
