"""Celery's control messages as its Redis transport broadcasts them, read for the one that must not be missed: `revoke`.

A worker hears it through Celery. This is for processes that are up while no worker is.

Source: the fanout exchange `celery.pidbox` of kombu's Redis transport, and `celery.app.control.Control.revoke`.
"""

from __future__ import annotations

import binascii

import orjson


def channel(key_prefix: str, db: int) -> str:
    """The pub/sub channel that control messages of this database are broadcast on."""
    return f"{key_prefix}/{db}.celery.pidbox"


def revoked_ids(raw: bytes) -> list[str]:
    """The ids that a control message revokes for all workers; none for any other message."""
    try:
        envelope = orjson.loads(raw)
        body = envelope["body"]
        if envelope["properties"].get("body_encoding") == "base64":
            body = binascii.a2b_base64(body)
        command = orjson.loads(body)
        if command["method"] != "revoke" or command.get("destination"):
            return []
        named = command["arguments"]["task_id"]
    except (KeyError, TypeError, ValueError, AttributeError):
        return []
    return [job_id for job_id in (named if isinstance(named, list) else [named]) if isinstance(job_id, str)]
