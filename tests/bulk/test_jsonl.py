from __future__ import annotations

import datetime as dt
import gzip
from decimal import Decimal
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulk.errors import InputFailed
from bulk.formats import Format
from bulk.formats.jsonl import json_text
from bulk.reading import read_rows
from bulk.rows import BadRow, Row
from tests.bulk.files import at, bad, columns_of, out, rows_of, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "in.jsonl"


def test_a_row_knows_its_number_and_its_line(path: Path) -> None:
    path.write_bytes(b'\n{"a":1}\r\n   \n{"a":2}')
    assert rows_of(path) == [Row(0, 2, {"a": 1}), Row(1, 4, {"a": 2})]


def test_a_blank_last_line_is_no_row(path: Path) -> None:
    path.write_bytes(b'{"a":1}\n\n\r\n')
    assert len(rows_of(path)) == 1


def test_an_empty_file_has_no_rows(path: Path) -> None:
    path.write_bytes(b"")
    assert rows_of(path) == []


def test_a_byte_order_mark_is_no_part_of_the_first_row(path: Path) -> None:
    path.write_bytes(b'\xef\xbb\xbf{"a":1}\n')
    assert columns_of(path) == [{"a": 1}]


@pytest.mark.parametrize(
    ("line", "reason", "message"),
    [
        (b'{"a":', "invalid_json_line", "no JSON"),
        (b'{"a":NaN}', "invalid_json_line", "no JSON"),
        (b'{"a":-Infinity}', "invalid_json_line", "no JSON"),
        (b'{"a":1e999}', "invalid_json_line", "no JSON"),
        (b'{"a":1}{"a":2}', "invalid_json_line", "no JSON"),
        (b'{"a":"\\ud800"}', "invalid_json_line", "no JSON"),
        (b'{"a":' + b"[" * 250 + b"]" * 250 + b"}", "invalid_json_line", "nested more than 200 deep"),
        (b'{"a":' + b"[" * 100_000, "invalid_json_line", "no JSON"),
        (b'{"a":' + b"1" * 5000 + b"}", "invalid_json_line", "no JSON"),
        (b'{"a":"\xff"}', "invalid_utf8", "byte 7 of the line"),
        (b"[1]", "not_an_object", "no object"),
        (b'"text"', "not_an_object", "no object"),
        (b"null", "not_an_object", "no object"),
    ],
)
def test_a_bad_line_is_told_and_the_next_is_read(path: Path, line: bytes, reason: str, message: str) -> None:
    path.write_bytes(b'{"a":1}\n' + line + b'\n{"a":2}\n')
    first, broken, last = rows_of(path)
    assert (first, last) == (Row(0, 1, {"a": 1}), Row(2, 3, {"a": 2}))
    assert (bad(broken).number, bad(broken).line, bad(broken).reason) == (1, 2, reason)
    assert message in bad(broken).message


def test_what_is_shown_of_a_bad_line_is_short_and_nothing_that_a_terminal_obeys(path: Path) -> None:
    path.write_bytes(b"\x1b[2J\xff" + "ä".encode() * 5000)
    (broken,) = rows_of(path)
    assert bad(broken).raw.startswith("\\x1b[2J\N{REPLACEMENT CHARACTER}ää")
    assert len(bad(broken).raw) < 210


@pytest.mark.parametrize("length", [65, 100, 300_000])
def test_a_line_beyond_the_limit_is_read_past(path: Path, length: int) -> None:
    path.write_bytes(b'{"a":1}\n' + b"x" * length + b'\n{"a":2}\n')
    with read_rows(at(path), max_row_bytes=64) as rows:
        first, broken, last = rows
    assert (first, last) == (Row(0, 1, {"a": 1}), Row(2, 3, {"a": 2}))
    assert bad(broken).reason == "line_too_long"
    assert bad(broken).raw == "x" * 64


def test_a_line_of_just_the_limit_is_a_row(path: Path) -> None:
    path.write_bytes(b'{"a":12345}\n{"a":123456}\n')
    with read_rows(at(path), max_row_bytes=12) as rows:
        kinds = [type(row) for row in rows]
    assert kinds == [Row, BadRow]


