from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import orjson
import pyarrow.parquet as pq
import pytest

from bulk.errors import NotResumable, OutputExists, OutputFailed, SchemaMismatch
from bulk.formats import Format
from bulk.rows import Head
from bulk.writing import finish_output, open_writer
from tests.bulk.files import at, columns_of, out
from tests.services import REPOSITORY

NAMES = ["out.jsonl", "out.csv", "out.jsonl.gz", "out.csv.zst", "out.parquet"]
ROWS = [{"text": f"row {number}"} for number in range(20)]


@pytest.fixture(params=NAMES)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / str(request.param)


def left(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_an_output_has_its_name_when_it_is_committed_and_not_before(path: Path) -> None:
    with open_writer(at(path)) as writer:
        writer.write(out(ROWS))
        writer.flush()
        assert not path.exists()
        writer.commit()
    assert columns_of(path) == ROWS
    assert left(path.parent) == [path.name]


def test_a_resumed_output_has_each_row_once(path: Path) -> None:
    with open_writer(at(path)) as writer:
        writer.write(out(ROWS[:7]))
        position = writer.flush()
        writer.write(out(ROWS[7:12], first=7))
        writer.flush()
        writer.write(out(ROWS[12:14], first=12))
    with open_writer(at(path), resume_at=position) as writer:
        writer.write(out(ROWS[7:], first=7))
        writer.commit()
    assert columns_of(path) == ROWS


def test_an_output_may_be_resumed_at_its_very_beginning(path: Path) -> None:
    with open_writer(at(path)) as writer:
        writer.write(out(ROWS[:7]))
        writer.flush()
    with open_writer(at(path), resume_at=0) as writer:
        writer.write(out(ROWS))
        writer.commit()
    assert columns_of(path) == ROWS


def test_a_position_stays_where_nothing_was_written(path: Path) -> None:
    with open_writer(at(path)) as writer:
        writer.write(out(ROWS))
        assert writer.flush() == writer.flush()


@pytest.mark.parametrize("lost", ["all", "some"])
def test_an_unfinished_output_that_lost_something_is_not_resumed(path: Path, lost: str) -> None:
    with open_writer(at(path)) as writer:
        writer.write(out(ROWS))
        position = writer.flush()
    growing = at(path).beside(".parts" if path.suffix == ".parquet" else ".partial")
    if growing.is_dir():
        (growing / "part-000000.parquet").unlink()
    elif lost == "some":
        os.truncate(growing, position - 1)
    if lost == "all":
        growing.rmdir() if growing.is_dir() else growing.unlink()
    with pytest.raises(NotResumable, match="--overwrite begins anew"):
        open_writer(at(path), resume_at=position)


def test_what_an_unfinished_run_left_is_not_thrown_away_unless_asked(path: Path) -> None:
    with open_writer(at(path)) as writer:
        writer.write(out(ROWS[:3]))
        writer.flush()
    with pytest.raises(OutputExists, match="an unfinished run left"):
        open_writer(at(path))
    with open_writer(at(path), overwrite=True) as writer:
        writer.write(out(ROWS))
        writer.commit()
    assert columns_of(path) == ROWS


def test_an_output_that_is_there_is_not_replaced_unless_asked(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(OutputExists, match="replace it with --overwrite"):
        open_writer(at(path))
    with open_writer(at(path), overwrite=True) as writer:
        writer.write(out(ROWS))
        assert path.read_text() == "precious"
        writer.commit()
    assert columns_of(path) == ROWS


def test_an_output_whose_name_was_taken_meanwhile_can_be_finished_later(path: Path) -> None:
    with open_writer(at(path)) as writer:
        writer.write(out(ROWS))
        path.write_text("precious")
        with pytest.raises(OutputExists):
            writer.commit()
        position = writer.flush()
    assert path.read_text() == "precious"
    path.unlink()
    finish_output(at(path), position=position)
    assert columns_of(path) == ROWS


def test_finishing_twice_is_finishing_once(path: Path) -> None:
    with open_writer(at(path)) as writer:
        writer.write(out(ROWS))
        position = writer.flush()
    for _ in range(2):
        finish_output(at(path), position=position)
    assert columns_of(path) == ROWS


def test_two_runs_do_not_write_one_output(path: Path) -> None:
    with open_writer(at(path)) as writer:
        writer.write(out(ROWS))
        position = writer.flush()
        with pytest.raises(OutputFailed, match="another run is writing it"):
            open_writer(at(path), resume_at=position)
        with pytest.raises(OutputFailed, match="another run is writing it"):
            open_writer(at(path), overwrite=True)
        writer.commit()
    assert columns_of(path) == ROWS


def test_an_output_without_rows_is_a_file_all_the_same(path: Path) -> None:
    with open_writer(at(path), head=Head(("text",))) as writer:
        writer.commit()
    assert columns_of(path) == []
    if path.suffix == ".gz":
        assert gzip.decompress(path.read_bytes()) == b""
        assert path.stat().st_size > 0


def test_an_output_goes_nowhere_without_its_folder(tmp_path: Path) -> None:
    with pytest.raises(OutputFailed, match="there is no folder"):
        open_writer(at(tmp_path / "none" / "out.jsonl"))
    (tmp_path / "file").touch()
    with pytest.raises(OutputFailed, match="there is no folder"):
        open_writer(at(tmp_path / "file" / "out.jsonl"))


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_that_takes_no_files_fails_the_output(name: str) -> None:
    with pytest.raises(OutputFailed, match="cannot write /proc/"):
        open_writer(at(f"/proc/{name}"))


def test_a_device_or_a_folder_is_never_replaced(tmp_path: Path) -> None:
    for place in (Path("/dev/null"), tmp_path):
        with pytest.raises(OutputFailed, match="no regular file"):
            open_writer(at(place), Format.JSONL, overwrite=True)
    assert Path("/dev/null").is_char_device()


def test_a_link_stays_and_the_file_behind_it_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real.jsonl").write_text("old")
    (tmp_path / "link.jsonl").symlink_to("real.jsonl")
    with open_writer(at(tmp_path / "link.jsonl"), overwrite=True) as writer:
        writer.write(out(ROWS))
        writer.commit()
    assert (tmp_path / "link.jsonl").is_symlink()
    assert columns_of(tmp_path / "real.jsonl") == ROWS


def test_a_value_without_a_form_is_refused_and_the_checkpoint_stays_good(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with open_writer(at(path)) as writer:
        writer.write(out(ROWS[:3]))
        position = writer.flush()
        with pytest.raises(SchemaMismatch, match=r"a value has no form in text: .*object"):
            writer.write(out(ROWS[3:], first=3, result=object()))
        with pytest.raises(OutputFailed, match="an earlier write failed"):
            writer.flush()
        with pytest.raises(OutputFailed, match="an earlier write failed"):
            writer.commit()
    with open_writer(at(path), resume_at=position) as writer:
        writer.write(out(ROWS[3:], first=3))
        writer.commit()
    assert columns_of(path) == ROWS


FILLING = """
import json, os, resource, sys
from bulk.errors import OutputFailed
from bulk.writing import open_writer
from tests.bulk.files import at, out

resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
position, done = 0, 0
with open_writer(at(sys.argv[1])) as writer:
    try:
        while True:
            writer.write(out([{"n": n, "text": os.urandom(2000).hex()} for n in range(done, done + 10 + done)], done))
            position, done = writer.flush(), done + 10 + done
    except OutputFailed as error:
        print(json.dumps([position, done, str(error)]))
"""


def test_a_disk_that_is_full_fails_the_output_and_the_checkpoint_stays_good(path: Path) -> None:
    """A limit to a file's size stands for the disk: the same call fails, with another number."""
    command = [sys.executable, "-c", FILLING, str(path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd=REPOSITORY)
    position, done, message = orjson.loads(told.stdout)
    assert message == f"cannot write {path}: File too large"
    assert not path.exists()
    with open_writer(at(path), resume_at=position) as writer:
        writer.write(out([{"n": n} for n in range(done, done + 5)], first=done))
        writer.commit()
    assert [int(str(row["n"])) for row in columns_of(path)] == list(range(done + 5))


def test_parts_are_bounded_without_any_flush(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    big = "x" * 100_000
    with open_writer(at(path)) as writer:
        writer.write(out([{"n": n, "text": big} for n in range(800)]))
        parts = sorted((tmp_path / "out.parquet.parts").iterdir())
        assert len(parts) == 3
        writer.commit()
    assert pq.ParquetFile(path).metadata.num_row_groups == 4
    assert pq.read_table(path, columns=["n"])["n"].to_pylist() == list(range(800))


STANDARD = """
import sys
from bulk.errors import BulkError
from bulk.formats import Format
from bulk.reading import read_rows
from bulk.rows import OutRow
from bulk.writing import open_writer
from tests.bulk.files import at

asked = Format(sys.argv[1])
with read_rows(at("-"), Format.JSONL) as rows, open_writer(at("-"), asked) as writer:
    for row in rows:
        try:
            writer.write([OutRow(row, {"label": "x"})])
        except BulkError as error:
            sys.exit(str(error))
    writer.commit()
"""


@pytest.mark.parametrize(
    ("asked", "expected"), [("jsonl", '{"a":1,"label":"x"}\n{"a":2,"label":"x"}\n'), ("csv", "a,label\n1,x\n2,x\n")]
)
def test_rows_pass_from_standard_input_to_standard_output(asked: str, expected: str) -> None:
    command = [sys.executable, "-c", STANDARD, asked]
    given = '{"a":1}\n\n{"a":2}\n'
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=True, timeout=60, cwd=REPOSITORY)
    assert done.stdout == expected


def test_standard_output_is_not_resumed() -> None:
    with pytest.raises(NotResumable, match="write to a file"):
        open_writer(at("-"), Format.JSONL, resume_at=0)
