"""Access keys: who may call, and what they may do. The broker keeps a hash of each key, never the key.

A key is `sheaf_<id>_<secret>`: the id is no secret and finds the entry, the secret has 256 random bits. So a plain
SHA-256 is enough, nobody can try that many; slow hashes are for passwords that people think up.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Self, cast

import orjson
import redis
import redis.asyncio

from broker.connect import connect
from broker.faults import translated, translated_async, tried_twice
from broker.jobs import Quota, Rate, Webhook
from broker.keys import Keys

log = logging.getLogger(__name__)

PREFIX = "sheaf"
_KEY = re.compile(rf"{PREFIX}_([0-9a-f]{{12}})_([\w-]{{43}})")


class Scope(StrEnum):
    """What a key may be used for."""

    #: Submit jobs, and cancel one's own.
    SUBMIT = "submit"
    #: Read one's own jobs, and the models.
    READ = "read"
    #: Everything, with everybody's jobs.
    ADMIN = "admin"
    #: Scrape /metrics.
    METRICS = "metrics"


@dataclass(frozen=True, slots=True)
class AccessKey:
    """One key, as far as it may be known. Times are Unix seconds."""

    id: str
    #: Whose jobs it submits and reads; several keys may have the same owner.
    owner: str
    #: Hex SHA-256 of the whole key.
    digest: str = field(repr=False)
    scopes: tuple[str, ...]
    #: Names of the priorities that it may submit with.
    priorities: tuple[str, ...]
    created_at: float
    expires_at: float | None = None
    rate: Rate | None = None
    max_in_flight: int | None = None
    #: Who is told of the ends of its jobs that name nobody themselves.
    webhook: Webhook | None = None

    def encode(self) -> bytes:
        return orjson.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes) -> Self:
        known = orjson.loads(text)
        rate = None if known["rate"] is None else Rate(**known["rate"])
        lists = {name: tuple(known[name]) for name in ("scopes", "priorities")}
        return cls(**(known | lists | {"rate": rate, "webhook": Webhook.of_json(known.get("webhook"))}))

    @property
    def shown(self) -> str:
        """Enough of it to be recognised."""
        return f"{PREFIX}_{self.id}_…"

    @property
    def quota(self) -> Quota | None:
        """What may be submitted with it; None for no bounds."""
        bounded = self.rate is not None or self.max_in_flight is not None
        return Quota(self.id, self.rate, self.max_in_flight) if bounded else None

    def allows(self, scope: Scope) -> bool:
        return scope in self.scopes or Scope.ADMIN in self.scopes

    def expired(self, now: float) -> bool:
        return self.expires_at is not None and self.expires_at <= now


def issue(
    owner: str,
    *,
    scopes: Sequence[Scope],
    priorities: Sequence[str],
    rate: Rate | None = None,
    max_in_flight: int | None = None,
    expires_at: float | None = None,
    webhook: Webhook | None = None,
) -> tuple[str, AccessKey]:
    """A new key, and what may be kept of it."""
    key_id = secrets.token_hex(6)
    text = f"{PREFIX}_{key_id}_{secrets.token_urlsafe(32)}"
    known = AccessKey(
        id=key_id,
        owner=owner,
        digest=_digest(text),
        scopes=tuple(scopes),
        priorities=tuple(priorities),
        created_at=time.time(),
        expires_at=expires_at,
        rate=rate,
        max_in_flight=max_in_flight,
        webhook=webhook,
    )
    return text, known


def key_id(text: str) -> str | None:
    """The id of what may be a key; None for what cannot be one."""
    found = _KEY.fullmatch(text)
    return found[1] if found else None


def matches(text: str, known: AccessKey) -> bool:
    """Whether this is the key that is known; takes equally long however much of it is right."""
    return hmac.compare_digest(_digest(text), known.digest)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class KeyRegistry:
    """All keys, for people. Raises `BrokerUnavailable`."""

    def __init__(self, url: str, *, key_prefix: str = "", read_timeout_s: float = 10.0) -> None:
        self._name = Keys(key_prefix).access_keys
        self._client = connect(url, read_timeout_s)

    def add(self, key: AccessKey) -> None:
        with translated(self._client):
            self._client.hset(self._name, key.id, key.encode())

    def all(self) -> list[AccessKey]:
        """The oldest first."""
        with translated(self._client):
            return _decoded(cast("dict[bytes, bytes]", self._client.hgetall(self._name)))

    def revoke(self, key_id: str) -> bool:
        """False when there is no such key."""
        with translated(self._client):
            return bool(self._client.hdel(self._name, key_id))

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AccessKeys:
    """All keys, for an API process."""

    def __init__(self, client: redis.asyncio.Redis, keys: Keys) -> None:
        self._client = client
        self._name = keys.access_keys

    async def all(self) -> list[AccessKey]:
        """Raises `BrokerUnavailable`."""
        async with translated_async(self._client):
            entries = await tried_twice(lambda: self._client.hgetall(self._name))
        return _decoded(cast("dict[bytes, bytes]", entries))


def _decoded(entries: Mapping[bytes, bytes]) -> list[AccessKey]:
    known: list[AccessKey] = []
    for name, text in entries.items():
        try:
            known.append(AccessKey.decode(text))
        except (ValueError, KeyError, TypeError):
            log.warning(
                "An access key cannot be read and opens nothing.", extra={"key_id": name.decode(errors="replace")}
            )
    return sorted(known, key=lambda key: key.created_at)
