"""`sheaf bulk list|show|pause|resume|cancel` of batches, beside runs of files."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import openai
import pytest
import redis
from openai.types import Batch

from tests.batches.running import Batches, answer_of, begin, end_of, job, rows_of, running
from tests.conftest import wait_until
from tests.services import run_sheaf
from tests.workers.conftest import held

LINES = 1500
View = dict[str, Any]


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Batches]:
    with running(tmp_path_factory.mktemp("steering"), batches={"window": 200, "max_running": 1}) as made:
        yield made


@pytest.fixture
def client(batches: Batches) -> Iterator[openai.OpenAI]:
    with batches.client() as client:
        yield client


def begun(client: openai.OpenAI, seconds: float = 0.01, **options: Any) -> Batch:
    """A batch of many seconds that has come a part of its way."""
    batch = begin(client, [job(str(number), "slow", seconds) for number in range(LINES)], "/v1/jobs", **options)
    wait_until(lambda: client.batches.retrieve(batch.id).status == "in_progress", description="it has begun")
    return batch


def bulk(batches: Batches, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_sheaf("--config", str(batches.config), "bulk", *arguments, folder=batches.folder)


def told(batches: Batches, *arguments: str) -> str:
    """What a command says that has to succeed."""
    done = bulk(batches, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def show(batches: Batches, batch_id: str) -> View:
    view: View = json.loads(told(batches, "show", batch_id, "--json"))
    return view


def under_way(batches: Batches) -> int:
    """Rows of batches in the model's queue and in its worker."""
    with redis.Redis.from_url(batches.broker.url) as client:
        lists = [*client.keys("infer.slow*"), *client.keys("sheaf:owned:infer.slow:*")]
        return sum(cast("int", client.llen(key)) for key in lists) + held(batches.broker.url, "infer.slow")


def test_a_paused_batch_leaves_the_queue_and_its_place_to_others_and_goes_on_where_it_was(
    batches: Batches, client: openai.OpenAI
) -> None:
    batch = begun(client)
    wait_until(lambda: show(batches, batch.id)["rows"], description="some lines have run")
    assert told(batches, "pause", batch.id) == f"{batch.id}: paused\n"
    paused = show(batches, batch.id)
    assert (paused["state"], paused["kind"], paused["rows_per_second"]) == ("paused", "batch", 0.0)
    assert 0 < paused["rows"] < LINES
    assert client.batches.retrieve(batch.id).status == "in_progress"
    wait_until(lambda: not under_way(batches), description="nothing of it is in the queue or in a worker")
    # There is one place.
    other = end_of(client, begin(client, [job("other", "echo", 1)], "/v1/jobs"))
    assert other.status == "completed"
    # Whoever looks after it next leaves it paused too.
    batches.replace(batches.io)
    time.sleep(6)
    assert show(batches, batch.id)["state"] == "paused"
    assert under_way(batches) == 0
    assert told(batches, "resume", batch.id) == f"{batch.id}: running\n"
    ended = end_of(client, batch)
    assert ended.status == "completed"
    rows = rows_of(client, ended.output_file_id)
    assert [row["custom_id"] for row in rows] == [str(number) for number in range(LINES)]
    assert {answer_of(row)["output"] for row in rows} == {0.01}
    assert ended.error_file_id is None
    over = bulk(batches, "pause", batch.id)
    assert over.returncode == 1
    assert f"{batch.id} has ended, it is completed" in over.stderr


def test_one_that_waits_can_be_paused_and_one_that_is_paused_cancelled(batches: Batches, client: openai.OpenAI) -> None:
    first = begun(client, 0.5)
    waiting = begin(client, [job("1", "echo", 1)], "/v1/jobs")
    told(batches, "pause", waiting.id)
    assert show(batches, waiting.id)["state"] == "paused"
    assert told(batches, "cancel", first.id) == f"{first.id}: cancelled\n"
    time.sleep(4)
    assert client.batches.retrieve(waiting.id).status == "validating"
    told(batches, "cancel", waiting.id)
    ended = end_of(client, waiting)
    assert (ended.status, ended.output_file_id) == ("cancelled", None)


def test_a_paused_batch_expires_with_what_has_run(batches: Batches, client: openai.OpenAI) -> None:
    batch = begun(client, 0.5, completion_window="1m")
    told(batches, "pause", batch.id)
    with redis.Redis.from_url(batches.broker.url) as server:
        raw = server.hget(f"sheaf:batch:{batch.id}", "record")
        assert isinstance(raw, bytes)
        server.hset(f"sheaf:batch:{batch.id}", "record", json.dumps(json.loads(raw) | {"expires_at": time.time()}))
    ended = end_of(client, batch)
    assert ended.status == "expired"
    counts = ended.request_counts
    assert counts is not None
    assert (counts.total, counts.completed + counts.failed) == (LINES, LINES)
    assert {row["error"]["code"] for row in rows_of(client, ended.error_file_id)} == {"batch_expired"}


def test_batches_and_runs_of_files_are_in_one_list(batches: Batches, client: openai.OpenAI, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"s": 0.0}\n')
    source, output = str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")
    told(batches, source, output, "--model", "slow", "--column", "s")
    ended = end_of(client, begin(client, [job("1", "slow", 0.0), job("2", "slow", "x")], "/v1/jobs"))
    batch, run, *_ = json.loads(told(batches, "list", "--json"))
    assert (batch["id"], batch["kind"], batch["state"], batch["owner"]) == (ended.id, "batch", "completed", "somebody")
    assert (batch["input"], batch["output"]) == (ended.input_file_id, ended.output_file_id)
    assert (batch["error_file_id"], batch["total"], batch["failed"], batch["ratio"]) == (ended.error_file_id, 2, 1, 1.0)
    assert (run["kind"], run["state"], run["input"]) == ("file", "succeeded", f"file://{source}"[7:])
    head, first, second = told(batches, "list", "--limit", "2").splitlines()
    assert head.split()[0] == "id"
    assert first.split()[:5] == [ended.id, "completed", "slow", "2", "1"]
    assert second.split()[0] == run["id"]
    assert "there is no bulk run batch_none" in bulk(batches, "show", "batch_none").stderr


def test_a_worker_that_stands_still_is_told_of(batches: Batches, client: openai.OpenAI) -> None:
    batch = begun(client, 0.5)
    batches.io.send(signal.SIGSTOP)
    done = bulk(batches, "pause", batch.id)
    batches.io.send(signal.SIGCONT)
    assert done.returncode == 1
    assert f"{batch.id} has not answered for 10 s, and is in_progress" in done.stderr
    wait_until(lambda: show(batches, batch.id)["state"] == "paused", description="it has heard of it")
    told(batches, "cancel", batch.id)
