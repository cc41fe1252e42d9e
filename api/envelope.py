"""The outermost layer of the app: names each request, times it, logs it, and answers when everything else failed.

Plain ASGI, since the usual middleware costs more than a whole submit.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.problems import INTERNAL, Problem, response
from telemetry.logs import LineWriter
from telemetry.metrics import ApiMetrics

log = logging.getLogger(__name__)

#: A caller's own id is taken when it looks like one.
_REQUEST_ID = re.compile(rb"[\w.:-]{1,128}")
#: Seconds for which log lines are collected before they are written.
WRITE_EVERY_S = 0.1
#: Probes and scrapes come all day; their lines would hide the rest.
_UNLOGGED = frozenset({"/livez", "/readyz", "/metrics"})


class Envelope:
    """Wraps the app. Sets `request.state.request_id`; answers carry it as `X-Request-ID`."""

    def __init__(self, app: ASGIApp, metrics: ApiMetrics, lines: LineWriter) -> None:
        self._app = app
        self._metrics = metrics
        self._lines = lines
        self._collected: list[dict[str, object]] = []
        self.stopping = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin = time.perf_counter()
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"].append((b"x-request-id", request_id.encode()))
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except Exception:
            log.exception("A request failed.", extra={"request_id": request_id, "path": scope["path"]})
            if not status:
                problem = Problem(INTERNAL, "the server's log says why, under the request_id")
                await response(problem, request_id)(scope, receive, send_named)
        finally:
            self._done(scope, request_id, status, time.perf_counter() - begin)

    def _done(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        self._metrics.request_done(scope["method"], route, status, seconds)
        if route in _UNLOGGED:
            return
        if not self._collected:
            asyncio.get_running_loop().call_later(WRITE_EVERY_S, self.flush)
        line = {"message": "Request done.", "request_id": request_id, "method": scope["method"], "route": route}
        line |= {"status": status, "duration_ms": round(seconds * 1e3, 3)}
        job_id = scope["state"].get("job_id")
        if job_id is not None:
            line["job_id"] = job_id
        self._collected.append(line)

    def stop_waiting(self) -> None:
        """Let requests that wait for a result answer now."""
        self.stopping.set()

    def flush(self) -> None:
        """Write the lines collected so far."""
        collected, self._collected = self._collected, []
        self._lines.write(collected)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            text: str = value.decode()
            return text
    return uuid.uuid4().hex
