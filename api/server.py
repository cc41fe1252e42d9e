"""Runs the app until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
import sys
from functools import partial
from types import FrameType
from typing import NoReturn

import uvicorn

from api import binding
from api.app import create_app
from api.connection import MAX_TURNED_AWAY, Bounds, Connection
from api.envelope import Envelope
from configs import Settings
from configs.settings import ApiSettings
from telemetry.logs import configure
from telemetry.page import Place

log = logging.getLogger(__name__)

#: Seconds that requests under way get to end when the server stops; those that wait for a result answer at once.
SHUTDOWN_GRACE_S = 10
#: Connections that wait to be accepted.
BACKLOG = 2048
#: File descriptors for all that is no caller's connection: the broker, log, modules, and those who are turned away.
RESERVED_FILES = 128 + MAX_TURNED_AWAY
#: The server's clock ticks ten times a second; at every so many of them it looks for callers whose time is over.
TICKS_A_LOOK = 10


class _Server(uvicorn.Server):
    """Cuts slow callers off; tells requests that wait for a result to answer, before it waits for the requests."""

    def __init__(self, config: uvicorn.Config, envelope: Envelope) -> None:
        super().__init__(config)
        self._envelope = envelope

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS_A_LOOK == 0:
            for connection in list(self.server_state.connections):
                assert isinstance(connection, Connection)
                connection.check(connection.loop.time())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._envelope.stop()
        await super().shutdown(sockets)


def run(settings: Settings, listener: socket.socket) -> None:
    """Serve HTTP on this socket, in this process alone, until SIGINT or SIGTERM."""
    host = listener.getsockname()[0]
    serve(settings.model_copy(update={"api": settings.api.model_copy(update={"host": host})}), listener)


def listen(settings: Settings) -> socket.socket:
    """The socket on which the API accepts: on loopback when no keys are in force that would keep strangers out."""
    configure(settings.logging.level, settings.logging.format, service="api")
    host = asyncio.run(binding.allowed_host(settings))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, settings.api.port), family=family, backlog=BACKLOG)


def serve(settings: Settings, listener: socket.socket, place: Place | None = None) -> None:
    """Serve HTTP on this socket until SIGINT or SIGTERM. Others may do so too, each with a `place` of its own."""
    configure(settings.logging.level, settings.logging.format, service="api")
    # What a caller did wrong is counted, and told to the caller; a line for each would be the caller's to fill the log.
    for name in ("uvicorn.error", "python_multipart"):
        logging.getLogger(name).setLevel(logging.ERROR)
    app = create_app(settings, place)
    config = uvicorn.Config(
        app,
        backlog=BACKLOG,
        loop="uvloop",
        http=partial(Connection, _bounds(settings.api), app.refused),  # type: ignore[arg-type]  # called, not subclassed
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        # Nothing here asks for a caller's address.
        proxy_headers=False,
        timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
    )
    # The server hands the signal that stopped it on to whoever had it before.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _exit)
    _Server(config, app).run([listener])


def _bounds(settings: ApiSettings) -> Bounds:
    return Bounds(
        max_connections=_connections(settings.max_connections),
        head_timeout_s=settings.head_timeout_s,
        body_timeout_s=settings.body_timeout_s,
        send_timeout_s=settings.send_timeout_s,
        max_body_bytes=settings.max_payload_bytes,
    )


def _connections(wanted: int) -> int:
    """As many as are wanted, if there may be so many open files; says so when there may not."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most == resource.RLIM_INFINITY or most - RESERVED_FILES >= wanted:
        return wanted
    room = max(1, most - RESERVED_FILES)
    log.warning(
        "Fewer connections than api.max_connections are served: raise the limit of open files (ulimit -n).",
        extra={"max_connections": wanted, "served": room, "open_files": most},
    )
    return room


def _exit(_number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(0)
