"""A TCP proxy that goes wrong on demand: what a network between a service and its broker can do to both.

What it holds back it delivers later even when the sender has given up meanwhile, each connection at a moment of its
own where asked for, as a network does after an outage, where each has its own time for trying again. So the broker
carries out commands whose callers have been told that they failed, some of them after what these sent later on another
connection.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

CHUNK_BYTES = 65_536
#: SO_LINGER on, for 0 seconds: closing sends an RST.
RESET = struct.pack("ii", 1, 0)


class Proxy:
    """Forwards a port on loopback to `target_port`, from a thread of its own. Its methods may be called from any.

    What was held back by `freeze` arrives within `late_s` seconds after the thaw.
    """

    def __init__(self, target_port: int, *, late_s: float = 0.0, seed: int = 0) -> None:
        self._target_port = target_port
        self._late_s = late_s
        self._choice = random.Random(f"{seed} proxy")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="broker proxy", daemon=True)
        self._flowing = asyncio.Event()
        #: Both ends of each connection, and those of the abandoned ones.
        self._writers: set[asyncio.StreamWriter] = set()
        self._abandoned: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        assert self._server is not None, "the proxy has not been started"
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def reset(self) -> int:
        """Reset every connection, on both sides; returns how many there were."""
        return asyncio.run_coroutine_threadsafe(self._reset(), self._loop).result()

    def freeze(self) -> None:
        """Hold everything back, in both directions, until `thaw`. Connections can still be made."""
        self._loop.call_soon_threadsafe(self._flowing.clear)

    def thaw(self) -> None:
        """Everything passes again, what was sent meanwhile too."""
        self._loop.call_soon_threadsafe(self._flowing.set)

    def abandon(self) -> int:
        """Every connection of now stays open and silent for ever, as when a router forgets it; new ones are served."""
        return asyncio.run_coroutine_threadsafe(self._abandon(), self._loop).result()

    async def _listen(self) -> None:
        self._flowing.set()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        self._flowing.set()
        self._writers |= self._abandoned
        await self._reset()
        for task in self._serving:
            task.cancel()
        if self._serving:
            await asyncio.wait(self._serving)

    async def _abandon(self) -> int:
        count = len(self._writers) // 2
        self._abandoned |= self._writers
        self._writers.clear()
        return count

    async def _reset(self) -> int:
        writers = list(self._writers)
        for writer in writers:
            _reset(writer)
        return len(writers) // 2

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            broker_reader, broker_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            # The broker is down: so is, for its clients, this connection.
            _reset(writer)
            return
        pair = {writer, broker_writer}
        self._writers |= pair
        try:
            await asyncio.gather(self._pump(reader, broker_writer), self._pump(broker_reader, writer))
        finally:
            self._writers -= pair
            self._abandoned -= pair

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Forward until the source ends or either side breaks, then end the other side in an orderly way."""
        with suppress(OSError):
            while data := await source.read(CHUNK_BYTES):
                if not self._flowing.is_set():
                    await self._flowing.wait()
                    await asyncio.sleep(self._choice.uniform(0.0, self._late_s))
                if sink in self._abandoned:
                    await asyncio.Event().wait()
                sink.write(data)
                await sink.drain()
        sink.close()
        with suppress(OSError):
            await sink.wait_closed()


def _reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()
