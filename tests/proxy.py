"""A TCP proxy that goes wrong on demand: what a network between a service and its broker can do to both."""

from __future__ import annotations

import selectors
import socket
import struct
import threading
from types import TracebackType
from typing import Self

#: Seconds that the server may take to accept a connection or to read what it is sent.
PATIENCE_S = 5.0
#: `SO_LINGER` of no seconds: the close is a reset.
RESET = struct.pack("ii", 1, 0)


class Proxy:
    """Passes bytes between its own port and `target_port` on loopback, all from one thread."""

    def __init__(self, target_port: int) -> None:
        self._target = ("127.0.0.1", target_port)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._woken, self._waking = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        #: Each open socket and the one that its bytes go to.
        self._peers: dict[socket.socket, socket.socket] = {}
        self._abandoned: list[socket.socket] = []
        self._frozen = False
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def __enter__(self) -> Self:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._waking.send(b"x")
        self._thread.join()
        for opened in (*self._peers, *self._abandoned, self._listener, self._woken, self._waking):
            opened.close()
        self._selector.close()

    def reset(self) -> int:
        """Reset every connection, at both ends; returns how many there were."""
        with self._lock:
            ends = list(self._peers)
            for end in ends:
                self._forget(end)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                end.close()
        return len(ends) // 2

    def freeze(self) -> None:
        """From now on nothing passes: connections stay open, new ones are taken and stay silent."""
        with self._lock:
            self._frozen = True
            for end in self._peers:
                self._selector.unregister(end)

    def thaw(self) -> None:
        """Everything passes again, what was sent meanwhile too."""
        with self._lock:
            self._frozen = False
            for end in self._peers:
                self._selector.register(end, selectors.EVENT_READ)

    def abandon(self) -> int:
        """Every connection of now stays open and silent for ever, as when a router forgets it; new ones are served."""
        with self._lock:
            ends = list(self._peers)
            for end in ends:
                self._forget(end)
            self._abandoned += ends
        return len(ends) // 2

    def _run(self) -> None:
        while not self._closing.is_set():
            ready = self._selector.select()
            with self._lock:
                for key, _ in ready:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._peers:
                        self._pass(key.fileobj)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(self._target, PATIENCE_S)
        except OSError:
            near.close()
            return
        near.settimeout(PATIENCE_S)
        for one, other in ((near, far), (far, near)):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._peers[one] = other
            if not self._frozen:
                self._selector.register(one, selectors.EVENT_READ)

    def _pass(self, end: socket.socket) -> None:
        peer = self._peers[end]
        try:
            received = end.recv(65536)
            peer.sendall(received)
        except OSError:
            received = b""
        if not received:
            for one in (end, peer):
                self._forget(one)
                one.close()

    def _forget(self, end: socket.socket) -> None:
        del self._peers[end]
        if not self._frozen:
            self._selector.unregister(end)
