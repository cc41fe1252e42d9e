"""The far end of a webhook: a real HTTP server that answers as a test tells it to, and remembers its calls."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from standardwebhooks import Webhook


@dataclass(frozen=True)
class Call:
    """A request as it came in."""

    path: str
    headers: Mapping[str, str]
    body: bytes
    at: float
    #: The caller's port, another one for each connection.
    port: int

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def content(self) -> Any:
        return json.loads(self.body)

    def verified(self, secret: str) -> Any:
        """What it says, once its signature is found to be right."""
        return Webhook(secret).verify(self.body, dict(self.headers))


@dataclass(frozen=True)
class Reply:
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    #: Answer only when the receiver is closed, if ever.
    hang: bool = False
    #: These bytes instead of an answer, and the end of the connection.
    raw: bytes | None = None
    #: That end as a crash or a forgetful router makes it, not in order.
    reset: bool = False
    #: Answer after so long, seconds.
    after_s: float = 0.0


class Receiver:
    """Listens on a port of its own, or on `port`, at one of this machine's own addresses."""

    def __init__(self, port: int = 0, *, address: str = "127.0.0.1") -> None:
        self._lock = threading.Lock()
        self._calls: list[Call] = []
        self._replies: defaultdict[str, list[Reply]] = defaultdict(list)
        self._closed = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                receiver._serve(self)

            def do_GET(self) -> None:
                receiver._serve(self)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer((address, port), Handler)
        self._server.daemon_threads = True
        self.address = address
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    def url(self, path: str = "/hook") -> str:
        return f"http://{self.address}:{self.port}{path}"

    def answer(self, path: str, *replies: Reply | int) -> str:
        """The next calls of this path are answered so, and the last answer stays; returns its URL."""
        with self._lock:
            self._replies[path] = [Reply(reply) if isinstance(reply, int) else reply for reply in replies]
        return self.url(path)

    def calls(self, path: str = "/hook") -> list[Call]:
        with self._lock:
            return [call for call in self._calls if call.path == path]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _serve(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in request.headers.items()}
        with self._lock:
            self._calls.append(Call(request.path, headers, body, time.monotonic(), request.client_address[1]))
            replies = self._replies[request.path]
            reply = replies.pop(0) if len(replies) > 1 else replies[0] if replies else Reply()
        if reply.hang:
            self._closed.wait()
            request.close_connection = True
            return
        self._closed.wait(reply.after_s)
        if reply.raw is not None:
            request.wfile.write(reply.raw)
            request.close_connection = True
            if reply.reset:
                request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                # The server itself would end it in order before that.
                socket.close(request.connection.detach())
            return
        request.send_response(reply.status)
        for name, value in reply.headers.items():
            request.send_header(name, value)
        request.send_header("content-length", str(len(reply.body)))
        request.end_headers()
        request.wfile.write(reply.body)
