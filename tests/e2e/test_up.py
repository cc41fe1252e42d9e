"""`sheaf up` as the README shows it: one command, a request, a Celery client, Flower in a browser, Ctrl-C."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import redis
from selenium import webdriver
from selenium.webdriver.common.by import By

from tests.conftest import free_port, program, wait_until
from tests.services import REPOSITORY, Service
from tests.workers.conftest import celery_app

#: Two processes of a fresh machine import torch at once.
START_TIMEOUT_S = 90.0


#: No window, no sandbox (the tests may run as root), and no calls home.
CHROMIUM_FLAGS = (
    "--headless=new",
    "--window-size=1200,900",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@dataclass(frozen=True)
class RunningUp:
    service: Service
    config: dict[str, dict[str, object]]

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self.config['api']['port']}"

    @property
    def flower(self) -> str:
        return f"http://127.0.0.1:{self.config['flower']['port']}"

    @property
    def broker(self) -> str:
        return f"redis://127.0.0.1:{self.config['broker']['embedded_port']}/0"


def own_ports() -> dict[str, dict[str, object]]:
    return {
        "broker": {"embedded_port": free_port(), "data_dir": "var/valkey"},
        "api": {"port": free_port()},
        "flower": {"port": free_port()},
        "workers": {"metrics_port": free_port(), "devices": "cpu"},
        "io": {"metrics_port": free_port()},
    }


def ready(service: Service) -> bool:
    assert service.process.poll() is None, service.log()
    return "Sheaf is ready." in service.log()


def children(service: Service) -> list[psutil.Process]:
    return psutil.Process(service.pid).children(recursive=True)


def all_end(service: Service, number: signal.Signals) -> bool:
    """Stop it; True when it ends well, with every process that it started."""
    started = children(service)
    service.send(number)
    return service.wait(40) == 0 and not [process for process in started if process.is_running()]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningUp]:
    config = own_ports()
    with Service("up", config=config, folder=tmp_path_factory.mktemp("up")) as service:
        wait_until(lambda: ready(service), description=f"ready: {service.log_path}", timeout_s=START_TIMEOUT_S)
        yield RunningUp(service, config)


def test_the_addresses_are_printed_and_answer(up: RunningUp) -> None:
    printed = up.service.log()
    pages = [
        f"{up.api}/docs",
        up.flower,
        f"{up.api}/metrics",
        f"http://127.0.0.1:{up.config['workers']['metrics_port']}/metrics",
        f"http://127.0.0.1:{up.config['io']['metrics_port']}/metrics",
    ]
    for page in pages:
        assert page in printed
        with urllib.request.urlopen(page, timeout=10) as answer:
            assert answer.status == 200
    assert up.broker in printed
    with redis.Redis.from_url(up.broker) as client:
        assert client.ping()


def test_the_printed_request_returns_the_embedding_of_a_real_model(up: RunningUp) -> None:
    program("curl")
    [line] = [line for line in up.service.log().splitlines() if line.strip().startswith("curl ")]
    done = subprocess.run(shlex.split(line), capture_output=True, check=True, timeout=30)
    job = json.loads(done.stdout)
    assert job["status"] == "succeeded"
    assert len(job["output"]) == 384
    assert sum(value * value for value in job["output"]) == pytest.approx(1.0, abs=1e-4)


def test_the_readmes_celery_snippet_works_as_it_stands(up: RunningUp, tmp_path: Path) -> None:
    readme = (REPOSITORY / "README.md").read_text()
    [snippet] = [code for code in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "send_task" in code]
    script = tmp_path / "snippet.py"
    script.write_text(snippet.replace("redis://127.0.0.1:6380/0", up.broker))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=60, cwd=tmp_path
    )
    assert done.stdout == "384\n"


def test_fifty_texts_of_a_plain_celery_client_are_served_in_batches(up: RunningUp) -> None:
    def counted(name: str) -> float:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{up.config['workers']['metrics_port']}/metrics", timeout=5
        ) as page:
            found = re.search(
                rf'^sheaf_batch_size_{name}{{model="minilm".*?}} (.*)$', page.read().decode(), re.MULTILINE
            )
        return float(found[1]) if found else 0.0

    rows, batches = counted("sum"), counted("count")
    with celery_app(up.broker) as app:
        sent = [app.send_task("sheaf.infer", args=[f"text {n}"], queue="infer.minilm") for n in range(50)]
        assert all(len(result.get(timeout=30)) == 384 for result in sent)
    wait_until(lambda: counted("sum") == rows + 50, description="fifty rows are counted")
    assert 50 / (counted("count") - batches) > 1


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[webdriver.Chrome]:
    binary, driver = program("chromium"), program("chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    options.add_argument(f"--user-data-dir={tmp_path}")
    for flag in CHROMIUM_FLAGS:
        options.add_argument(flag)
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield chrome
    chrome.quit()


def test_flower_shows_the_task_as_a_success_with_its_worker_and_runtime(
    up: RunningUp, browser: webdriver.Chrome
) -> None:
    with celery_app(up.broker) as app:
        sent = app.send_task("sheaf.infer", args=["for Flower"], queue="infer.minilm")
        sent.get(timeout=30)

    def cells() -> dict[str, str]:
        browser.get(f"{up.flower}/task/{sent.id}")
        names, values = (browser.find_elements(By.TAG_NAME, tag) for tag in ("dt", "dd"))
        return {name.text: value.text for name, value in zip(names, values, strict=True)}

    wait_until(lambda: cells().get("Status") == "SUCCESS", description="Flower shows the task as SUCCESS")
    shown = cells()
    assert "sheaf.infer" in browser.find_element(By.TAG_NAME, "body").text
    assert shown["Worker"].startswith("sheaf-cpu0@")
    assert float(shown["Runtime"].split()[0]) > 0
    assert shown["Result"] == "float32[384]"


def test_flower_lists_the_worker_as_online(up: RunningUp, browser: webdriver.Chrome) -> None:
    def row() -> str:
        browser.get(f"{up.flower}/workers")
        wait_until(lambda: browser.find_elements(By.CSS_SELECTOR, "tbody td"), description="the table is filled")
        # Not `.text`, which is split where the page styles a first letter.
        return str(browser.find_element(By.CSS_SELECTOR, "tbody").get_attribute("textContent"))

    wait_until(lambda: "sheaf-cpu0@" in row() and "Online" in row(), description="the worker's row says Online")


def test_a_worker_that_dies_is_started_again(up: RunningUp) -> None:
    """kill -9 of the worker: its work comes back, nothing needs to be done by hand."""
    [worker] = [process for process in children(up.service) if "device" in process.cmdline()]
    worker.kill()
    request = urllib.request.Request(
        f"{up.api}/v1/jobs",
        data=b'{"model": "minilm", "input": "after the fall"}',
        headers={"content-type": "application/json", "prefer": "wait=60"},
    )
    with urllib.request.urlopen(request, timeout=70) as answer:
        assert json.load(answer)["status"] == "succeeded"
    assert "A process ended by itself" in up.service.log()


@pytest.mark.parametrize(
    "key", ["api.port", "flower.port", "broker.embedded_port", "workers.metrics_port", "io.metrics_port"]
)
def test_a_port_that_is_taken_is_told_in_one_line_and_nothing_is_started(tmp_path: Path, key: str) -> None:
    config = own_ports()
    section, _, name = key.partition(".")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(str(config[section][name]))))
        taken.listen()
        with Service("up", config=config, folder=tmp_path) as service:
            assert service.wait(30) == 1
    [line] = service.log().splitlines()
    assert line.startswith(
        f"sheaf: port {config[section][name]} on 127.0.0.1 ({key}) cannot be had: Address already in use"
    )
    assert f"SHEAF_{section.upper()}__{name.upper()}" in line


def test_stopping_ends_every_process_and_what_waits_is_served_after_a_restart(tmp_path: Path) -> None:
    config: dict[str, object] = {
        **own_ports(),
        "models": {"minilm": None, "slow": {"handler": "tests.workers.handlers:Sleeper", "max_batch_size": 1}},
    }
    broker = f"redis://127.0.0.1:{config['broker']['embedded_port']}/0"  # type: ignore[index]  # of own_ports
    with Service("up", config=config, folder=tmp_path) as service:
        wait_until(lambda: ready(service), description=f"ready: {service.log_path}", timeout_s=START_TIMEOUT_S)
        with celery_app(broker) as app:
            sent = [app.send_task("sheaf.infer", args=[0.5], queue="infer.slow").id for _ in range(12)]
            wait_until(lambda: app.AsyncResult(sent[0]).ready(), description="the first is done")
        assert all_end(service, signal.SIGINT)
        assert (tmp_path / "var/valkey/appendonlydir").is_dir()
        service.start()
        wait_until(
            lambda: service.log().count("Sheaf is ready.") == 2, description="it is up again", timeout_s=START_TIMEOUT_S
        )
        with celery_app(broker) as app:
            assert [app.AsyncResult(job).get(timeout=20) for job in sent] == [0.5] * 12
        assert all_end(service, signal.SIGTERM)


def test_no_process_outlives_a_supervisor_that_was_killed(tmp_path: Path) -> None:
    config: dict[str, object] = {**own_ports(), "models": {"minilm": None}}
    with Service("up", config=config, folder=tmp_path) as service:
        wait_until(lambda: ready(service), description=f"ready: {service.log_path}", timeout_s=START_TIMEOUT_S)
        started = children(service)
        assert len(started) >= 4
        service.process.kill()
        wait_until(
            lambda: not [p for p in started if p.is_running() and p.status() != psutil.STATUS_ZOMBIE],
            description="all children have ended",
            timeout_s=40,
        )


def test_the_readme_shows_the_request_that_is_printed(up: RunningUp) -> None:
    [line] = [line.strip() for line in up.service.log().splitlines() if line.strip().startswith("curl ")]
    readme = (REPOSITORY / "README.md").read_text()
    assert line.replace(up.api, "http://127.0.0.1:8000") in readme
