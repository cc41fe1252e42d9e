"""What a caller costs that waits for a result and for nothing else: memory and processor time of one API process.

Many connections, each of which waits for a job of its own: with the submit (`Prefer: wait`), and, in another process,
with a read after it. No worker, so nothing happens. Then all jobs are ended at once, and each caller is answered.
"""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path

import orjson
import redis

from benchmarks.processes import BenchmarkError, free_port, server, sheaf, wait_for_page
from benchmarks.report import Ratio, Report
from broker import Broker, Settlement
from broker.message import decode

#: What the API process may take at most, with all who wait.
TARGET_MB = 200.0
#: Connections that are opened at the same time; more than the server's backlog would be refused.
OPENING = 256
WAIT_S = 300
_BODY = b'{"model": "echo", "input": "a text of some length"}'
_SUBMIT = (
    b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n%sContent-Length: %d\r\n\r\n%s"
)
_READ = b"GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\n%s\r\n"
_PREFER = b"Prefer: wait=%d\r\n" % WAIT_S
_LOCATION = re.compile(rb"^location: (\S+)", re.IGNORECASE | re.MULTILINE)

_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def run(*, quick: bool) -> Report:
    waiters, idle_s = (10_000, 10) if quick else (10_000, 60)
    measured = {how: _measured(wait, waiters, idle_s) for how, wait in (("submit", _wait_at_submit), ("read", _read))}
    lines: list[str] = []
    ratios: list[Ratio] = []
    for how, found in measured.items():
        held, total = found["memory_mb"] - found["memory_before_mb"], found["memory_mb"]
        lines += [
            f"{waiters:,} waiters by {how}: {held * 1e3 / waiters:.1f} kB each, {found['cpu_idle']:.2%} of a core, "
            f"{found['commands_per_s']:.1f} broker commands/s",
            f"all jobs ended at once: the last of them answered after {found['answered_s']:.2f} s",
        ]
        name = f"memory of the API process with 10,000 waiters by {how}"
        ratios.append(Ratio(name, total / TARGET_MB, 1.0, total, TARGET_MB, "MB", True))
    return Report("waiters", ratios, {"waiters": waiters, **measured}, lines)


def _measured(wait: Callable[[_Connection], Awaitable[None]], waiters: int, idle_s: int) -> dict[str, float]:
    """What an API process of its own takes for so many who `wait`."""
    port = free_port()
    with server() as valkey:
        config: dict[str, object] = {
            "broker": {"url": valkey.url, "max_queue_depth": 0},
            "api": {"port": port, "max_wait_s": WAIT_S},
        }
        with sheaf(["api"], config) as log:
            wait_for_page(f"http://127.0.0.1:{port}/livez", log)
            return asyncio.run(_measure(port, valkey.url, wait, waiters, idle_s, log))


async def _wait_at_submit(connection: _Connection) -> None:
    _, writer = connection
    writer.write(_SUBMIT % (_PREFER, len(_BODY), _BODY))
    await writer.drain()


async def _read(connection: _Connection) -> None:
    """Submit a job, then wait for it."""
    reader, writer = connection
    writer.write(_SUBMIT % (b"", len(_BODY), _BODY))
    head = await reader.readuntil(b"\r\n\r\n")
    place = _LOCATION.search(head)
    if place is None:
        raise BenchmarkError(f"a submit was answered {head.decode()}")
    await reader.readuntil(b"}}")
    writer.write(_READ % (place[1], _PREFER))
    await writer.drain()


async def _measure(
    port: int,
    broker_url: str,
    wait: Callable[[_Connection], Awaitable[None]],
    waiters: int,
    idle_s: int,
    log: Path,
) -> dict[str, float]:
    await asyncio.to_thread(_page, port)
    before = await asyncio.to_thread(_page, port)
    room = asyncio.Semaphore(OPENING)

    async def open_one() -> _Connection:
        async with room:
            connection = await asyncio.open_connection("127.0.0.1", port)
            await wait(connection)
            return connection

    connections = await asyncio.gather(*(open_one() for _ in range(waiters)))
    await asyncio.to_thread(_wait_for_all, port, waiters, log)
    client = redis.Redis.from_url(broker_url)
    first, commands = await asyncio.to_thread(_page, port), _commands(client)
    begin = time.monotonic()
    await asyncio.sleep(idle_s)
    took = time.monotonic() - begin
    commands = _commands(client) - commands
    last = await asyncio.to_thread(_page, port)
    begin = time.monotonic()
    await asyncio.to_thread(_end_all, broker_url, waiters)
    heads = await asyncio.gather(*(reader.readuntil(b"\r\n\r\n") for reader, _ in connections))
    answered_s = time.monotonic() - begin
    if not all(head.startswith(b"HTTP/1.1 200") for head in heads):
        raise BenchmarkError("not every waiter was answered with its result")
    for _, writer in connections:
        writer.close()
    return {
        "memory_before_mb": before["process_resident_memory_bytes"] / 1e6,
        "memory_mb": last["process_resident_memory_bytes"] / 1e6,
        "cpu_idle": (last["process_cpu_seconds_total"] - first["process_cpu_seconds_total"]) / took,
        "commands_per_s": commands / took,
        "answered_s": answered_s,
    }


def _page(port: int) -> dict[str, float]:
    """Those numbers of the metrics page that have no labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return {
            name: float(value) for name, value in re.findall(r"^(\w+) (\S+)$", answer.read().decode(), re.MULTILINE)
        }


def _wait_for_all(port: int, waiters: int, log: Path) -> None:
    deadline = time.monotonic() + 120
    while _page(port)["sheaf_waiters"] < waiters:
        if time.monotonic() > deadline:
            raise BenchmarkError(f"only {_page(port)['sheaf_waiters']} wait: {log.read_text()[-2000:]}")
        time.sleep(0.2)


def _commands(client: redis.Redis) -> int:
    return int(client.info("stats")["total_commands_processed"])


def _end_all(broker_url: str, count: int) -> None:
    """What a worker does, at its largest batch."""
    worker = Broker(broker_url, "bench")
    while count:
        leases = worker.lease("infer.echo", [512] * 4).leases
        ids = [decode(lease.message).id for lease in leases]
        result = {job_id: orjson.dumps({"status": "SUCCESS", "result": 1, "task_id": job_id}) for job_id in ids}
        worker.settle(
            "infer.echo",
            [Settlement(lease.tag, job_id, result[job_id], True) for lease, job_id in zip(leases, ids, strict=True)],
        )
        count -= len(leases)
    worker.close()
