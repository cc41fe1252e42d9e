"""How many submits one API process takes over HTTP, each answered only after the broker holds the job.

Beside it: a FastAPI endpoint that calls Celery's `send_task`, and one that does nothing at all. One load generator, 64
connections, one server process each, no worker; the load generator and the broker share the machine with the server.
Ours asks for a key that has a rate and a quota, so all of admission is in it; the peers let everybody in.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from benchmarks.processes import free_port, process, server, sheaf, wait_for_page
from benchmarks.report import Ratio, Report
from benchmarks.wrk import closed_loop
from broker import KeyRegistry, Rate, Scope
from broker.access import issue

TARGET_SEND_TASK = 5.0
TARGET_NOOP = 0.5
CONNECTIONS = 64
#: Bounds that are checked and never met.
MANY = 1_000_000
_BODY = '{"model": "echo", "input": "a text of some length"}'


def run(*, quick: bool) -> Report:
    seconds, rounds = (3, 5) if quick else (10, 5)
    rates: dict[str, list[float]] = {"sheaf": [], "send_task": [], "noop": []}
    for _ in range(rounds):
        rates["sheaf"].append(_ours(seconds))
        rates["send_task"].append(_peer("send_task_api:app", seconds))
        rates["noop"].append(_peer("noop_api:app", seconds))
    ours, send_task, noop = rates["sheaf"], rates["send_task"], rates["noop"]
    return Report(
        "submit",
        [
            Ratio.of_rates("submit, beside FastAPI + send_task", ours, send_task, TARGET_SEND_TASK, "req/s"),
            Ratio.of_rates("submit, beside a no-op endpoint", ours, noop, TARGET_NOOP, "req/s"),
        ],
        {"requests_per_s": rates, "connections": CONNECTIONS, "seconds": seconds},
    )


def _ours(seconds: int) -> float:
    port = free_port()
    with server() as valkey:
        config: dict[str, object] = {"broker": {"url": valkey.url, "max_queue_depth": MANY}, "api": {"port": port}}
        key = _key(valkey.url)
        with sheaf(["api"], config) as log:
            wait_for_page(f"http://127.0.0.1:{port}/livez", log)
            return load(f"http://127.0.0.1:{port}/v1/jobs", seconds, {"Authorization": f"Bearer {key}"})


def _key(broker_url: str) -> str:
    text, known = issue(
        "bench",
        scopes=[Scope.SUBMIT],
        priorities=["normal"],
        rate=Rate(MANY, 1),
        max_in_flight=MANY,
    )
    with KeyRegistry(broker_url) as keys:
        keys.add(known)
    return text


def _peer(app: str, seconds: int) -> float:
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", app, "--port", str(port), "--loop", "uvloop", "--http", "httptools"]
    command += ["--no-access-log", "--log-level", "warning"]
    with server() as valkey, process(command, environment={"BROKER_URL": valkey.url}) as log:
        wait_for_page(f"http://127.0.0.1:{port}/openapi.json", log)
        return load(f"http://127.0.0.1:{port}/v1/jobs", seconds)


def load(url: str, seconds: int, headers: Mapping[str, str] | None = None) -> float:
    """Requests per second that are answered with success."""
    closed_loop(url, [_BODY], in_flight=CONNECTIONS, seconds=1, headers=headers)
    return closed_loop(url, [_BODY], in_flight=CONNECTIONS, seconds=seconds, headers=headers).rate
