"""Whether a long queue is drained as fast as a short one, and what a queued job takes of the broker's memory.

The same number of jobs of the echo model is run with a million behind them and with only as many as a short queue
holds, one after the other, by our worker with everything on.
"""

from __future__ import annotations

import time

import redis

from benchmarks.drain import QUEUE, stored, worker
from benchmarks.preload import preload
from benchmarks.processes import BenchmarkError, server
from benchmarks.report import Ratio, Report
from broker.embedded import EmbeddedServer

TARGET = 0.95
SHALLOW = 10_000
DEEP = 1_000_000
#: Jobs that have ended when the clock starts and stops; both leave out starting up, and the end of a short queue.
BEGIN, END = 1_500, 9_000
STALLED_S = 60.0


def run(*, quick: bool) -> Report:
    rounds = 3 if quick else 7
    rates: dict[int, list[float]] = {SHALLOW: [], DEEP: []}
    with server() as deep, redis.Redis.from_url(deep.url) as client:
        bytes_per_job = _filled(client, deep, DEEP)
        for _ in range(rounds):
            with server() as shallow, redis.Redis.from_url(shallow.url) as other:
                _filled(other, shallow, SHALLOW)
                rates[SHALLOW].append(_rate(other, shallow))
            rates[DEEP].append(_rate(client, deep))
        left = client.llen(QUEUE)
    ratio = Ratio.of_rates(
        f"drain, {DEEP:,} jobs queued beside {SHALLOW:,}", rates[DEEP], rates[SHALLOW], TARGET, "jobs/s"
    )
    details: dict[str, object] = {"jobs_per_s": rates, "bytes_per_queued_job": bytes_per_job, "left_of_the_deep": left}
    return Report("depth", [ratio], details, [f"a queued job takes {bytes_per_job:,.0f} bytes of the broker's memory"])


def _filled(client: redis.Redis, valkey: EmbeddedServer, count: int) -> float:
    """Fill the queue; bytes per job."""
    before = int(client.info("memory")["used_memory"])
    preload(client, valkey.url, QUEUE, count)
    taken = int(client.info("memory")["used_memory"]) - before
    while client.info("persistence")["aof_rewrite_in_progress"]:
        time.sleep(0.1)
    return taken / count


def _rate(client: redis.Redis, valkey: EmbeddedServer) -> float:
    """Jobs per second between two numbers of jobs ended in this round."""
    before = stored(client)
    with worker("sheaf", valkey):
        began = _when(client, before + BEGIN)
        ended = _when(client, before + END)
    return (ended[1] - began[1]) / (ended[0] - began[0])


def _when(client: redis.Redis, target: int) -> tuple[float, int]:
    """The moment at which so many results are there, and how many there are then."""
    deadline = time.monotonic() + STALLED_S
    while (done := stored(client)) < target:
        if time.monotonic() > deadline:
            raise BenchmarkError(f"the queue is not drained: {done} of {target} jobs have ended")
        time.sleep(0.002)
    return time.monotonic(), done
