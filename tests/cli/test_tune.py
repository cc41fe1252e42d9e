"""`sheaf tune` as a person runs it, on a handler that costs little and has little memory."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from broker import Broker
from broker.embedded import EmbeddedServer
from configs import load_settings
from tests.conftest import free_port, wait_until
from tests.services import run_sheaf
from tests.workers.conftest import celery_app, starting_workers

HUNGRY: dict[str, object] = {
    "handler": "tests.workers.handlers:Hungry",
    "max_batch_size": 8,
    "max_batch_tokens": 512,
    "max_wait_ms": 20,
    "options": {"memory": 1000},
}
#: Words of the rows that callers sent before the tuning.
WORDS = (3, 40, 10, 100)
RATE = 40


@dataclass(frozen=True)
class Tuning:
    """A tuning that has ended, and its folder."""

    done: subprocess.CompletedProcess[str]
    folder: Path


@pytest.fixture(scope="module")
def tuning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tuning]:
    """For the traffic that a real worker recorded."""
    folder = tmp_path_factory.mktemp("tune")
    with EmbeddedServer(free_port(), folder / "valkey") as server:
        with starting_workers(folder) as start, celery_app(server.url) as app:
            start(server.url, models={"hungry": HUNGRY})
            for words in WORDS:
                row = " ".join(["word"] * words)
                app.send_task("sheaf.infer", args=[row], queue="infer.hungry").get(timeout=20)
            reader = Broker(server.url, "reader")
            wait_until(lambda: len(reader.traffic("infer.hungry")) == len(WORDS), description="the rows are recorded")
            reader.close()
        (folder / "own.yaml").write_text(yaml.safe_dump({"broker": {"url": server.url}, "models": {"hungry": HUNGRY}}))
        arguments = f"--config own.yaml tune --model hungry --rate {RATE} --seconds 1 --replay 2 --json out.json"
        yield Tuning(run_sheaf(*arguments.split(), folder=folder), folder)


def test_it_is_tuned_for_what_workers_recorded(tuning: Tuning) -> None:
    assert tuning.done.returncode == 0, tuning.done.stderr
    assert f"4 rows that workers recorded, brought to {RATE} rows/s" in tuning.done.stdout
    found = json.loads((tuning.folder / "out.json").read_text())
    assert found["traffic"]["longest_tokens"] == max(WORDS)
    assert found["measured"]["failed"] == 0


def test_what_was_predicted_and_what_was_measured_are_told(tuning: Tuning) -> None:
    for name in ("p50, ms", "p99, ms", "rows/s of this traffic", "rows/s from a full queue"):
        [line] = [line for line in tuning.done.stdout.splitlines() if line.startswith(name)]
        predicted, measured, difference = line.removeprefix(name).split()
        assert float(predicted.replace(",", "")) > 0
        assert float(measured.replace(",", "")) > 0
        assert difference.endswith("%")


def test_a_batch_that_had_no_memory_bounds_what_is_recommended(tuning: Tuning) -> None:
    assert "NOT POSSIBLE (OutOfMemoryError); what is recommended stays below" in tuning.done.stdout
    recommended = json.loads((tuning.folder / "out.json").read_text())["recommended"]
    assert max(WORDS) <= recommended["max_batch_tokens"] <= 1000


def test_the_yaml_can_be_pasted_and_the_picture_is_one(tuning: Tuning) -> None:
    text = tuning.done.stdout.partition("Paste into your settings:\n\n")[2].partition("\n\n")[0]
    own = yaml.safe_load((tuning.folder / "own.yaml").read_text())
    own["models"]["hungry"] |= yaml.safe_load(text)["models"]["hungry"]
    (tuning.folder / "pasted.yaml").write_text(yaml.safe_dump(own))
    assert load_settings(tuning.folder / "pasted.yaml", {}).settings.models["hungry"].handler == HUNGRY["handler"]
    assert "The picture: sheaf-tune-hungry.png" in tuning.done.stdout
    assert (tuning.folder / "sheaf-tune-hungry.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--model nobody --rate 1", "there is no model nobody: the settings name minilm, echo"),
        ("--model echo", "no traffic to tune echo for: the broker, which keeps what workers recorded, is away"),
        ("--model broken --rate 1", "model broken: handler 'no.such:Thing' cannot be imported"),
        ("--model echo --traffic wrong.jsonl", 'wrong.jsonl, line 1: "tokens" must be a whole number'),
        ("--model echo --traffic none.jsonl", "none.jsonl: No such file or directory"),
        ("--model echo --rate 1 --device x", "--device x: it must be cpu, or the number of one GPU"),
        ("--model echo --rate 1 --plot no/such.png", "no/such.png: there is no folder"),
    ],
)
def test_what_cannot_be_tuned_is_told_in_one_line(tmp_path: Path, arguments: str, said: str) -> None:
    (tmp_path / "wrong.jsonl").write_text('{"at": 0, "tokens": "many"}\n')
    done = run_sheaf(
        "tune", *arguments.split(), folder=tmp_path,
        SHEAF_BROKER__URL=f"redis://127.0.0.1:{free_port()}/0", SHEAF_MODELS__BROKEN="{handler: 'no.such:Thing'}",
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout == ""
    assert [line for line in done.stderr.splitlines() if line.startswith("sheaf: ")] == done.stderr.splitlines()[-1:]
    assert said in done.stderr.splitlines()[-1]
