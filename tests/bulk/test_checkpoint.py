from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from bulk.checkpoint import Checkpoint
from bulk.errors import BadCheckpoint, InputChanged, InputFailed, NotResumable, OptionsChanged, OutputFailed
from bulk.fingerprint import Fingerprint
from tests.bulk.files import at


@pytest.fixture
def checkpoint() -> Checkpoint:
    return Checkpoint(
        input="/data/in.jsonl",
        fingerprint=Fingerprint(10, "5", "abc"),
        input_format="jsonl",
        output="/data/out.jsonl",
        output_format="jsonl",
        errors="/data/errors.jsonl",
        options={"model": "small", "column": "text", "parameters": {"normalize": True}},
        rows_done=7,
        output_position=1234,
        errors_position=56,
        counts={"written": 5, "failed": 2},
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl.checkpoint"


def test_a_checkpoint_is_loaded_as_it_was_saved(checkpoint: Checkpoint, path: Path) -> None:
    checkpoint.save(path)
    further = replace(checkpoint, rows_done=8, counts={"written": 6, "failed": 2}, complete=True)
    further.save(path)
    assert Checkpoint.load(path) == further
    assert list(path.parent.iterdir()) == [path]


def test_there_may_be_no_checkpoint(path: Path) -> None:
    assert Checkpoint.load(path) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"input": "x"}', b"\xff"])
def test_a_damaged_checkpoint_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(BadCheckpoint, match=path.name):
        Checkpoint.load(path)


@pytest.mark.parametrize(
    "change", [{"rows_done": 10**12}, {"rows_done": 0}, {"rows_done": -5, "counts": {}}, {"output_position": -1}]
)
def test_a_checkpoint_whose_numbers_cannot_be_is_refused(
    checkpoint: Checkpoint, path: Path, change: dict[str, object]
) -> None:
    checkpoint.save(path)
    path.write_bytes(orjson.dumps(orjson.loads(path.read_bytes()) | change))
    with pytest.raises(BadCheckpoint, match=path.name):
        Checkpoint.load(path)


def test_a_checkpoint_of_another_version_is_refused(checkpoint: Checkpoint, path: Path) -> None:
    checkpoint.save(path)
    path.write_bytes(orjson.dumps(orjson.loads(path.read_bytes()) | {"version": 2}))
    with pytest.raises(BadCheckpoint, match="version 2 wrote it"):
        Checkpoint.load(path)


def test_a_checkpoint_that_cannot_be_saved_leaves_the_one_before(checkpoint: Checkpoint, path: Path) -> None:
    checkpoint.save(path)
    path.with_name(f"{path.name}.new").mkdir()
    with pytest.raises(OutputFailed, match=path.name):
        replace(checkpoint, rows_done=8).save(path)
    assert Checkpoint.load(path) == checkpoint


def test_the_same_run_may_go_on_however_far_it_came(checkpoint: Checkpoint) -> None:
    checkpoint.check(replace(checkpoint, rows_done=0, output_position=0, counts={}))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (Fingerprint(11, "5", "abc"), "it had 10 bytes and has 11 now"),
        (Fingerprint(10, "6", "abc"), "it was written to after the run began"),
        (Fingerprint(10, "5", "abd"), "its content is another"),
    ],
)
def test_a_changed_input_is_told(checkpoint: Checkpoint, changed: Fingerprint, told: str) -> None:
    with pytest.raises(InputChanged, match=told):
        checkpoint.check(replace(checkpoint, fingerprint=changed))


def test_another_input_is_told(checkpoint: Checkpoint) -> None:
    with pytest.raises(InputChanged, match=r"it was /data/in\.jsonl and is /data/other\.jsonl now"):
        checkpoint.check(replace(checkpoint, input="/data/other.jsonl"))


def test_the_first_option_that_differs_is_named(checkpoint: Checkpoint) -> None:
    now = replace(checkpoint, options=checkpoint.options | {"model": "large", "precision": "int8"})
    with pytest.raises(OptionsChanged, match="model was small when the run began and is large now"):
        checkpoint.check(now)
    with pytest.raises(OptionsChanged, match="output_format was jsonl"):
        checkpoint.check(replace(now, output_format="csv"))
    with pytest.raises(OptionsChanged, match="precision was none"):
        checkpoint.check(replace(now, options=checkpoint.options | {"precision": "int8"}))


def test_a_fingerprint_is_the_same_until_the_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"x" * 300_000)
    before, status = Fingerprint.of(at(path)), path.stat()
    assert Fingerprint.of(at(path)) == before
    path.write_bytes(b"x" * 299_999 + b"y")
    assert before.difference(Fingerprint.of(at(path))) == "its content is another"
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert before.difference(Fingerprint.of(at(path))) == "its content is another"
    path.write_bytes(b"x" * 299_999)
    assert before.difference(Fingerprint.of(at(path))) == "it had 300000 bytes and has 299999 now"


def test_the_same_bytes_are_the_same_input_whenever_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"x" * (128 << 10))
    before = Fingerprint.of(at(path))
    os.utime(path, (0, 0))
    assert before.difference(Fingerprint.of(at(path))) is None
    path.write_bytes(b"y" * (128 << 10))
    assert before.difference(Fingerprint.of(at(path))) == "its content is another"


def test_of_a_large_input_the_modification_time_counts_too_and_the_way_to_restore_it_is_told(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"x" * ((128 << 10) + 1))
    before = Fingerprint.of(at(path))
    os.utime(path, (0, 0))
    difference = before.difference(Fingerprint.of(at(path)))
    assert difference is not None
    assert "restore its modification time too" in difference
    subprocess.run([*difference.rpartition(": ")[2].split(), str(path)], check=True)
    assert before.difference(Fingerprint.of(at(path))) is None


def test_standard_input_has_no_fingerprint() -> None:
    with pytest.raises(NotResumable, match="give the input a name"):
        Fingerprint.of(at("-"))


def test_the_fingerprint_of_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputFailed, match="No such file"):
        Fingerprint.of(at(tmp_path / "in.jsonl"))
