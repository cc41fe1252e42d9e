"""Runs the app until it is told to stop."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from types import FrameType
from typing import NoReturn

import uvicorn

from api import binding
from api.app import create_app
from api.envelope import Envelope
from configs import Settings
from telemetry.logs import configure

#: Seconds that requests under way get to end when the server stops; those that wait for a result answer at once.
SHUTDOWN_GRACE_S = 10


class _Server(uvicorn.Server):
    """Tells requests that wait for a result to answer, before it waits for the requests."""

    def __init__(self, config: uvicorn.Config, envelope: Envelope) -> None:
        super().__init__(config)
        self._envelope = envelope

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._envelope.stop()
        await super().shutdown(sockets)


def run(settings: Settings) -> None:
    """Serve HTTP on `api.host` and `api.port` until SIGINT or SIGTERM."""
    configure(settings.logging.level, settings.logging.format, service="api")
    host = asyncio.run(binding.allowed_host(settings))
    settings = settings.model_copy(update={"api": settings.api.model_copy(update={"host": host})})
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        host=settings.api.host,
        port=settings.api.port,
        loop="uvloop",
        http="httptools",
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
    _Server(config, app).run()


def _exit(_number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(0)
