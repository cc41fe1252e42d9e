"""`sheaf worker`: one process a device, each seeing its own GPU alone."""

from __future__ import annotations

import random
import signal
import socket
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import redis

from tests.conftest import wait_until
from tests.services import Service, metric
from tests.workers.conftest import celery_app

ECHO_ONLY: dict[str, object] = {"minilm": None, "echo": {"max_batch_size": 4}}


@pytest.fixture
def metrics_port() -> int:
    """The first of two ports that are free; of a range that no other test draws its ports from."""
    while True:
        port = random.randrange(20_000, 30_000)
        with suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return port


def test_each_device_has_a_process_that_sees_it_alone(tmp_path: Path, valkey_url: str, metrics_port: int) -> None:
    config = {
        "broker": {"url": valkey_url},
        "workers": {"metrics_port": metrics_port, "devices": "cpu"},
        "models": ECHO_ONLY,
    }
    # The command line goes before the file. The echo model needs no real GPU.
    gpus = {"CUDA_VISIBLE_DEVICES": "5,7"}
    with Service("worker", "--devices", "auto", config=config, folder=tmp_path, environment=gpus) as service:
        for index in range(2):
            wait_until(
                lambda index=index: ready(metrics_port + index, "cuda:0"),  # type: ignore[misc]  # bound now
                description=f"worker {index} is ready: {service.log_path}",
                timeout_s=60,
            )
        children = psutil.Process(service.pid).children()
        assert sorted(child.environ()["CUDA_VISIBLE_DEVICES"] for child in children) == ["5", "7"]
        with celery_app(valkey_url) as app:
            sent = [app.send_task("sheaf.infer", args=[n], queue="infer.echo") for n in range(400)]
            assert [result.get(timeout=20) for result in sent] == list(range(400))
        wait_until(
            lambda: sum(metric(metrics_port + i, "sheaf_batch_size_sum", model="echo") for i in range(2)) == 400,
            description="every row was run once, by either",
        )


def test_the_workers_alone_can_be_stopped_cleanly(tmp_path: Path, valkey_url: str, metrics_port: int) -> None:
    config = {"broker": {"url": valkey_url}, "workers": {"metrics_port": metrics_port}, "models": ECHO_ONLY}
    with Service("worker", "--devices", "cpu", config=config, folder=tmp_path) as service:
        wait_until(lambda: ready(metrics_port, "cpu"), description=f"ready: {service.log_path}", timeout_s=60)
        children = psutil.Process(service.pid).children(recursive=True)
        assert service.stop() == 0
        assert not [child for child in children if child.is_running()]


def test_a_second_ctrl_c_gives_everything_back_at_once(tmp_path: Path, valkey_url: str, metrics_port: int) -> None:
    config = {
        "broker": {"url": valkey_url},
        "workers": {"metrics_port": metrics_port},
        "models": {"minilm": None, "echo": None, "slow": {"handler": "tests.workers.handlers:Sleeper"}},
    }
    with (
        Service("worker", "--devices", "cpu", config=config, folder=tmp_path) as service,
        celery_app(valkey_url) as app,
        redis.Redis.from_url(valkey_url) as client,
    ):
        wait_until(lambda: ready(metrics_port, "cpu"), description=f"ready: {service.log_path}", timeout_s=60)
        app.send_task("sheaf.infer", args=[60], queue="infer.slow")
        wait_until(lambda: client.exists("sheaf:holders:infer.slow"), description="it runs")
        service.send(signal.SIGINT)
        wait_until(lambda: "Stopping." in service.log(), description="it stops in order")
        service.send(signal.SIGINT)
        assert service.wait(15) == 0
        assert client.lrange("sheaf:returned:infer.slow:0", 0, -1)[0].startswith(b"1:")


def ready(port: int, device: str) -> bool:
    try:
        return metric(port, "sheaf_model_ready", device=device) == 1
    except OSError:
        return False
