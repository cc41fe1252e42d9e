"""Calls webhooks over HTTP, and nothing but them: each address that is connected to is asked about first.

Where a name leads may change between two looks, so the one look that counts is at the very address that a socket is
made for. Redirects are not followed, proxies of the environment not used, and of an answer only its head counts.

Connections are kept for the next call. A receiver may close one at any time, in the very moment in which it is used
too, which says nothing of the receiver: such a call is made again at once, on a connection of its own.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from functools import partial
from importlib.metadata import version
from types import SimpleNamespace, TracebackType
from typing import Self

import aiohttp
from aiohttp.abc import AbstractResolver
from yarl import URL

from webhooks import Policy, Refused, Target
from workers.courier.failures import answered, failed
from workers.courier.schedule import Answer

log = logging.getLogger(__name__)

USER_AGENT = f"Sheaf-Webhooks/{version('sheaf')}"
#: Of an answer's body, the bytes that are read so that its connection can be used again, and for how long, seconds.
READ_BYTES = 65_536
READ_S = 1.0
#: Seconds for which an address that a name led to is believed. It is checked each time all the same.
DNS_TTL_S = 10
#: Least time that a call has left, seconds: none would mean that it may take forever.
LEAST_S = 0.001


@dataclass(slots=True)
class _Connection:
    """What a call went over."""

    reused: bool = False


@dataclass(frozen=True, slots=True)
class _Sessions:
    #: Uses connections again.
    keeping: aiohttp.ClientSession
    #: Makes a new one for each call.
    fresh: aiohttp.ClientSession

    async def close(self) -> None:
        await self.keeping.close()
        await self.fresh.close()


class Caller:
    """One event loop's way out. Used as a context; `resolver` finds addresses, the system's own without it."""

    def __init__(self, policy: Policy, timeout_s: float, *, resolver: AbstractResolver | None = None) -> None:
        self._policy = policy
        self._timeout_s = timeout_s
        self._checked = self._sessions(
            partial(
                aiohttp.TCPConnector,
                limit=0,
                ttl_dns_cache=DNS_TTL_S,
                resolver=resolver,
                socket_factory=self._checked_socket,
            )
        )
        # Hosts that the settings name may be anywhere.
        self._trusting = self._sessions(partial(aiohttp.TCPConnector, limit=0, ttl_dns_cache=DNS_TTL_S))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._checked.close()
        await self._trusting.close()

    async def call(self, target: Target, headers: Mapping[str, str], body: bytes) -> Answer:
        """POST this; never raises for what goes wrong on the way or over there."""
        at, begin = time.time(), time.monotonic()
        status, retry_after_s, error, detail = None, None, None, None
        try:
            async with await self._answer(target, headers, body, begin + self._timeout_s) as response:
                duration_s = time.monotonic() - begin
                status = response.status
                text = await _read(response)
                if not 200 <= status < 300:
                    error, detail = answered(status, text)
                    if status in (429, 503):
                        retry_after_s = _retry_after(response.headers.get("retry-after"), at)
        except TimeoutError:
            error = f"no answer within {self._timeout_s:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as failure:
            error, detail = failed(failure, target.url)
        if status is None:
            duration_s = time.monotonic() - begin
        return Answer(at, duration_s, status, error, detail, retry_after_s)

    async def _answer(
        self, target: Target, headers: Mapping[str, str], body: bytes, ends: float
    ) -> aiohttp.ClientResponse:
        """The head of the answer, until `ends` on the monotonic clock; of a second call, where a kept connection fails.

        What was sent on it may have been taken in all the same: the receiver knows it by its `webhook-id`.
        """
        sessions = self._trusting if target.trusted else self._checked
        url, connection = _exactly(target), _Connection()

        async def post(session: aiohttp.ClientSession) -> aiohttp.ClientResponse:
            left = aiohttp.ClientTimeout(total=max(LEAST_S, ends - time.monotonic()))
            return await session.post(
                url, data=body, headers=headers, allow_redirects=False, timeout=left, trace_request_ctx=connection
            )

        try:
            return await post(sessions.keeping)
        except aiohttp.ClientConnectionError as failure:
            if not connection.reused or _began_to_answer(failure):
                raise
        log.debug("A kept connection was closed; the call is made again.", extra={"host": target.host})
        return await post(sessions.fresh)

    def _sessions(self, connector: partial[aiohttp.TCPConnector]) -> _Sessions:
        return _Sessions(self._session(connector()), self._session(connector(force_close=True)))

    def _session(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_reuseconn.append(_mark_reused)
        return aiohttp.ClientSession(
            connector=connector,
            headers={"user-agent": USER_AGENT, "content-type": "application/json", "accept-encoding": "identity"},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            trace_configs=[tracing],
        )

    def _checked_socket(self, info: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, _, address = info
        try:
            self._policy.check(str(address[0]))
        except Refused as error:
            # The connector expects no other errors.
            raise PermissionError(errno.EACCES, str(error)) from None
        return socket.socket(family, kind, protocol)


def _exactly(target: Target) -> URL:
    """The URL as the client library reads it. Raises `Refused` when it finds another host in it than we did."""
    url = URL(target.url, encoded=True)
    if (url.host or "").lower() != target.host or url.port != target.port:
        raise Refused("the URL can be read in two ways")
    return url


async def _mark_reused(
    _: aiohttp.ClientSession, context: SimpleNamespace, __: aiohttp.TraceConnectionReuseconnParams
) -> None:
    context.trace_request_ctx.reused = True


def _began_to_answer(failure: aiohttp.ClientConnectionError) -> bool:
    """Whether part of an answer came, or time ran out. Of a connection that was reset, that is not known."""
    if isinstance(failure, aiohttp.ServerDisconnectedError):
        return not isinstance(failure.message, str)
    return isinstance(failure, TimeoutError)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """The beginning of an answer's body. If that is not all, or does not come soon, the connection is given up."""
    read = bytearray()
    with suppress(aiohttp.ClientError, TimeoutError, OSError):
        async with asyncio.timeout(READ_S):
            while len(read) < READ_BYTES and (chunk := await response.content.read(READ_BYTES)):
                read += chunk
            if response.content.at_eof():
                return bytes(read)
    response.close()
    return bytes(read)


def _retry_after(value: str | None, now: float) -> float | None:
    """Seconds that the header `Retry-After` asks for; it may hold a date."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        moment = parsedate_to_datetime(value)
        return max(0.0, (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() - now)
    except (ValueError, OverflowError):
        return None
