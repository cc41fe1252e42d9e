"""HTTP as an attacker speaks it: bytes over a socket."""

from __future__ import annotations

import json
import re
import socket
from dataclasses import dataclass

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Answer:
    """What came back. `status` is 0 when the connection was closed without an answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    def problem(self) -> dict[str, object]:
        """The problem that it is, checked to be one and to tell nothing of the inside."""
        assert self.headers["content-type"] == "application/problem+json"
        found: dict[str, object] = json.loads(self.body)
        assert found["status"] == self.status
        assert found["request_id"] == self.headers["x-request-id"]
        assert str(found["type"]).startswith("urn:sheaf:error:")
        assert b"Traceback" not in self.body
        return found


def connect(port: int) -> socket.socket:
    return socket.create_connection((HOST, port), timeout=20)


def ask(port: int, *parts: bytes) -> Answer:
    """Send these bytes, a part at a time, and read until the server closes."""
    with connect(port) as connection:
        try:
            for part in parts:
                connection.sendall(part)
        except OSError:
            # It answered, or closed, while we were still sending.
            pass
        return answer_of(connection)


def answer_of(connection: socket.socket) -> Answer:
    """The last answer on a connection that the server closes."""
    return (answers_of(connection) or [Answer(0, {}, b"")])[-1]


def answers_of(connection: socket.socket) -> list[Answer]:
    """All answers on a connection that the server closes."""
    received = bytearray()
    try:
        while part := connection.recv(65_536):
            received += part
    except ConnectionResetError:
        pass
    return [_answer(part) for part in re.split(rb"(?=HTTP/1\.1 \d{3} )", bytes(received)) if part]


def _answer(received: bytes) -> Answer:
    head, _, body = received.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
    return Answer(int(lines[0].split()[1]), headers, body)


def request(method: str, target: str | bytes, *headers: str, body: bytes | None = None) -> bytes:
    """A request after whose answer the connection is closed."""
    path = target.encode() if isinstance(target, str) else target
    lines = [f"host: {HOST}", "connection: close", *headers]
    if body is not None:
        lines.append(f"content-length: {len(body)}")
    return method.encode() + b" " + path + b" HTTP/1.1\r\n" + "\r\n".join([*lines, "", ""]).encode() + (body or b"")


def post(body: bytes, *headers: str) -> bytes:
    """A submit of this body."""
    return request("POST", "/v1/jobs", "content-type: application/json", *headers, body=body)
