"""Several processes on one port: whoever answers, the answer is the same."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from broker.embedded import EmbeddedServer
from tests.api.conftest import RunningApi
from tests.api.raw import answer_of, connect, request
from tests.conftest import free_port, wait_until
from tests.services import Service, answers, metric

WORKERS = 2
#: So many connections that each process has some of them.
CALLERS = 24


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApi]:
    port, folder = free_port(), tmp_path_factory.mktemp("workers")
    with EmbeddedServer(free_port(), folder / "valkey") as broker:
        config: dict[str, object] = {
            "broker": {"url": broker.url},
            "api": {"port": port, "max_wait_s": 20},
            "models": {"minilm": None, "echo": {"handler": "inference.handlers.echo:Echo"}},
        }
        with Service("api", "--workers", str(WORKERS), config=config, folder=folder / "api") as service:
            base = f"http://127.0.0.1:{port}"
            made = RunningApi(base, service, None, broker, config)
            wait_until(lambda: _alive(made), description="alive")
            yield made


def test_all_that_one_process_does_holds_at_the_others(api: RunningApi) -> None:
    port = _port(api)
    with ExitStack() as stack:
        callers = [stack.enter_context(httpx.Client(base_url=api.base, timeout=30)) for _ in range(CALLERS)]
        pool = stack.enter_context(ThreadPoolExecutor(CALLERS))

        def submit(caller: httpx.Client) -> httpx.Response:
            return caller.post("/v1/jobs", json={"model": "echo", "input": 1}, headers={"idempotency-key": "same"})

        # Each process opens the connections that it has taken before any of them is used.
        wait_until(lambda: _spread(api, callers), description="each process has callers")
        accepted = list(pool.map(submit, callers))
        assert {answer.status_code for answer in accepted} == {202}
        [job_id] = {answer.json()["id"] for answer in accepted}

        waiting = [pool.submit(caller.get, f"/v1/jobs/{job_id}?wait=20") for caller in callers]
        wait_until(lambda: metric(port, "sheaf_waiters") == CALLERS, description="all are counted, wherever they wait")
        with httpx.Client(base_url=api.base) as other:
            assert other.post(f"/v1/jobs/{job_id}/cancel").status_code == 200
        assert {one.result().json()["status"] for one in waiting} == {"cancelled"}
        wait_until(lambda: metric(port, "sheaf_waiters") == 0, description="nobody waits any more")


def test_what_they_count_is_told_as_one_and_outlives_a_process_that_is_killed(api: RunningApi) -> None:
    port = _port(api)

    def counted() -> float:
        return metric(port, "sheaf_http_requests_total", route="/v1/models")

    def ask() -> None:
        for _ in range(CALLERS):
            assert answers(f"{api.base}/v1/models")

    ask()
    wait_until(lambda: counted() == CALLERS, description="all requests are counted")
    killed, *others = _children(api)
    wait_until(lambda: _written(killed) == CALLERS, description="all is written where the others find it")
    assert metric(port, "sheaf_http_request_seconds_count", route="/v1/models") == CALLERS
    assert metric(port, "sheaf_http_request_seconds_bucket", route="/v1/models", le="+Inf") == CALLERS
    killed.kill()
    wait_until(lambda: len(_children(api)) == WORKERS, description="another was started")
    assert others[0] in _children(api)
    wait_until(lambda: counted() == CALLERS, description="nothing that was counted is lost")
    ask()
    wait_until(lambda: counted() == 2 * CALLERS, description="it goes on from there")
    assert metric(port, "process_resident_memory_bytes") > sum(one.memory_info().rss for one in _children(api)) / 2
    assert "A process ended by itself" in api.service.log()


def test_no_caller_is_turned_away_while_a_process_is_killed_and_started_again(api: RunningApi) -> None:
    stop = threading.Event()
    told: Counter[object] = Counter()

    def call() -> None:
        while not stop.is_set():
            try:
                told[httpx.get(f"{api.base}/livez", timeout=20).status_code] += 1
            except httpx.ConnectError:
                told["refused"] += 1
            except httpx.TransportError:
                told["cut"] += 1

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    try:
        _children(api)[0].kill()
        wait_until(lambda: len(_children(api)) == WORKERS, description="another was started")
        served = told[200]
        wait_until(lambda: told[200] > served + 20, description="callers are served")
    finally:
        stop.set()
        for caller in callers:
            caller.join()
    # What the killed one had in its hands is cut; nobody else notices.
    assert told["refused"] == 0
    assert told["cut"] <= len(callers)


def test_stopping_answers_those_who_wait_and_waits_for_nobody_else(api: RunningApi) -> None:
    port = _port(api)
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(CALLERS))
        callers = [stack.enter_context(httpx.Client(base_url=api.base, timeout=30)) for _ in range(CALLERS)]
        job = callers[0].post("/v1/jobs", json={"model": "echo", "input": 1}).json()
        waiting = [pool.submit(caller.get, f"{job['urls']['self']}?wait=20") for caller in callers]
        half = stack.enter_context(connect(port))
        half.sendall(request("POST", "/v1/jobs", "content-type: application/json", "content-length: 100") + b"{")
        stack.enter_context(connect(port)).sendall(b"GET /livez HT")
        wait_until(lambda: metric(port, "sheaf_waiters") == CALLERS, description="all wait")
        api.service.send(signal.SIGTERM)
        assert [one.result().json()["status"] for one in waiting] == ["queued"] * CALLERS
        assert answer_of(half).status == 503
        assert api.service.wait(25) == 0
    assert "Traceback" not in api.service.log()


def test_no_process_outlives_the_one_that_started_them(api: RunningApi) -> None:
    """Last in this file: it kills what the others use."""
    if api.service.process.poll() is not None:
        api.service.start()
    wait_until(lambda: _alive(api), description="alive")
    children = _children(api)
    api.service.process.kill()
    wait_until(
        lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in children),
        description="they have ended",
    )


def _alive(api: RunningApi) -> bool:
    return len(_children(api)) == WORKERS and answers(f"{api.base}/livez")


def _port(api: RunningApi) -> int:
    return httpx.URL(api.base).port or 0


def _written(process: psutil.Process) -> float:
    """How many requests for the models all processes have told one another of."""
    command = process.cmdline()
    pages = Path(command[command.index("--folder") + 1]).glob("*.prom")
    return sum(
        sample.value
        for page in pages
        for family in text_string_to_metric_families(page.read_text())
        for sample in family.samples
        if sample.name == "sheaf_http_requests_total" and sample.labels["route"] == "/v1/models"
    )


def _children(api: RunningApi) -> list[psutil.Process]:
    """The processes that serve."""
    return [one for one in psutil.Process(api.service.pid).children() if _serves(one)]


def _serves(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return any(each.status == "LISTEN" for each in process.net_connections("tcp"))
    return False


def _spread(api: RunningApi, callers: list[httpx.Client]) -> bool:
    """Whether each process has taken connections of these callers; those that have none yet connect."""
    for caller in callers:
        caller.get("/livez")
    port = _port(api)
    taken = [
        sum(each.laddr.port == port and each.status == "ESTABLISHED" for each in one.net_connections("tcp"))
        for one in _children(api)
    ]
    return len(taken) == WORKERS and all(taken)
