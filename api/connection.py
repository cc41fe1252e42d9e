"""One connection, before there is a request: what a caller may send, how much of it, and in what time.

uvicorn's protocol parses and answers; it bounds neither the head of a request nor the time in which it comes, and what
it refuses it refuses in plain text. Invariants: a caller that owes something is gone when its time is over, what is
held for one connection is bounded, nobody is answered twice, and whoever came first is answered first.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NoReturn
from urllib.parse import urlsplit

from httptools import HttpParserCallbackError
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from api import kinds, problems
from api.body import DISCARD_BYTES
from api.grammar import plainly
from api.kinds import Kind
from api.light import LightEvent, ShortQueue
from api.problems import Problem, shown

log = logging.getLogger(__name__)

#: Of a request's head, without its target.
MAX_HEAD_BYTES = 65_536
MAX_HEADERS = 100
MAX_TARGET_BYTES = 8_192
#: When so many requests wait on a connection for the answers of those before them, no more is taken from it.
MAX_PIPELINED = 32
#: What is parsed at once, unless it is of one body: it may hold some dozens of requests more.
PARSED_BYTES = 1024
#: Bytes a second that a body must have on average, beyond the first `body_timeout_s`.
MIN_BODY_RATE = 1024
#: Seconds for which a refused caller may still send: closed at once, it might never see the answer.
LINGER_S = 1.0
#: So many connections beyond the limit are told so; any further ones are closed without a word.
MAX_TURNED_AWAY = 128


#: Headers of which a second one would be another word for the same thing.
_ONCE = frozenset(
    (
        *(b"host", b"authorization", b"content-type", b"content-encoding", b"content-length", b"transfer-encoding"),
        *(b"idempotency-key", b"expect"),
    )
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What all connections of a process share. Times are seconds."""

    max_connections: int
    head_timeout_s: float
    body_timeout_s: float
    send_timeout_s: float
    max_body_bytes: int


class _Now:
    """What we know of a connection, apart from it: beyond thirty fields an object has a dict of its own, of a kB."""

    __slots__ = (
        "bounds",
        "came",
        "close_at",
        "content",
        "declared",
        "fault",
        "gone",
        "headers_bytes",
        "heard_at",
        "in_body",
        "max_body_bytes",
        "owed_since",
        "refusal",
        "refused",
        "running",
        "unparsed",
        "unread_since",
        "unsent",
    )

    def __init__(self, bounds: Bounds, refused: Callable[[Kind], None]) -> None:
        self.bounds = bounds
        self.refused = refused
        #: Why the parser was stopped.
        self.fault: Problem | None = None
        #: What the last request that came is told, once those before it are answered.
        self.refusal: Problem | None = None
        #: What came, and is parsed when fewer requests wait.
        self.unparsed: bytes | memoryview | None = None
        #: The request that is being answered, or was last; `cycle` is the last that came.
        self.running: RequestResponseCycle | None = None
        self.gone: Callable[[], None] | None = None
        #: Since when the caller has owed the rest of a message; None when it owes nothing.
        self.owed_since: float | None = None
        self.heard_at: float | None = None
        self.in_body = False
        self.max_body_bytes = bounds.max_body_bytes
        #: Of the message that is under way: bytes that came, and those of them that were content.
        self.came = 0
        self.content = 0
        #: What its Content-Length says.
        self.declared = 0
        self.headers_bytes = 0
        self.unsent = 0
        self.unread_since = 0.0
        self.close_at: float | None = None


