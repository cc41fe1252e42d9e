"""Rows that fail together are tried apart while the queue is full: none of them is left undone."""

from __future__ import annotations

import json
from pathlib import Path

from celery import Celery

from tests.bulk.running import running

#: Seconds that a row of the flood takes, and how many there are: the queue is full while they are served.
FLOOD_S, FLOOD = 0.2, 60
ROWS = 40
KILLING = 17


def test_rows_of_a_message_that_kills_its_worker_are_all_done_though_the_queue_is_full(tmp_path: Path) -> None:
    models: dict[str, object] = {
        "minilm": None,
        "echo": None,
        "killer": {"handler": "tests.workers.handlers:Killer", "max_batch_size": 4, "max_wait_ms": 0},
    }
    with running(tmp_path, models, max_attempts=1, max_queue_depth=4) as service:
        rows = [{"id": number, "s": -9.0 if number == KILLING else 0.0} for number in range(ROWS)]
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        with Celery(broker=service.broker.url, backend=service.broker.url) as shop:
            for _ in range(FLOOD):
                shop.send_task("sheaf.infer", args=[FLOOD_S], queue="infer.killer", ignore_result=True)
            arguments = ("in.jsonl", "out.jsonl", "--model", "killer", "--column", "s")
            done = service.bulk(*arguments, "--json", folder=tmp_path)
            assert done.returncode == 3, done.stderr
            summary = json.loads(done.stdout)
            assert (summary["succeeded"], summary["failed"]) == (ROWS - 1, 1)
    output = [json.loads(line)["id"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert output == [number for number in range(ROWS) if number != KILLING]
    [failed] = [json.loads(line) for line in (tmp_path / "out.jsonl.errors.jsonl").read_text().splitlines()]
    assert (failed["line"], failed["error"]["type"]) == (KILLING + 1, "worker_lost")
