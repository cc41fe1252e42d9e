"""The secrets that sign an owner's webhooks. They are made when they are first needed, so that every call is signed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, cast

import orjson
import redis

from broker.faults import translated
from broker.keys import Keys


@dataclass(frozen=True, slots=True)
class Secrets:
    """The secret that signs now, and the one before it. `rotated_at` is Unix seconds."""

    current: str
    previous: str | None = None
    rotated_at: float | None = None

    def in_use(self, now: float, previous_valid_s: float) -> tuple[str, ...]:
        """The secrets that sign at Unix time `now`: for a while after a rotation the previous one does too."""
        if self.previous is None or self.rotated_at is None or now >= self.rotated_at + previous_valid_s:
            return (self.current,)
        return (self.current, self.previous)

    def encode(self) -> bytes:
        return orjson.dumps(self)

    @classmethod
    def decode(cls, raw: bytes) -> Self:
        return cls(**orjson.loads(raw))


class WebhookSecrets:
    """All owners' secrets. Raises `BrokerUnavailable`."""

    def __init__(self, client: redis.Redis, keys: Keys, new_secret: Callable[[], str]) -> None:
        self._client = client
        self._keys = keys
        self._new_secret = new_secret

    def of(self, owners: Sequence[str]) -> list[Secrets]:
        """The secrets of these owners, made where there were none."""
        names = [self._keys.webhook_secrets(owner) for owner in owners]
        with translated(self._client):
            found = cast("list[bytes | None]", self._client.mget(names))
        return [
            self._made(name) if secrets is None else Secrets.decode(secrets)
            for name, secrets in zip(names, found, strict=True)
        ]

    def known(self, owner: str) -> bool:
        """Whether this owner has a secret."""
        with translated(self._client):
            return bool(self._client.exists(self._keys.webhook_secrets(owner)))

    def rotate(self, owner: str) -> Secrets:
        """A new secret for this owner; the present one becomes the previous one, and the one before it is void."""
        name = self._keys.webhook_secrets(owner)
        rotated: list[Secrets] = []

        def turn(pipe: redis.client.Pipeline) -> None:
            present = cast("bytes | None", pipe.get(name))
            previous = None if present is None else Secrets.decode(present).current
            rotated.append(Secrets(self._new_secret(), previous, None if previous is None else time.time()))
            pipe.multi()
            pipe.set(name, rotated[-1].encode())

        with translated(self._client):
            self._client.transaction(turn, name)
        return rotated[-1]

    def _made(self, name: str) -> Secrets:
        with translated(self._client):
            # Somebody else may make them at the same moment.
            self._client.set(name, Secrets(self._new_secret()).encode(), nx=True)
            return Secrets.decode(cast("bytes", self._client.get(name)))
