"""A client that sends when the clock says so, whether or not what it sent before was answered.

Latency is counted from the moment at which a request was to be sent, so that a server which holds the client up cannot
hide that. It speaks as much HTTP as a JSON answer of known length needs.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from statistics import fmean, quantiles

from benchmarks.processes import BenchmarkError

#: A request that is not answered for so long fails the benchmark.
TIMEOUT_S = 90.0


def poisson(rate: float, count: int, *, seed: int) -> list[float]:
    """When `count` requests are to be sent, seconds from the begin, `rate` a second on average."""
    draw = random.Random(seed)
    moment, moments = 0.0, []
    for _ in range(count):
        moment += draw.expovariate(rate)
        moments.append(moment)
    return moments


def send_all(port: int, path: str, bodies: Sequence[str], moments: Sequence[float], header: str) -> list[float]:
    """POST each body at its moment; milliseconds from then to the whole answer, which must be a 200."""
    return asyncio.run(_Client(port, path, header).send_all(bodies, moments))


def spread(milliseconds: Sequence[float]) -> dict[str, float]:
    cuts = quantiles(milliseconds, n=100, method="inclusive")
    return {"mean": fmean(milliseconds), "p50": cuts[49], "p99": cuts[98]}


class _Client:
    """Keeps its connections, and opens one more when all are busy."""

    def __init__(self, port: int, path: str, header: str) -> None:
        self._port = port
        self._head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{header}\r\n"
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def send_all(self, bodies: Sequence[str], moments: Sequence[float]) -> list[float]:
        begin = time.monotonic()
        sent = [self._send_at(begin + moment, body) for body, moment in zip(bodies, moments, strict=True)]
        try:
            async with asyncio.timeout(moments[-1] + TIMEOUT_S):
                return await asyncio.gather(*sent)
        except TimeoutError:
            raise BenchmarkError(f"not every request was answered within {TIMEOUT_S:g} s") from None
        finally:
            for writer in self._writers:
                writer.close()

    async def _send_at(self, moment: float, body: str) -> float:
        await asyncio.sleep(moment - time.monotonic())
        reader, writer = await self._connection()
        content = body.encode()
        writer.write(f"{self._head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        answer = await reader.readexactly(int(head.partition("content-length:")[2].partition("\r\n")[0]))
        if not head.startswith("http/1.1 200"):
            raise BenchmarkError(f"a request was not answered with its result: {answer.decode()[:500]}")
        self._idle.append((reader, writer))
        return (time.monotonic() - moment) * 1e3

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer = self._idle.pop()
            # The server ends those that are idle for some seconds.
            if not reader.at_eof():
                return reader, writer
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers.append(writer)
        return reader, writer
