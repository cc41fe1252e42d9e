"""What a tuning tells: text, YAML, JSON and a picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from batching import Limits
from configs import load_settings
from tuning.measuring import Measured, Tried, fit
from tuning.plot import draw
from tuning.replay import Seen
from tuning.report import Predicted, Report
from tuning.search import Candidate, Service, frontier
from tuning.traffic import made_up

PRESENT = Candidate(Limits(32, 8192, 0.01), 900.0, 0.02, 0.05)
CHOSEN = Candidate(Limits(64, 4096, 0.0025, (16, 32), adaptive_wait=True), 1200.0, 0.015, 0.04)
TRIED = [Tried(1, 8, 0.01), Tried(2, 8, 0.011), Tried(4, 8, 0.012)]
OUT_OF_MEMORY = Tried(8, 8, None, "OutOfMemoryError")


def report(**changes: object) -> Report:
    candidates = [PRESENT, CHOSEN]
    whole = Report(
        model="minilm",
        device="cpu",
        traffic=made_up(20.0, 64),
        measured=Measured([*TRIED, OUT_OF_MEMORY], "", 0.001),
        fit=fit(TRIED),
        service=Service(0.001, 0.0001, [0.003]),
        candidates=candidates,
        frontier=frontier(candidates),
        present=PRESENT,
        present_limits=PRESENT.limits,
        chosen=CHOSEN,
        p99_s=0.05,
        kept=True,
        predicted=Predicted(0.015, 0.04, 20.0, 1200.0),
        seen=Seen([0.02] * 98 + [0.06, 0.06], 0, 20.0, 1000.0),
    )
    return replace(whole, **changes)  # type: ignore[arg-type]  # a test's shorthand


def test_the_yaml_can_be_pasted_into_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(report().as_yaml())
    model = load_settings(file, {}).settings.models["minilm"]
    assert (model.max_batch_size, model.max_batch_tokens, model.max_wait_ms) == (64, 4096, 2.5)
    assert (model.preferred_batch_sizes, model.adaptive_wait) == ([16, 32], True)
    assert model.task == "embedding"


def test_the_yaml_names_what_differs_and_the_three_bounds() -> None:
    assert report(chosen=PRESENT).settings() == {"max_batch_size": 32, "max_batch_tokens": 8192, "max_wait_ms": 10}


def test_what_was_predicted_stands_beside_what_was_measured() -> None:
    lines = {line.split("  ")[0]: line.split()[-3:] for line in report().as_text().splitlines()}
    assert lines["p99, ms"] == ["40.00", "60.00", "+50%"]
    assert lines["rows/s from a full queue"] == ["1,200.00", "1,000.00", "-17%"]


def test_a_p99_that_was_missed_or_cannot_be_kept_is_said_plainly() -> None:
    assert "MISSED: the measured p99 of 60 ms is over the 50 ms asked for" in report().as_text()
    assert "KEPT: the measured p99 of 60 ms is within the 70 ms asked for" in report(p99_s=0.07).as_text()
    assert "NO SETTING keeps a p99 of 10 ms" in report(p99_s=0.01, kept=False).as_text()


def test_what_lies_far_from_what_was_predicted_is_said_plainly() -> None:
    far = "WARNING: far from what was predicted"
    assert far not in report().as_text()
    assert far in report(seen=Seen([0.2], 0, 20.0, 1000.0)).as_text()


def test_what_was_not_possible_and_what_failed_are_shown() -> None:
    assert "8 x 8 tokens: NOT POSSIBLE (OutOfMemoryError); what is recommended stays below" in report().as_text()
    assert "WARNING: 3 rows FAILED" in report(seen=Seen([0.02], 3, 20.0, 1000.0)).as_text()
    crooked = fit([Tried(1, tokens, (tokens / 100) ** 3) for tokens in (10, 20, 50, 100, 500)])
    assert "WARNING: the times lie on no straight line" in report(fit=crooked).as_text()


def test_both_settings_are_marked_in_the_table() -> None:
    lines = report().as_text().splitlines()
    assert [line.split("<- ")[1] for line in lines if "<- " in line] == ["present", "recommended"]
    assert "cannot serve this traffic: 32 rows" in report(present=None).as_text()


def test_programs_get_all_figures() -> None:
    found = json.loads(json.dumps(report().as_json()))
    assert found["recommended"]["max_batch_size"] == 64
    assert found["measured"]["p99_s"] == 0.06
    assert found["cost"]["batches"][-1]["cause"] == "OutOfMemoryError"


@pytest.mark.parametrize("changes", [{}, {"present": None, "seen": None, "p99_s": None}, {"p99_s": 9.0}])
def test_the_picture_is_a_png(tmp_path: Path, changes: dict[str, object]) -> None:
    file = tmp_path / "picture.png"
    draw(report(**changes), file)
    assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
