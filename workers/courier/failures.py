"""Why a call was no success, twice: in our words, and in those of the receiver or of the system.

Whoever submits a job chooses what is called, and may be shown what became of it. They must not read there what they
could not read otherwise: what an inner service says, or where a name leads to inside. So they get our words alone; the
others' are for operators.
"""

from __future__ import annotations

import errno
from enum import StrEnum

import aiohttp

from webhooks import Refused

#: Characters of others' words that are kept.
KEPT_CHARACTERS = 200


class NoAnswer(StrEnum):
    """Why no answer came that counts."""

    NO_NAME = "its name leads nowhere"
    NOT_ALLOWED = "the address that its name leads to is not allowed"
    REFUSED = "the connection was refused"
    UNREACHABLE = "it could not be connected to"
    NO_TLS = "no TLS connection came about"
    CERTIFICATE = "its certificate is not valid"
    CLOSED = "the connection was closed before an answer came"
    NOT_HTTP = "what it answered is not HTTP"
    OTHER = "the call could not be made"


#: Ours, and those of others.
Words = tuple[str, str | None]


def answered(status: int, body: bytes) -> Words:
    """Of an answer that is no success. `body` is the beginning of it."""
    if 300 <= status < 400:
        return f"it answered {status}: redirects are not followed, name the final address", None
    if status == 410:
        return "it answered 410: it is gone for good, and is not called again for this event", None
    return f"it answered {status}", _line(body[: 4 * KEPT_CHARACTERS].decode(errors="replace"))


def failed(error: aiohttp.ClientError | OSError | ValueError, url: str) -> Words:
    """Of a call of `url` without an answer."""
    if isinstance(error, Refused):
        # Of the URL itself, which its owner knows.
        return str(error), None
    said = error.message if isinstance(error, aiohttp.ClientResponseError) else str(error)
    # The URL's path may be a secret, and what is said here is logged.
    return _kind(error).value, _line(said.replace(url, "the URL")) or type(error).__name__


def _kind(error: aiohttp.ClientError | OSError | ValueError) -> NoAnswer:
    match error:
        case aiohttp.ClientConnectorDNSError():
            return NoAnswer.NO_NAME
        case aiohttp.ClientConnectorCertificateError():
            return NoAnswer.CERTIFICATE
        case aiohttp.ClientConnectorSSLError():
            return NoAnswer.NO_TLS
        case aiohttp.ClientConnectorError(errno=errno.EACCES):
            # As the check of addresses says it.
            return NoAnswer.NOT_ALLOWED
        case aiohttp.ClientConnectorError(errno=errno.ECONNREFUSED):
            return NoAnswer.REFUSED
        case aiohttp.ClientConnectorError(errno=errno.ECONNRESET):
            return NoAnswer.CLOSED
        case aiohttp.ClientConnectorError():
            return NoAnswer.UNREACHABLE
        case aiohttp.ClientConnectionError():
            return NoAnswer.CLOSED
        case aiohttp.ClientResponseError():
            return NoAnswer.NOT_HTTP
    return NoAnswer.OTHER


def _line(text: str) -> str | None:
    """The beginning of others' words on one line; None where there are none."""
    shown = "".join(character if character.isprintable() else " " for character in text)
    return " ".join(shown.split())[:KEPT_CHARACTERS].rstrip() or None