class _Flow(FlowControl):
    """Reads on only when what came before is parsed."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._is_writable_event = LightEvent(True)
        self.held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()

    def hold(self) -> None:
        self.held = True
        self.pause_reading()


class Connection(HttpToolsProtocol):
    """Made by uvicorn, one a connection; `check` must be called every second or so."""

    flow: _Flow

    def __init__(self, bounds: Bounds, refused: Callable[[Kind], None], **given: Any) -> None:
        super().__init__(**given)
        self.pipeline = ShortQueue()  # type: ignore[assignment]  # all that is asked of the deque
        self._now = _Now(bounds, refused)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow = _Flow(transport)
        self._now.owed_since = self.loop.time()
        beyond = len(self.connections) - self._now.bounds.max_connections
        if beyond > MAX_TURNED_AWAY:
            self._now.refused(kinds.TOO_MANY_CONNECTIONS)
            self.transport.abort()
        elif beyond > 0:
            self._refuse(
                Problem(
                    kinds.TOO_MANY_CONNECTIONS,
                    f"this process serves {self._now.bounds.max_connections} at once (api.max_connections): use fewer",
                    headers={"retry-after": "1"},
                )
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_request()
        super().connection_lost(exc)

    def _forget_request(self) -> None:
        """Whoever answers it learns that the caller is gone; uvicorn tells only the last of several."""
        self.pipeline.clear()
        self._now.unparsed = self._now.refusal = None
        if self._now.running is not None and not self._now.running.response_complete:
            self._now.running.disconnected = True
            self._now.running.message_event.set()
        if self._now.gone is not None:
            self._now.gone()

    def when_gone(self, callback: Callable[[], None] | None) -> None:
        """Have this called when the caller of the request that is being answered goes away; None takes it back.

        A task that waits for `http.disconnect` does the same, and takes kilobytes for each of thousands who wait.
        """
        self._now.gone = callback
        if callback is not None and self._now.running is not None and self._now.running.disconnected:
            callback()

    def allow_body(self, max_bytes: int) -> None:
        """Let the body of the request that is being answered have so many bytes; without that it has the bounds'."""
        if self._now.running is self.cycle and self._now.in_body:
            self._now.max_body_bytes = max_bytes

    def data_received(self, data: bytes) -> None:
        if self._now.close_at is not None or self._now.refusal is not None:
            return
        self._now.heard_at = self.loop.time()
        self._parse(data if self._now.unparsed is None else bytes(self._now.unparsed) + data)

    def _parse(self, data: bytes | memoryview) -> None:
        """Parse what came until enough requests wait; the rest is held, and no more is read meanwhile."""
        while data and len(self.pipeline) < MAX_PIPELINED:
            size = max(PARSED_BYTES, self._now.declared - self._now.content)
            if len(data) > size:
                data = memoryview(data)
            piece, data = data[:size], data[size:]
            self.flow.held = bool(data)
            self._parse_piece(piece)
            if self._now.close_at is not None or self._now.refusal is not None or self.transport.is_closing():
                return
        self._now.unparsed = data or None
        if data:
            self.flow.hold()

    def _parse_piece(self, piece: bytes | memoryview) -> None:
        if self._now.owed_since is None:
            self._now.owed_since = self._now.heard_at
        self._now.came += len(piece)
        super().data_received(piece)  # type: ignore[arg-type]  # the parser takes any buffer
        if self._now.owed_since is not None and not self.transport.is_closing() and (fault := self._excess()):
            self._refuse(fault)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._now.unparsed is not None:
            self._parse(self._now.unparsed)
        if self._now.refusal is not None and self._now.running is not None and self._now.running.response_complete:
            self._close_with(self._now.refusal)

    def _excess(self) -> Problem | None:
        """What is wrong with the size of a message that is under way."""
        if not self._now.in_body:
            return _head_too_large() if self._now.came > MAX_HEAD_BYTES + MAX_TARGET_BYTES else None
        if self._now.content > self._now.max_body_bytes + DISCARD_BYTES:
            return Problem(kinds.PAYLOAD_TOO_LARGE, f"this request may have {self._now.max_body_bytes} bytes")
        if self._now.came - self._now.content > MAX_HEAD_BYTES + self._now.content:
            return Problem(kinds.BAD_REQUEST, "its chunks are mostly framing: send larger ones, without extensions")
        return None

    # Called by the parser, inside of `data_received`; what is raised here stops it, and leads to `send_400_response`.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"] |= {"when_gone": self.when_gone, "allow_body": self.allow_body}
        self._turn(self._now.heard_at, in_body=False)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_TARGET_BYTES:
            self._stop(kinds.TARGET_TOO_LONG, f"a request's target may have {MAX_TARGET_BYTES} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._now.in_body:
            # A trailer: who has checked the headers would not know of it.
            return
        self._now.headers_bytes += len(name) + len(value)
        if self._now.headers_bytes > MAX_HEAD_BYTES or len(self.headers) >= MAX_HEADERS:
            raise self._stopped(_head_too_large())
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        upgrade = self.parser.should_upgrade()
        if upgrade and any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers):
            # The parser would take the body for another protocol's, and what follows it for the next request.
            self._stop(kinds.BAD_REQUEST, "this server speaks HTTP/1.1 only: send it without `Upgrade`")
        self._check_head()
        super().on_headers_complete()
        self.cycle.message_event = LightEvent()
        if upgrade:
            self.cycle.keep_alive = False
        self._turn(self._now.heard_at, in_body=True)
        self._now.declared = next((int(value) for name, value in self.headers if name == b"content-length"), 0)

    def _check_head(self) -> None:
        """What RFC 9112 wants of a head and the parser lets through: two readers of it must not read it differently."""
        version = self.parser.get_http_version()
        if version not in ("1.1", "1.0"):
            self._stop(kinds.BAD_REQUEST, f"this server speaks HTTP/1.1, not HTTP/{version}")
        names = [name for name, _ in self.headers if name in _ONCE]
        if len(names) != len(set(names)):
            twice = next(name for name in names if names.count(name) > 1)
            self._stop(kinds.BAD_REQUEST, f"the header {twice.decode()} is there {names.count(twice)} times")
        if version == "1.1" and b"host" not in names:
            self._stop(kinds.BAD_REQUEST, "a request needs the header Host")
        if version == "1.0" and b"transfer-encoding" in names:
            self._stop(kinds.BAD_REQUEST, "HTTP/1.0 knows no Transfer-Encoding: send Content-Length")
        if version == "1.1" and b"expect" in names:
            self._check_expectations(next(value for name, value in self.headers if name == b"expect"))
        if not self.url.startswith(b"/"):
            self._take_authority()

    def _check_expectations(self, value: bytes) -> None:
        """RFC 9110, section 10.1.1."""
        for wanted in value.decode("latin-1").lower().split(","):
            if wanted.strip() not in ("", "100-continue"):
                said = f"the only expectation that this server meets is 100-continue, not {shown(wanted.strip())}"
                self._stop(kinds.EXPECTATION_REFUSED, said)

    def _take_authority(self) -> None:
        """The authority of a whole target stands for the Host header (RFC 9112, section 3.2.2)."""
        authority = urlsplit(self.url).netloc
        if authority:
            self.headers[:] = [(name, authority if name == b"host" else value) for name, value in self.headers]

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._now.running = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._now.content += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._turn(None, in_body=False)
        super().on_message_complete()
        if not self.pipeline:
            # Paused, since much of the body came at once, it would not hear of a caller who goes.
            self.flow.resume_reading()

    def _turn(self, owed_since: float | None, *, in_body: bool) -> None:
        """The next part of a message begins, or the message has ended."""
        self._now.owed_since = owed_since
        self._now.in_body = in_body
        self._now.max_body_bytes = self._now.bounds.max_body_bytes
        self._now.came = self._now.content = self._now.headers_bytes = self._now.declared = 0

    def _stop(self, kind: Kind, detail: str) -> NoReturn:
        raise self._stopped(Problem(kind, detail))

    def _stopped(self, fault: Problem) -> Problem:
        self._now.fault = fault
        return fault

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn when the parser has refused what came, or was stopped."""
        error = sys.exception()
        # Anything else that fails in a callback is uvicorn reading the target.
        callback_failed = isinstance(error, HttpParserCallbackError)
        cause = "its target cannot be read" if callback_failed else plainly(str(error or msg))
        self._refuse(self._now.fault or Problem(kinds.BAD_REQUEST, f"this is not HTTP/1.1 as RFC 9112 has it: {cause}"))

    def check(self, now: float) -> None:
        """Cut off a caller whose time is over. `now` is the loop's time."""
        unsent = self.transport.get_write_buffer_size()
        if self._now.close_at is not None:
            if now >= self._now.close_at:
                self.transport.abort()
        elif unsent:
            if not self._now.unsent or unsent < self._now.unsent:
                self._now.unread_since = now
            elif now - self._now.unread_since > self._now.bounds.send_timeout_s:
                self._now.refused(kinds.REQUEST_TIMEOUT)
                self.transport.abort()
        elif self._now.owed_since is not None:
            self._check_debt(now, self._now.owed_since)
        self._now.unsent = unsent

    def _check_debt(self, now: float, since: float) -> None:
        heard_at = self._now.heard_at
        if heard_at is None:
            if now - since > self._now.bounds.head_timeout_s:
                self.transport.close()
        elif self.flow.read_paused:
            # It is we who do not take it.
            self._now.owed_since = self._now.heard_at = now
        elif not self._now.in_body:
            if now - since > self._now.bounds.head_timeout_s:
                self._refuse(_late("head", "api.head_timeout_s", self._now.bounds.head_timeout_s))
        elif max(now - heard_at, now - since - self._now.content / MIN_BODY_RATE) > self._now.bounds.body_timeout_s:
            self._refuse(_late("body", "api.body_timeout_s", self._now.bounds.body_timeout_s))

    def shutdown(self) -> None:
        """Called by uvicorn when the server stops: it waits for answers, and not for what callers have yet to send."""
        if self._now.owed_since is not None and self._now.in_body:
            self._refuse(Problem(kinds.NOT_READY, "the server is stopping"))
        self._now.unparsed = None
        if self._now.close_at is not None:
            self.transport.close()
        else:
            super().shutdown()

    def _refuse(self, fault: Problem) -> None:
        """Answer with this where the caller can tell what it answers; take nothing more, and close.

        Requests that came before are answered first.
        """
        self._now.refused(fault.kind)
        log.debug("A connection was refused.", extra={"kind": fault.kind.slug, "client": self.client})
        running = self._now.running
        if running is None or running.response_complete:
            self._close_with(fault)
        elif not (self._now.in_body and running is self.cycle):
            if self._now.in_body:
                # It waits there, and is not to be answered.
                del self.pipeline[0]
            self._now.refusal, self._now.unparsed, self._now.owed_since = fault, None, None
            self.flow.hold()
        elif running.response_started:
            self._forget_request()
            self.transport.abort()
        else:
            self._close_with(fault)

    def _close_with(self, fault: Problem) -> None:
        self._forget_request()
        self.transport.write(_written(fault, self.server_state.default_headers))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.held = False
        self.flow.resume_reading()
        self._now.close_at = self.loop.time() + LINGER_S


def _head_too_large() -> Problem:
    return Problem(
        kinds.HEAD_TOO_LARGE, f"a request may have {MAX_HEADERS} header fields, of {MAX_HEAD_BYTES} bytes together"
    )


def _late(part: str, key: str, limit_s: float) -> Problem:
    return Problem(kinds.REQUEST_TIMEOUT, f"the {part} of the request did not come within {limit_s:g} s ({key})")


def _written(fault: Problem, defaults: list[tuple[bytes, bytes]]) -> bytes:
    request_id = f"{random.getrandbits(128):032x}"
    answer = problems.response(fault, request_id)
    headers = [*defaults, *answer.raw_headers, (b"x-request-id", request_id.encode()), (b"connection", b"close")]
    lines = [f"HTTP/1.1 {answer.status_code} {HTTPStatus(answer.status_code).phrase}".encode()]
    return b"\r\n".join([*lines, *(name + b": " + value for name, value in headers), b"", bytes(answer.body)])
