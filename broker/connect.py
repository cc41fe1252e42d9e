"""From a broker URL to a client: TCP, TLS, unix socket or Sentinel; and the check that the server is new enough.

Every client made here gives up on a silent server after `read_timeout_s` (a half-open connection is noticed in seconds)
and never repeats a command by itself: what may be repeated is known only by the caller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.backoff import NoBackoff
from redis.connection import HiredisRespSerializer
from redis.retry import Retry
from redis.sentinel import Sentinel

from broker.errors import BrokerError, UnsupportedServer

#: Seconds to wait for a connection.
CONNECT_TIMEOUT_S = 5.0
#: Connections of one event loop at most.
MAX_CONNECTIONS = 64
#: `RPOP key count` came with Redis 6.2; Valkey's own numbering starts above it, 7.2 is its first release.
MINIMUM_REDIS = (6, 2)
MINIMUM_VALKEY = (7, 2)

_SCHEMES = ("redis", "rediss", "unix", "sentinel")


@dataclass(frozen=True, slots=True)
class SentinelAddress:
    """What `sentinel://[user:password@]host:26379,host:26379/db?master=name` says."""

    sentinels: tuple[tuple[str, int], ...]
    master: str
    db: int
    username: str | None
    password: str | None

    @classmethod
    def parse(cls, url: str) -> SentinelAddress:
        """Raises `BrokerError` when the URL lacks hosts or the master's name."""
        parts = urlsplit(url)
        credentials, _, hosts = parts.netloc.rpartition("@")
        username, _, password = credentials.partition(":")
        master = parse_qs(parts.query).get("master", [""])[0]
        if not hosts or not master:
            raise BrokerError(f"broker URL {url!r}: write sentinel://host:26379,host:26379/0?master=NAME")
        pairs = [host.rpartition(":") if ":" in host else (host, ":", "26379") for host in hosts.split(",")]
        return cls(
            sentinels=tuple((host, int(port)) for host, _, port in pairs),
            master=master,
            db=int(parts.path.strip("/") or 0),
            username=unquote(username) or None,
            password=unquote(password) or None,
        )


def connect(url: str, read_timeout_s: float, connect_timeout_s: float = CONNECT_TIMEOUT_S) -> redis.Redis:
    """A client for threads. Opens no connection yet."""
    _check_scheme(url)
    options: dict[str, Any] = {
        "socket_timeout": read_timeout_s,
        "socket_connect_timeout": connect_timeout_s,
        "socket_keepalive": True,
        "retry": Retry(NoBackoff(), 0),
    }
    if not url.startswith("sentinel:"):
        return redis.Redis.from_url(url, **_for_scheme(url, options))
    address = SentinelAddress.parse(url)
    sentinel = Sentinel(address.sentinels, sentinel_kwargs=options)  # type: ignore[no-untyped-call]  # redis-py
    master: redis.Redis = sentinel.master_for(  # type: ignore[no-untyped-call]  # redis-py leaves it untyped
        address.master, db=address.db, username=address.username, password=address.password, **options
    )
    return master


class _PackedConnection(redis.asyncio.Connection):
    """Packs commands as redis-py's client for threads does: in C. In Python it was a tenth of a submit."""

    _serializer = HiredisRespSerializer()

    def pack_command(self, *args: Any) -> list[bytes]:
        packed: list[bytes] = self._serializer.pack(*args)
        return packed


def connect_async(url: str, read_timeout_s: float) -> redis.asyncio.Redis:
    """A client for one event loop. Opens no connection yet."""
    _check_scheme(url)
    options: dict[str, Any] = {
        "socket_timeout": read_timeout_s,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_keepalive": True,
        "retry": AsyncRetry(NoBackoff(), 0),
    }
    if not url.startswith("sentinel:"):
        # A burst waits for a connection instead of being refused.
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url,
            # Of plain TCP; the other schemes have classes of their own.
            connection_class=_PackedConnection,
            max_connections=MAX_CONNECTIONS,
            timeout=read_timeout_s,
            **_for_scheme(url, options),
        )
        return redis.asyncio.Redis.from_pool(pool)
    address = SentinelAddress.parse(url)
    sentinel = AsyncSentinel(address.sentinels, sentinel_kwargs=options)  # type: ignore[no-untyped-call]  # redis-py
    master: redis.asyncio.Redis = sentinel.master_for(
        address.master, db=address.db, username=address.username, password=address.password, **options
    )
    return master


def check_server_info(info: dict[str, Any]) -> None:
    """Raise `UnsupportedServer` when `INFO server` tells of a server that is too old."""
    if "valkey_version" in info:
        name, version, minimum = "Valkey", str(info["valkey_version"]), MINIMUM_VALKEY
    else:
        name, version, minimum = "Redis", str(info["redis_version"]), MINIMUM_REDIS
    if tuple(int(part) for part in version.split(".")[:2]) < minimum:
        raise UnsupportedServer(
            f"the broker runs {name} {version}: Sheaf needs Redis {'.'.join(map(str, MINIMUM_REDIS))} or "
            f"Valkey {'.'.join(map(str, MINIMUM_VALKEY))} at least"
        )


def _check_scheme(url: str) -> None:
    scheme = url.partition("://")[0]
    if scheme not in _SCHEMES:
        raise BrokerError(f"broker URL {url!r}: its scheme must be one of {', '.join(_SCHEMES)}")


def _for_scheme(url: str, options: dict[str, Any]) -> dict[str, Any]:
    # A unix socket has no keep-alive, and redis-py refuses the option there.
    if url.startswith("unix:"):
        return {name: value for name, value in options.items() if name != "socket_keepalive"}
    return options
