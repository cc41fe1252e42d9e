"""A stock Celery worker of a shop's own beside ours, on the same server and database."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from celery.result import AsyncResult

from tests.conftest import wait_until
from tests.services import REPOSITORY
from tests.workers.conftest import StartWorker, celery_app, wait_until_controllable

ONLY_ECHO: dict[str, object] = {"echo": {}}

StartStock = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start_stock(tmp_path: Path, valkey_url: str) -> Iterator[StartStock]:
    """Starts `celery worker` processes that take the queues `celery` and `shop`."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*, visibility_s: float = 3600) -> subprocess.Popen[bytes]:
        name = f"stock-{len(started)}"
        command = [sys.executable, "-m", "celery", "-A", "tests.workers.stock_app", "worker", "-n", f"{name}@%h"]
        command += ["-Q", "celery,shop", "-P", "threads", "-c", "2", "-l", "info"]
        environment = {"PYTHONPATH": str(REPOSITORY), "SHOP_URL": valkey_url, "SHOP_VISIBILITY_S": str(visibility_s)}
        log_path = tmp_path / f"{name}.log"
        with log_path.open("ab") as log:
            started.append(
                subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | environment, cwd=tmp_path)
            )
        wait_until(lambda: " ready." in log_path.read_text(), description=f"it is ready: {log_path}", timeout_s=30)
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def infer(app: Celery, row: object) -> AsyncResult[Any]:
    return app.send_task("sheaf.infer", args=[row], queue="infer.echo")


def test_each_runs_its_own_and_neither_touches_the_other(
    start_worker: StartWorker, start_stock: StartStock, celery_client: Celery, valkey_url: str
) -> None:
    ours, stock = start_worker(valkey_url, models=ONLY_ECHO), start_stock()
    sums = [celery_client.send_task("shop.add", args=[n, n], queue=("celery", "shop")[n % 2]) for n in range(30)]
    echoes = [infer(celery_client, n) for n in range(30)]
    assert [result.get(timeout=20) for result in sums] == [n + n for n in range(30)]
    assert [result.get(timeout=20) for result in echoes] == list(range(30))
    assert ours.metric("sheaf_batch_size_sum", model="echo") == 30

    stock.terminate()
    assert stock.wait(20) == 0
    left = celery_client.send_task("shop.add", args=[1, 1])
    # What our worker's control connection takes is not the application's default queue.
    wait_until_controllable(celery_client)
    assert infer(celery_client, "served").get(timeout=10) == "served"
    with redis.Redis.from_url(valkey_url) as client:
        assert client.llen("celery") == 1
        assert client.exists("unacked", "sheaf:unacked") == 0
    assert left.state == "PENDING"


def test_what_a_killed_stock_worker_held_comes_back_to_its_own_kind(
    start_worker: StartWorker,
    start_stock: StartStock,
    celery_client: Celery,
    valkey_url: str,
    tmp_path: Path,
) -> None:
    ours, doomed = start_worker(valkey_url, models=ONLY_ECHO), start_stock(visibility_s=1)
    journal = tmp_path / "journal"
    sent = celery_client.send_task("shop.slow", args=[0.5, str(journal)], queue="shop")
    wait_until(journal.exists, description="the task has begun")
    doomed.kill()
    delayed = celery_client.send_task("sheaf.infer", args=["later"], queue="infer.echo", countdown=2)
    start_stock(visibility_s=1)
    assert sent.get(timeout=30) == "slept"
    assert journal.read_text() == "run\n" * 2
    assert delayed.get(timeout=10) == "later"
    assert ours.metric("sheaf_batch_size_sum", model="echo") == 1


def test_our_worker_gives_no_task_of_others_back(
    start_worker: StartWorker, start_stock: StartStock, valkey_url: str, tmp_path: Path
) -> None:
    """A shop with a longer visibility timeout than kombu's hour may have tasks that run for hours."""
    start_stock(visibility_s=100_000)
    # The client listens for answers to control commands, and kombu lets it give tasks back too.
    with celery_app(valkey_url, broker_transport_options={"visibility_timeout": 100_000}) as client:
        _our_worker_leaves_it_alone(start_worker, client, valkey_url, tmp_path)


def _our_worker_leaves_it_alone(
    start_worker: StartWorker, celery_client: Celery, valkey_url: str, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    sent = celery_client.send_task("shop.slow", args=[30, str(journal)], queue="shop")
    wait_until(journal.exists, description="the task has begun")
    with redis.Redis.from_url(valkey_url) as client:
        [tag] = client.zrange("unacked_index", 0, -1)
        long_ago = float(int(time.time())) - 7200
        client.zadd("unacked_index", {tag: long_ago})
        start_worker(valkey_url, models=ONLY_ECHO)
        wait_until_controllable(celery_client)
        assert infer(celery_client, "x").get(timeout=10) == "x"
        assert client.zscore("unacked_index", tag) == long_ago
    journal.with_name("journal.end").touch()
    assert sent.get(timeout=20) == "slept"
    assert journal.read_text() == "run\n"
