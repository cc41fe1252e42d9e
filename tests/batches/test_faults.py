"""Batches whose io worker, worker, broker or storage goes away: each line is answered once, in its place."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import redis
from celery.result import AsyncResult
from openai.types import Batch

from configs import load_settings
from tests.batches.running import Batches, answer_of, begin, end_of, job, rows_of, running
from tests.conftest import wait_until
from workers.app import make_app

LINES = 1500


@pytest.fixture
def batches(tmp_path: Path) -> Iterator[Batches]:
    with running(tmp_path, batches={"window": 200}, logging={"level": "debug"}) as made:
        yield made


@pytest.fixture
def client(batches: Batches) -> Iterator[openai.OpenAI]:
    with batches.client() as client:
        yield client


def begun(client: openai.OpenAI) -> Batch:
    """A batch of some seconds that has come a part of its way, and has a checkpoint."""
    batch = begin(client, [job(str(number), "slow", 0.004) for number in range(LINES)], "/v1/jobs")
    wait_until(lambda: completed(client, batch) > 100, description="some lines have run")
    return batch


def completed(client: openai.OpenAI, batch: Batch) -> int:
    counts = client.batches.retrieve(batch.id).request_counts
    return 0 if counts is None else counts.completed


def assert_whole(client: openai.OpenAI, batch: Batch) -> None:
    ended = end_of(client, batch, 90)
    assert ended.status == "completed", ended
    rows = rows_of(client, ended.output_file_id)
    assert [row["custom_id"] for row in rows] == [str(number) for number in range(LINES)]
    assert {answer_of(row)["output"] for row in rows} == {0.004}
    assert ended.error_file_id is None


def test_an_io_worker_that_is_killed(batches: Batches, client: openai.OpenAI) -> None:
    batch = begun(client)
    for _ in range(3):
        before = completed(client, batch)
        batches.replace(batches.io)
        wait_until(lambda before=before: completed(client, batch) > before, description="it goes on", timeout_s=30)  # type: ignore[misc]
    assert_whole(client, batch)


def test_an_io_worker_that_is_stopped_gives_the_batch_to_the_next(batches: Batches, client: openai.OpenAI) -> None:
    batch = begun(client)
    batches.io.send(signal.SIGTERM)
    assert batches.io.wait(20) == 0
    before = completed(client, batch)
    assert list((batches.folder / "io" / "var" / "batches").glob("*.checkpoint"))
    batches.io.start()
    wait_until(lambda: completed(client, batch) > before, description="it goes on")
    assert_whole(client, batch)
    assert not list((batches.folder / "io" / "var" / "batches").iterdir())


def test_a_worker_that_is_killed(batches: Batches, client: openai.OpenAI) -> None:
    batch = begun(client)
    batches.replace(batches.worker)
    assert_whole(client, batch)


def test_a_broker_that_is_killed_and_comes_back(batches: Batches, client: openai.OpenAI) -> None:
    batch = begun(client)
    batches.broker.kill()
    batches.broker.start()
    assert_whole(client, batch)


def test_a_checkpoint_that_is_lost_with_its_machine(batches: Batches, client: openai.OpenAI) -> None:
    batch = begun(client)
    batches.io.kill()
    shutil.rmtree(batches.folder / "io" / "var" / "batches")
    batches.io.start()
    assert_whole(client, batch)


def test_a_storage_that_is_away_for_a_while(batches: Batches, client: openai.OpenAI) -> None:
    batch = begun(client)
    storage = batches.folder / "files"
    batches.io.kill()
    away = storage.rename(batches.folder / "away")
    batches.io.start()
    wait_until(lambda: "The storage of a batch fails" in batches.io.log(), description="it is missed", timeout_s=30)
    assert client.batches.retrieve(batch.id).status == "in_progress"
    away.rename(storage)
    assert_whole(client, batch)


def test_a_message_that_means_no_batch_fails_for_its_sender(batches: Batches) -> None:
    app = make_app(load_settings(batches.config, {}).settings)
    sent = app.send_task("sheaf.batches", kwargs={"batch_id": "batch_of_nobody"}, queue="sheaf.batches")
    result: AsyncResult[object] = AsyncResult(sent.id, app=app)
    wait_until(result.failed, description="it has failed")
    assert "POST /v1/batches" in str(result.result)
    with redis.Redis.from_url(batches.broker.url) as server:
        assert not server.llen("sheaf.batches")
        wait_until(lambda: not server.keys("sheaf:held:sheaf.batches:*"), description="nothing is held")
