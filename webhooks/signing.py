"""The signature of a webhook's call.

Source: Standard Webhooks 1.0, symmetric signatures (`v1`).
"""

from __future__ import annotations

import hmac
import secrets
from base64 import b64decode, b64encode
from collections.abc import Sequence
from hashlib import sha256

PREFIX = "whsec_"
#: Of the specification's 24 to 64.
SECRET_BYTES = 32


def new_secret() -> str:
    """A secret as its owner gets to see it."""
    return PREFIX + b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def signature(whsec: Sequence[str], message_id: str, timestamp: int, body: bytes) -> str:
    """The header `webhook-signature`: one signature for each secret that may be in use at the receiver.

    `timestamp` is Unix seconds, as in the header `webhook-timestamp`.
    """
    signed = f"{message_id}.{timestamp}.".encode() + body
    keys = [b64decode(secret.removeprefix(PREFIX)) for secret in whsec]
    return " ".join(f"v1,{b64encode(hmac.digest(key, signed, sha256)).decode()}" for key in keys)
