"""What the way through queue and worker adds to one job at low load: submit to result, one after the other.

The model is a null one, so that all of the time is ours. Beside it: `send_task().get()` on a stock Celery worker.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import quantiles

from celery import Celery

from benchmarks.processes import BenchmarkError, free_port, process, server, sheaf, wait_for_page
from benchmarks.report import Ratio, Report

#: Milliseconds, p50: the targets, and what stock Celery took on the machine that they were set on. Only their ratios
#: mean anything on another machine.
TARGET_CELERY_MS = 2.0
TARGET_HTTP_MS = 4.0
STOCK_MS = 1.35
QUEUE = "infer.echo"
WARM_UP = 50


def run(*, quick: bool) -> Report:
    calls, rounds = (500, 2) if quick else (3000, 3)
    times: dict[str, list[float]] = {"sheaf, celery client": [], "sheaf, http": [], "stock celery": []}
    for _ in range(rounds):
        with server() as valkey:
            port = free_port()
            config: dict[str, object] = {
                "broker": {"url": valkey.url},
                "api": {"port": port},
                "workers": {"metrics_port": free_port()},
                "models": {"minilm": None, "echo": {"max_wait_ms": 0}},
            }
            with sheaf(["device", "--device", "cpu"], config), sheaf(["api"], config) as log:
                wait_for_page(f"http://127.0.0.1:{port}/readyz", log)
                with _celery_call(valkey.url) as call:
                    times["sheaf, celery client"] += timed(call, calls)
                with _http_call(port) as call:
                    times["sheaf, http"] += timed(call, calls)
        command = [
            sys.executable,
            "-m",
            "celery",
            "-A",
            "stock_app",
            "worker",
            "-Q",
            QUEUE,
            "-P",
            "solo",
            "-l",
            "error",
        ]
        with (
            server() as valkey,
            process(command, environment={"BROKER_URL": valkey.url}),
            _celery_call(valkey.url) as call,
        ):
            times["stock celery"] += timed(call, calls)
    spread = {name: _percentiles(found) for name, found in times.items()}
    stock, client, over_http = (spread[name]["p50"] for name in ("stock celery", "sheaf, celery client", "sheaf, http"))
    return Report(
        "latency",
        [
            Ratio.of_times(
                "added latency p50, Celery client, beside stock Celery", client, stock, TARGET_CELERY_MS / STOCK_MS
            ),
            Ratio.of_times(
                "added latency p50, over HTTP, beside stock Celery", over_http, stock, TARGET_HTTP_MS / STOCK_MS
            ),
        ],
        {"milliseconds": spread, "targets_ms": {"client": TARGET_CELERY_MS, "http": TARGET_HTTP_MS}, "calls": calls},
    )


def timed(call: Callable[[], None], calls: int) -> list[float]:
    """Milliseconds of each call, one after the other."""
    for _ in range(WARM_UP):
        call()
    taken: list[float] = []
    for _ in range(calls):
        begin = time.perf_counter()
        call()
        taken.append((time.perf_counter() - begin) * 1e3)
    return taken


@contextmanager
def _celery_call(url: str) -> Iterator[Callable[[], None]]:
    with Celery(broker=url, backend=url, set_as_current=False) as app:

        def call() -> None:
            sent = app.send_task("sheaf.infer", args=["x"], queue=QUEUE)
            if sent.get(timeout=60) != "x":
                raise BenchmarkError("a call came back with another's answer")

        yield call


@contextmanager
def _http_call(port: int) -> Iterator[Callable[[], None]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps({"model": "echo", "input": "x"})
    headers = {"Content-Type": "application/json", "Prefer": "wait=10"}

    def call() -> None:
        connection.request("POST", "/v1/jobs", body, headers)
        answer = json.loads(connection.getresponse().read())
        if answer.get("output") != "x":
            raise BenchmarkError(f"a call was not answered in time: {answer}")

    yield call
    connection.close()


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    cuts = quantiles(values, n=100)
    return {"p50": round(cuts[49], 3), "p90": round(cuts[89], 3), "p99": round(cuts[98], 3)}
