"""Faults of the broker and of the way to it: an API and a worker, both behind a proxy, live through all of them.

The processes are the same from the first test to the last, so each test also shows that nothing was left broken by the
ones before.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import httpx
import psutil
import pytest
import redis

from broker import Broker
from broker.embedded import EmbeddedServer
from tests.conftest import free_port, wait_until
from tests.proxy import Proxy
from tests.services import Service, answers, metric
from tests.workers.conftest import celery_app

MODELS: dict[str, object] = {
    "minilm": None,
    "echo": {"handler": "inference.handlers.echo:Echo", "max_batch_size": 16, "max_wait_ms": 0},
    "slow": {"handler": "tests.workers.handlers:Sleeper", "max_batch_size": 1, "max_wait_ms": 0},
}
READ_TIMEOUT_S = 2
LEASE_S = 6
#: Seconds that a batch runs which is to outlast a fault, and one which is to end within it.
LONGER, SHORTER = 4.0, 0.7
#: Keys in the file of a server that is to load for a while, and microseconds that it takes for each. It looks at its
#: connections once in 1024 keys.
LOADED_KEYS, KEY_DELAY_US = 40_000, 20
#: Connections that the clients' pools may still have to make before they have as many as they ever need.
SLACK = 14


@dataclass
class Stack:
    server: EmbeddedServer
    proxy: Proxy
    api: Service
    worker: Service
    client: httpx.Client
    metrics_port: int
    #: Open files and threads of both processes at the start.
    size: int = 0
    sent: dict[str, object] = field(default_factory=dict)

    def submit(self, model: str, value: object) -> httpx.Response:
        answer = self.client.post("/v1/jobs", json={"model": model, "input": value})
        if answer.status_code == 202:
            self.sent[answer.json()["id"]] = value
        return answer

    def rows_run(self) -> float:
        return metric(self.metrics_port, "sheaf_batch_size_sum")

    def processes_size(self) -> int:
        processes = [psutil.Process(service.pid) for service in (self.api, self.worker)]
        return sum(process.num_fds() + process.num_threads() for process in processes)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("faults")
    port, metrics_port = free_port(), free_port()
    # With `everysec` a kill -9 loses what a server accepted while it was waiting for the disk.
    with EmbeddedServer(free_port(), folder / "valkey", fsync="always") as server, Proxy(server.port) as proxy:
        config: dict[str, object] = {
            "broker": {"url": proxy.url, "read_timeout_s": READ_TIMEOUT_S, "lease_s": LEASE_S},
            "api": {"port": port, "max_wait_s": 20},
            "workers": {"metrics_port": metrics_port},
            "models": MODELS,
        }
        base = f"http://127.0.0.1:{port}"
        with (
            Service("api", config=config, folder=folder / "api") as api,
            Service("device", "--device", "cpu", config=config, folder=folder / "worker") as worker,
            httpx.Client(base_url=base, timeout=20) as client,
        ):
            stack = Stack(server, proxy, api, worker, client, metrics_port)
            wait_until(lambda: answers(f"{base}/readyz"), description=f"ready: {folder}", timeout_s=60)
            wait_until(lambda: controllable(stack), description="the worker takes control commands")
            assert ended(stack, stack.submit("echo", "warm"))["output"] == "warm"
            stack.size = stack.processes_size()
            yield stack
            stack.server.stop()


def controllable(stack: Stack) -> bool:
    """Whether `celery inspect ping` is answered; it asks the server directly."""
    with celery_app(stack.server.url) as app:
        try:
            return bool(app.control.inspect(timeout=0.5).ping())
        except redis.RedisError:
            # Celery's clients share a pool, which may still hold a connection of before the fault.
            return False


def ended(stack: Stack, answer: httpx.Response) -> dict[str, object]:
    """The job of this submit once it has ended."""
    assert answer.status_code == 202, answer.text
    job: dict[str, object] = stack.client.get(answer.headers["location"], params={"wait": 15}).json()
    return job


def running(stack: Stack, seconds: float) -> None:
    """Submit a job that takes so long, and see it begin."""
    location = stack.submit("slow", seconds).headers["location"]
    wait_until(lambda: stack.client.get(location).json()["status"] == "running", description="it runs")


def refused(stack: Stack) -> bool:
    """Whether a submit is refused as it should be; those that are taken all the same are jobs like any other."""
    answer = stack.submit("echo", "meanwhile")
    if answer.status_code == 202:
        return False
    assert answer.status_code == 503, answer.text
    assert answer.json()["type"] == "urn:sheaf:error:broker-unavailable"
    assert int(answer.headers["retry-after"]) >= 1
    return True


def ready(stack: Stack) -> bool:
    status = stack.client.get("/readyz").status_code
    assert status in (200, 503)
    return status == 200


@contextmanager
def stopped(stack: Stack) -> Iterator[None]:
    stack.server.stop()
    yield
    stack.server.start()


@contextmanager
def killed(stack: Stack) -> Iterator[None]:
    stack.server.kill()
    yield
    stack.server.start()


@contextmanager
def frozen_server(stack: Stack) -> Iterator[None]:
    process = psutil.Process(stack.server.pid)
    process.suspend()
    yield
    process.resume()


@contextmanager
def frozen_network(stack: Stack) -> Iterator[None]:
    stack.proxy.freeze()
    yield
    stack.proxy.thaw()


@contextmanager
def full(stack: Stack) -> Iterator[None]:
    with redis.Redis.from_url(stack.server.url) as plain:
        plain.config_set("maxmemory", 1)
        yield
        plain.config_set("maxmemory", 0)


@contextmanager
def read_only(stack: Stack) -> Iterator[None]:
    with redis.Redis.from_url(stack.server.url) as plain:
        plain.replicaof("127.0.0.1", free_port())
        yield
        plain.replicaof("NO", "ONE")


@contextmanager
def loading(stack: Stack) -> Iterator[None]:
    """Killed, and started again on a file that takes a while to read."""
    with redis.Redis.from_url(stack.server.url) as plain, plain.pipeline(transaction=False) as pipe:
        for number in range(LOADED_KEYS):
            pipe.set(f"filler:{number}", b"", ex=600)
        pipe.execute()
    stack.server.kill()
    stack.server = EmbeddedServer(
        stack.server.port, stack.server.data_dir, fsync="always", extra=("--key-load-delay", str(KEY_DELAY_US))
    )
    starting = threading.Thread(target=stack.server.start)
    starting.start()
    logged = len(stack.api.log())
    wait_until(
        lambda: not ready(stack) and "oading" in stack.api.log()[logged:], description="it is said to load, in the log"
    )
    yield
    starting.join()


Fault = Callable[[Stack], AbstractContextManager[None]]


@pytest.mark.parametrize(
    ("fault", "batch_s"),
    [
        (stopped, LONGER),
        (killed, LONGER),
        (frozen_server, LONGER),
        (frozen_network, LONGER),
        (full, LONGER),
        (read_only, LONGER),
        (killed, SHORTER),
        (frozen_server, SHORTER),
        (read_only, SHORTER),
        # Last, since from then on the server is slow to start.
        (loading, LONGER),
    ],
)
def test_all_recover_by_themselves_and_every_accepted_job_is_run_once(
    stack: Stack, fault: Fault, batch_s: float
) -> None:
    stack.sent.clear()
    running(stack, batch_s)
    stack.submit("slow", 0.0)
    for number in range(20):
        stack.submit("echo", number)
    with fault(stack):
        wait_until(lambda: refused(stack), description="submits are refused")
        assert not ready(stack)
        assert stack.client.get("/livez").status_code == 200
    wait_until(lambda: ready(stack), description="it is ready again")
    assert ended(stack, stack.submit("echo", "afterwards"))["output"] == "afterwards"
    assert_recovered(stack)


def test_a_server_that_stays_read_only_is_looked_at_now_and_then_and_costs_no_connections(stack: Stack) -> None:
    stack.sent.clear()
    said = "Control commands wait for the broker."
    before = stack.worker.log().count(said)
    with read_only(stack):
        wait_until(lambda: stack.worker.log().count(said) >= before + 3, description="it looked three times")
        assert stack.processes_size() <= stack.size + SLACK
        assert "Frequent restarts" not in stack.worker.log()
    wait_until(lambda: ready(stack), description="it is ready again")
    assert ended(stack, stack.submit("echo", "afterwards"))["output"] == "afterwards"
    assert_recovered(stack)


def test_connections_that_are_reset_three_times_in_a_row_cost_nothing(stack: Stack) -> None:
    stack.sent.clear()
    running(stack, 2.0)
    for round_ in range(3):
        # The first time there are many; later, as many as were made anew.
        assert stack.proxy.reset() > 0
        for number in range(10):
            wait_until(
                lambda value=10 * round_ + number: stack.submit("echo", value).status_code == 202,  # type: ignore[misc]  # bound now
                description="it is accepted, at the second try if need be",
            )
    wait_until(lambda: ready(stack), description="it is ready")
    assert_recovered(stack)


def test_connections_that_went_silent_for_ever_are_given_up_and_no_lease_is_lost(stack: Stack) -> None:
    stack.sent.clear()
    # Longer than the lease: renewals must find a new connection in time.
    running(stack, LEASE_S + 1.0)
    for number in range(20):
        stack.submit("echo", number)
    with reclaiming(stack.server.url):
        assert stack.proxy.abandon() > 3
        wait_until(lambda: ready(stack), description="it is ready", timeout_s=READ_TIMEOUT_S + 3)
        assert ended(stack, stack.submit("echo", "afterwards"))["output"] == "afterwards"
        assert_recovered(stack)


@contextmanager
def reclaiming(url: str) -> Iterator[None]:
    """Another worker that would take over whatever runs out; nothing does."""
    broker = Broker(url, "other")
    stop = threading.Event()
    taken: list[int] = []

    def reclaim() -> None:
        while not stop.wait(0.1):
            taken.append(broker.reclaim("infer.slow").returned)

    thread = threading.Thread(target=reclaim)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        broker.close()
    assert sum(taken) == 0


def assert_recovered(stack: Stack) -> None:
    """All that was accepted has the right result and was run once, by the processes of the beginning.

    They have not more open files and threads than they need.
    """
    for job_id, value in stack.sent.items():
        job = stack.client.get(f"/v1/jobs/{job_id}", params={"wait": 15}).json()
        assert (job["status"], job["output"], job["attempt"]) == ("succeeded", value, 1)
    # A submit that was refused for want of an answer may have been queued all the same: it is among them.
    wait_until(lambda: stack.rows_run() == len(done(stack)), description="every row that was run has been told")
    ids = done(stack)
    assert len(ids) == len(set(ids))
    assert stack.sent.keys() <= set(ids)
    assert [service.process.poll() for service in (stack.api, stack.worker)] == [None, None]
    wait_until(lambda: controllable(stack), description="the worker takes control commands")
    wait_until(
        lambda: stack.processes_size() <= stack.size + SLACK,
        description=f"no more files and threads than {stack.size}, but {stack.processes_size()}",
    )


def done(stack: Stack) -> list[str]:
    """The id in each of the worker's `Job done.` lines. Every job here has one row."""
    return [json.loads(line)["job_id"] for line in stack.worker.log().splitlines() if '"Job done."' in line]
