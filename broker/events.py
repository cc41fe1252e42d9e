"""Task events as Celery's Redis transport broadcasts them, written without kombu.

kombu's producer costs as much for one message as a hundred events do, on the thread that all others wait for.

Source: the fanout exchange `celeryev` of kombu's Redis transport: PUBLISH on `/{db}.{exchange}/{routing key}`, the
envelope being that of the queues; and `celery.events.dispatcher`, whose buffered events are one message with the
key `task.multi`.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import orjson

_EXCHANGE = "celeryev"
_ROUTING_KEY = "task.multi"


def channel(key_prefix: str, db: int) -> str:
    """The pub/sub channel that events of this database are broadcast on."""
    return f"{key_prefix}/{db}.{_EXCHANGE}/{_ROUTING_KEY}"


def encode(events: Sequence[dict[str, object]], hostname: str) -> bytes:
    """One message that holds all `events`, as worker `hostname` sends them."""
    return orjson.dumps(
        {
            "body": orjson.dumps(events).decode(),
            "content-encoding": "utf-8",
            "content-type": "application/json",
            "headers": {"hostname": hostname},
            "properties": {
                "delivery_mode": 1,
                "delivery_info": {"exchange": _EXCHANGE, "routing_key": _ROUTING_KEY},
                "priority": 0,
                "delivery_tag": str(uuid.uuid4()),
            },
        }
    )
