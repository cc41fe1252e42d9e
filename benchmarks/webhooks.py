"""What webhooks cost the way of a job, from submit to stored result, and that a dead receiver adds nothing to it.

Jobs of a null model over HTTP, each waited for, 64 at a time, through API, worker and broker, with the io worker beside
them. Three times each round: without a webhook, with one whose receiver is down, with one whose receiver answers. All
processes share the machine, so a call costs them the processor time that the io worker and the receiver take for it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import orjson

from benchmarks.processes import free_port, process, server, sheaf, wait_for_page
from benchmarks.report import Ratio, Report
from benchmarks.wrk import Answered, closed_loop

#: A receiver that is down costs the jobs no more than one that answers.
TARGET_BESIDE_ANSWERS = 1.0
#: What it costs to take a webhook with each job, keep it, and put its call off: on two cores that are full, with a
#: model that does nothing, some tenths of a millisecond a job.
TARGET_BESIDE_NONE = 0.75
IN_FLIGHT = 64
WAIT_S = 30


def run(*, quick: bool) -> Report:
    seconds, rounds = (4, 2) if quick else (15, 3)
    answered: dict[str, list[Answered]] = {"no webhook": [], "receiver down": [], "receiver answers": []}
    for _ in range(rounds):
        for receiver, loads in answered.items():
            loads.append(_measure(receiver, seconds))
    rates = {receiver: [load.rate for load in loads] for receiver, loads in answered.items()}
    lines = [
        f"{receiver}: p50 {loads[-1].p50_ms:.1f} ms, p99 {loads[-1].p99_ms:.1f} ms from submit to result"
        for receiver, loads in answered.items()
    ]
    down = rates["receiver down"]
    ratios = [
        Ratio.of_rates(f"jobs whose receiver is down, beside {peer}", down, rates[peer], target, "jobs/s")
        for peer, target in (("receiver answers", TARGET_BESIDE_ANSWERS), ("no webhook", TARGET_BESIDE_NONE))
    ]
    return Report("webhooks", ratios, {"jobs_per_s": rates, "in_flight": IN_FLIGHT, "seconds": seconds}, lines)


def _measure(receiver: str, seconds: int) -> Answered:
    port = free_port()
    body: dict[str, object] = {"model": "echo", "input": "a text of some length"}
    with ExitStack() as stack:
        valkey = stack.enter_context(server())
        config: dict[str, object] = {
            "broker": {"url": valkey.url, "max_queue_depth": 0},
            "api": {"port": port},
            "workers": {"metrics_port": free_port()},
            "io": {"metrics_port": free_port()},
            "webhooks": {"allow": ["127.0.0.1"]},
            "models": {"minilm": None, "echo": {"max_batch_size": 64}},
        }
        log = stack.enter_context(sheaf(["api"], config))
        stack.enter_context(sheaf(["device", "--device", "cpu"], config))
        stack.enter_context(sheaf(["io"], config))
        if receiver == "receiver down":
            body["webhook"] = {"url": f"http://127.0.0.1:{free_port()}/v1/jobs"}
        elif receiver == "receiver answers":
            body["webhook"] = {"url": stack.enter_context(_receiver())}
        url = f"http://127.0.0.1:{port}/v1/jobs"
        wait_for_page(f"http://127.0.0.1:{port}/readyz", log)
        headers = {"Prefer": f"wait={WAIT_S}"}
        text = orjson.dumps(body).decode()
        closed_loop(url, [text], in_flight=IN_FLIGHT, seconds=1, headers=headers)
        return closed_loop(url, [text], in_flight=IN_FLIGHT, seconds=seconds, headers=headers)


@contextmanager
def _receiver() -> Iterator[str]:
    """Answers every call at once; yields its URL."""
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "noop_api:app", "--port", str(port), "--loop", "uvloop"]
    command += ["--http", "httptools", "--no-access-log", "--log-level", "warning"]
    with process(command, environment={}) as log:
        url = f"http://127.0.0.1:{port}/v1/jobs"
        wait_for_page(f"http://127.0.0.1:{port}/openapi.json", log)
        yield url
