"""The outermost layer of the app: names each request, times it, logs it, and answers when everything else failed.

Plain ASGI, since the usual middleware costs more than a whole submit. For the same reason the busiest endpoints
are called from here directly: they are among the app's routes like any other (in /docs too), but their requests do not
pass through the framework's own layers, which have nothing to do for them and take kilobytes while one waits.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import problems
from api.kinds import INTERNAL, Kind
from api.problems import Problem, response
from broker.errors import BrokerError
from telemetry.logs import LineWriter
from telemetry.metrics import ApiMetrics

log = logging.getLogger(__name__)

#: A caller's own id is taken when it looks like one.
_REQUEST_ID = re.compile(rb"[\w.:-]{1,128}")
#: Seconds for which log lines are collected before they are written.
WRITE_EVERY_S = 0.1
#: Probes and scrapes come all day; their lines would hide the rest.
_UNLOGGED = frozenset({"/livez", "/readyz", "/metrics"})


@dataclass(slots=True)
class _Done:
    """A request that was answered."""

    method: str
    route: str
    status: int
    seconds: float
    request_id: str
    job_id: str | None
    key_id: str | None


Endpoint = Callable[[Request], Awaitable[Response]]
#: From method and path to the route's name and what to call, where that is known without the framework.
Direct = Callable[[str, str], tuple[str, Endpoint] | None]


class Envelope:
    """Wraps the app. Sets `request.state.request_id`; answers carry it as `X-Request-ID`.

    What `direct` knows is called without the framework in between.
    """

    def __init__(self, app: ASGIApp, metrics: ApiMetrics, lines: LineWriter, direct: Direct) -> None:
        self.app = app
        self._metrics = metrics
        self._lines = lines
        self._direct = direct
        self._done: list[_Done] = []
        #: Set when the server is told to stop: requests that wait for a result answer then.
        self.stopping = asyncio.Event()
        #: Called then, so that they look up.
        self.on_stop: Callable[[], None] = lambda: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            # The server sends the head of the answer alone.
            scope = {**scope, "method": "GET"}
            scope.setdefault("state", {})["head"] = True
        begin = time.perf_counter()
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                took_ms = (time.perf_counter() - begin) * 1e3
                message["headers"] += (
                    (b"x-request-id", request_id.encode()),
                    (b"server-timing", b"total;dur=%.3f" % took_ms),
                )
            await send(message)

        direct = self._direct(scope["method"], scope["path"])
        try:
            if direct is None:
                await self.app(scope, receive, send_named)
            else:
                await self._call(direct[1], scope, receive, send_named)
        except ClientDisconnect:
            log.debug("A caller went away before its request was read.", extra={"request_id": request_id})
        except Exception:
            log.exception("A request failed.", extra={"request_id": request_id, "path": scope["path"]})
            if not status:
                problem = Problem(INTERNAL, "the server's log says why, under the request_id")
                await response(problem, request_id)(scope, receive, send_named)
        finally:
            route = direct[0] if direct else getattr(scope.get("route"), "path", "other")
            names = scope["state"]
            seconds = time.perf_counter() - begin
            ids = (request_id, names.get("job_id"), names.get("key_id"))
            self._note(_Done(scope["method"], route, status, seconds, *ids))

    def stop(self) -> None:
        """The server stops: whoever waits for a result is answered now."""
        self.stopping.set()
        self.on_stop()

    async def _call(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self.app
        request = Request(scope, receive, send)
        try:
            answer = await endpoint(request)
        except (Problem, BrokerError) as error:
            answer = response(problems.of(error), request.state.request_id)
        await answer(scope, receive, send)

    def refused(self, kind: Kind) -> None:
        """Count a connection that was refused before there was a request."""
        self._metrics.connection_refused(kind.slug)

    def _note(self, done: _Done) -> None:
        if not self._done:
            asyncio.get_running_loop().call_later(WRITE_EVERY_S, self.flush)
        self._done.append(done)

    def flush(self) -> None:
        """Count and log the requests that were answered since the last time."""
        requests, self._done = self._done, []
        seconds: defaultdict[tuple[str, str, int], list[float]] = defaultdict(list)
        for done in requests:
            seconds[done.method, done.route, done.status].append(done.seconds)
        for (method, route, status), taken in seconds.items():
            self._metrics.requests_done(method, route, status, taken)
        self._lines.write([_line(done) for done in requests if done.route not in _UNLOGGED])


def _line(done: _Done) -> dict[str, object]:
    line: dict[str, object] = {
        "message": "Request done.",
        "request_id": done.request_id,
        "method": done.method,
        "route": done.route,
        "status": done.status,
        "duration_ms": round(done.seconds * 1e3, 3),
    }
    if done.job_id is not None:
        line["job_id"] = done.job_id
    if done.key_id is not None:
        line["key_id"] = done.key_id
    return line


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            text: str = value.decode()
            return text
    # It is no secret, so it need not be unguessable.
    return f"{random.getrandbits(128):032x}"
