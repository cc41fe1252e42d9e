"""Our signatures, verified by the specification's own library."""

from __future__ import annotations

import time

import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from webhooks import new_secret, signature


def headers(secrets: list[str], body: bytes) -> dict[str, str]:
    now = int(time.time())
    signed = signature(secrets, "msg_1", now, body)
    return {"webhook-id": "msg_1", "webhook-timestamp": str(now), "webhook-signature": signed}


def test_a_call_that_two_secrets_signed_verifies_with_either() -> None:
    first, second = new_secret(), new_secret()
    for secret in (first, second):
        assert Webhook(secret).verify(b'{"a":1}', headers([first, second], b'{"a":1}')) == {"a": 1}


def test_neither_another_secret_nor_another_body_verifies() -> None:
    secret = new_secret()
    signed = headers([secret], b'{"a":1}')
    for key, body in ((new_secret(), b'{"a":1}'), (secret, b'{"a":2}')):
        with pytest.raises(WebhookVerificationError):
            Webhook(key).verify(body, signed)
