"""How fast a preloaded queue is drained: our worker, celery-batches, and Celery's threads with an in-process batcher.

All three read the same messages of a plain Celery producer, run a null model on 64 at a time, and store each
result. Ours has everything on: leases, fenced settle, task events, metrics, a log line per job. The rate is taken from
the growth of the number of stored results, so that starting up is not in it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import redis

from benchmarks.preload import preload
from benchmarks.processes import BenchmarkError, free_port, peer_python, process, server, sheaf
from benchmarks.report import Ratio, Report
from broker.embedded import EmbeddedServer

#: Of DESIGN's table of figures.
TARGET = 12.0
QUEUE = "infer.echo"
#: A queue that nothing was taken from for so long is not being drained.
STALLED_S = 60.0
#: Results before this share of all do not count: pools and caches are still being filled.
WARM_SHARE = 0.1


def run(*, quick: bool) -> Report:
    ours_count, peer_count, rounds = (60_000, 5_000, 2) if quick else (200_000, 20_000, 3)
    rates: dict[str, list[float]] = {"sheaf": [], "celery-batches": [], "celery threads": []}
    for _ in range(rounds):
        rates["sheaf"].append(_rate(ours_count, "sheaf"))
        rates["celery-batches"].append(_rate(peer_count, "celery-batches"))
        rates["celery threads"].append(_rate(peer_count, "celery threads"))
    ratios = [
        Ratio.of_rates(f"drain, beside {name}", rates["sheaf"], rates[name], TARGET, "jobs/s")
        for name in ("celery-batches", "celery threads")
    ]
    return Report("drain", ratios, {"jobs_per_s": rates, "jobs": ours_count, "jobs_of_peers": peer_count})


def _rate(count: int, who: str) -> float:
    """Jobs per second."""
    with server() as valkey, redis.Redis.from_url(valkey.url) as client:
        preload(client, valkey.url, QUEUE, count)
        with worker(who, valkey):
            return _measure(client, count)


def worker(who: str, valkey: EmbeddedServer) -> AbstractContextManager[Path]:
    if who == "sheaf":
        config: dict[str, object] = {
            "broker": {"url": valkey.url},
            "workers": {"metrics_port": free_port()},
            "models": {"minilm": None, "echo": {"max_batch_size": 64}},
        }
        return sheaf(["device", "--device", "cpu"], config)
    python, app, pool = {
        "celery-batches": (peer_python(), "celery_batches_app", ("-P", "solo", "--prefetch-multiplier", "640")),
        "celery threads": (sys.executable, "threads_app", ("-P", "threads", "-c", "64")),
    }[who]
    command = [python, "-m", "celery", "-A", app, "worker", "-Q", QUEUE, "-E", "-l", "warning", *pool]
    return process(command, environment={"BROKER_URL": valkey.url})


def _measure(client: redis.Redis, count: int) -> float:
    samples: list[tuple[float, int]] = []
    while not samples or samples[-1][1] < count:
        done = stored(client)
        now = time.monotonic()
        if not samples or samples[-1][1] != done:
            samples.append((now, done))
        elif now - samples[-1][0] > STALLED_S:
            raise BenchmarkError(f"the queue is not drained: {done} of {count} jobs have ended")
        time.sleep(0.01)
    return _slope([sample for sample in samples if sample[1] >= WARM_SHARE * count])


def _slope(samples: Sequence[tuple[float, int]]) -> float:
    (begin, first), (end, last) = samples[0], samples[-1]
    return (last - first) / (end - begin)


def stored(client: redis.Redis) -> int:
    """Stored results: the keys with a TTL, as far as nothing else has one."""
    keyspace = client.info("keyspace").get("db0", {})
    return int(keyspace.get("expires", 0))
