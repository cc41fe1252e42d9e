"""The body of a request, within bounds: only plain JSON is taken, and no more of it than is allowed."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress

from starlette.requests import ClientDisconnect, Request

from api import kinds
from api.headers import header
from api.problems import Problem, shown

#: How much of a refused body is still taken, and for how long, seconds.
DISCARD_BYTES = 67_108_864
DISCARD_S = 1.0

_JSON = re.compile(r"application/([\w.-]+\+)?json\s*(;|$)", re.IGNORECASE)
_CHARSET = re.compile(r';\s*charset\s*=\s*"?([^\s";]*)', re.IGNORECASE)


async def body_of(request: Request, limit: int) -> bytes:
    """The request's body, which is declared to be JSON. Refused before it is read whole when it is over `limit` bytes.

    Raises `Problem`, and `ClientDisconnect` when the caller goes away before all of it is there.
    """
    _check_kind(request)
    declared = header(request, b"content-length") or ""
    if declared.isdecimal() and int(declared) > limit:
        await discard(request)
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            if message.get("more_body"):
                await discard(request, begun=True)
            raise _too_large(limit)
        chunks.append(chunk)
        if not message.get("more_body"):
            return b"".join(chunks)


def _check_kind(request: Request) -> None:
    content_type = header(request, b"content-type") or ""
    if content_type != "application/json" and not _JSON.match(content_type):
        # Forms and plain text are what a browser sends to any address without asking.
        said = shown(content_type) if content_type else "nothing"
        raise Problem(kinds.MEDIA_TYPE_REFUSED, f"send `Content-Type: application/json`, not {said}")
    charset = _CHARSET.search(content_type)
    if charset is not None and charset[1].lower() not in ("utf-8", "us-ascii"):
        raise Problem(kinds.MEDIA_TYPE_REFUSED, f"send JSON in UTF-8, as RFC 8259 wants it, not {shown(charset[1])}")
    check_plain(request)


def check_plain(request: Request) -> None:
    """Raises `Problem` for a body that is packed."""
    for name, plain in ((b"content-encoding", "identity"), (b"transfer-encoding", "chunked")):
        encoding = header(request, name)
        if encoding is not None and encoding.lower() != plain:
            # A few packed kilobytes may hold gigabytes.
            raise Problem(kinds.MEDIA_TYPE_REFUSED, f"send the body plain, without {name.decode()} {shown(encoding)}")


async def discard(request: Request, *, begun: bool = False) -> None:
    """Take what comes of a body that was refused, for a moment: a caller that still sends would miss the answer.

    `begun` says that some of it was read.
    """
    if header(request, b"expect") is not None and not begun:
        # It sends nothing before it is asked to.
        return
    size = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while size < DISCARD_BYTES:
                message = await request.receive()
                size += len(message.get("body", b""))
                if not message.get("more_body"):
                    return


def _too_large(limit: int) -> Problem:
    # What is still to come of the body is not read, so the connection cannot be used again.
    return Problem(
        kinds.PAYLOAD_TOO_LARGE,
        f"a request may have {limit} bytes (api.max_payload_bytes): send fewer rows at a time",
        headers={"connection": "close"},
    )