def test_a_name_that_stands_twice_has_its_last_value(path: Path) -> None:
    path.write_bytes(b'{"a":1,"a":2}\n')
    assert columns_of(path) == [{"a": 2}]


@pytest.mark.parametrize("number", [2**53 + 1, 2**64, -(10**40)])
def test_an_integer_keeps_its_digits_however_many(path: Path, number: int) -> None:
    write(path, out([{"a": [number]}], result={"n": number}))
    assert columns_of(path) == [{"a": [number], "result": {"n": number}}]


@pytest.mark.parametrize("start", range(4))
def test_reading_on_skips_rows_good_and_bad(path: Path, start: int) -> None:
    path.write_bytes(b'{"a":1}\n\nbad\n{"a":3}\n')
    assert rows_of(path, start=start) == rows_of(path)[start:]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xff\xfe{\0}\0", "it is UTF-16"),
        (gzip.compress(b"{}", mtime=0), r"packed with gzip: its name, or --input-format, should end in \.gz"),
        (b"\x28\xb5\x2f\xfd....", r"packed with zstd: its name, or --input-format, should end in \.zst"),
        (b"PAR1....", "it is a Parquet file"),
    ],
)
def test_a_file_that_is_no_text_is_told_at_once(path: Path, content: bytes, reason: str) -> None:
    path.write_bytes(content)
    with pytest.raises(InputFailed, match=reason):
        rows_of(path)


def test_a_packed_file_that_ends_too_early_gives_what_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl.gz"
    lines = b"".join(b'{"a":%d}\n' % number for number in range(60_000))
    path.write_bytes(gzip.compress(lines)[:-1000])
    with read_rows(at(path)) as rows:
        given = iter(rows)
        assert all(next(given).number == number for number in range(20_000))
        with pytest.raises(InputFailed, match="ends too early"):
            list(given)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_packed_file_that_is_damaged_is_told(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"in.jsonl{suffix}"
    path.write_bytes(b"this is not packed at all")
    with pytest.raises(InputFailed, match=path.name):
        rows_of(path)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_how_far_a_file_has_been_read_is_known(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"in.jsonl{suffix}"
    write(path, out([{"a": 1}]))
    with read_rows(at(path)) as rows:
        assert rows.ratio() == 0
        list(rows)
        assert rows.ratio() == 1


def test_what_json_lacks_is_written_as_text_or_number() -> None:
    value = {
        "bytes": b"\x00\xff",
        "decimal": Decimal("1.10"),
        "time": dt.datetime(2024, 5, 6, 7, 8, 9, tzinfo=dt.UTC),
        "duration": dt.timedelta(minutes=1.5),
        "vector": np.array([0.1, 2], dtype=np.float32),
        "nothing": float("nan"),
        "huge": [2**70],
    }
    assert orjson.loads(json_text(value)) == {
        "bytes": "AP8=",
        "decimal": "1.10",
        "time": "2024-05-06T07:08:09+00:00",
        "duration": 90.0,
        "vector": [0.1, 2.0],
        "nothing": None,
        "huge": [2.0**70],
    }
    assert b"[1180591620717411303424]" in json_text(value)


def test_a_format_that_was_asked_for_beats_the_suffix(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(b'{"a":1}\n')
    assert columns_of(path, Format.JSONL) == [{"a": 1}]


def test_arrow_values_that_json_lacks_are_written_too() -> None:
    table = pa.table({"m": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64()))})
    assert json_text(table.to_pylist()) == b'[{"m":[["k",1]]}]'


TEXT = st.text(st.characters(codec="utf-8"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None, max_examples=25)
@given(rows=st.lists(st.dictionaries(TEXT, JSON, max_size=5), max_size=8), suffix=st.sampled_from(["", ".gz", ".zst"]))
def test_what_is_written_is_read_back_the_same(
    rows: list[dict[str, object]], suffix: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("rows") / f"out.jsonl{suffix}"
    write(path, out(rows))
    assert columns_of(path) == rows
