"""A run that is killed without a word, anywhere, and gone on with: each row is in the output once."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bulk.checkpoint import Checkpoint
from bulk.fingerprint import Fingerprint
from tests.bulk.files import at, columns_of, out, write
from tests.services import REPOSITORY

ROWS = 4000
WINDOW = 50

#: Copies rows with a checkpoint every few windows, and says on standard output how far it is.
RUN = f"""
import sys
from dataclasses import replace
from itertools import islice
from bulk.checkpoint import Checkpoint
from bulk.fingerprint import Fingerprint
from bulk.reading import read_rows
from bulk.rows import OutRow
from bulk.writing import finish_output, open_writer
from tests.bulk.files import at

source, target = at(sys.argv[1]), at(sys.argv[2])
sidecar = target.beside(".checkpoint")
state = Checkpoint(
    input=source.url, fingerprint=Fingerprint.of(source), input_format="", output=target.url, output_format="",
    errors=None, options={{}},
)
earlier = Checkpoint.load(sidecar)
if earlier is not None:
    earlier.check(state)
    state = earlier
if state.complete:
    finish_output(target, position=state.output_position)
else:
    resume_at = None if earlier is None else state.output_position
    with read_rows(source, start=state.rows_done) as rows, open_writer(
        target, head=rows.head, results=["label"], resume_at=resume_at, overwrite=earlier is None
    ) as writer:
        for count in range(1, 10**9):
            window = list(islice(rows, {WINDOW}))
            writer.write([OutRow(row, {{"label": [row.number]}}) for row in window])
            print(count, flush=True)
            if count % 7 == 0 or not window:
                done = window[-1].number + 1 if window else state.rows_done
                state = replace(state, rows_done=done, output_position=writer.flush(), complete=not window)
                print("flushed", flush=True)
                state.save(sidecar)
                print("saved", flush=True)
            if not window:
                break
        writer.commit()
print("committed", flush=True)
sidecar.unlink()
"""


def start(source: Path, target: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RUN, str(source), str(target)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)


def killed_after(lines: int, source: Path, target: Path) -> None:
    with start(source, target) as process:
        assert process.stdout is not None
        for _ in range(lines):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        assert process.wait() in (-signal.SIGKILL, 0)


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv.gz", "out.jsonl.zst", "out.parquet"])
def test_a_run_that_is_killed_again_and_again_writes_each_row_once(name: str, tmp_path: Path) -> None:
    source, target = tmp_path / "in.csv", tmp_path / name
    source.write_text("text\n" + "".join(f"row {number}\n" for number in range(ROWS)))
    # Before the first checkpoint, within a window, after a flush that no checkpoint counts, after a checkpoint.
    for lines in (3, 8, 9, 25):
        killed_after(lines, source, target)
        assert not target.exists()
    with start(source, target) as process:
        told = process.communicate(timeout=60)[0].split()
    assert process.returncode == 0
    assert told[-1] == "committed"
    assert [row["text"] for row in columns_of(target)] == [f"row {number}" for number in range(ROWS)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["in.csv", name])


def test_a_run_that_was_killed_after_its_commit_finds_the_output_finished(tmp_path: Path) -> None:
    source, target = tmp_path / "in.csv", tmp_path / "out.jsonl"
    source.write_text("text\n" + "x\n" * 10)
    write(target, out([{"text": "x"}] * 10))
    Checkpoint(
        input=at(source).url,
        fingerprint=Fingerprint.of(at(source)),
        input_format="",
        output=at(target).url,
        output_format="",
        errors=None,
        options={},
        output_position=target.stat().st_size,
        complete=True,
    ).save(at(target).beside(".checkpoint"))
    with start(source, target) as process:
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert len(columns_of(target)) == 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.csv", "out.jsonl"]
