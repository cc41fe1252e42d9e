from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bulk.errors import InputFailed, SchemaMismatch, UnsupportedFormat
from bulk.formats import Format
from bulk.reading import read_rows
from bulk.rows import BadRow, Head, OutRow, Row
from bulk.writing import open_writer
from tests.bulk.files import at, columns_of, out, rows_of, write

NANOSECONDS = 1_700_000_000_123_456_789

#: What Parquet keeps and text does not.
TYPED = pa.table(
    {
        "id": pa.array([1, None, 3], pa.int32()),
        "text": pa.array(["a", None, "c"], pa.large_string()),
        "when": pa.array([NANOSECONDS, None, 0], pa.timestamp("ns", "Europe/Berlin")),
        "day": pa.array([0, 1, None], pa.date32()),
        "took": pa.array([1, 2, None], pa.duration("ns")),
        "price": pa.array([Decimal("1.10"), None, Decimal("-2.00")], pa.decimal128(10, 2)),
        "raw": pa.array([b"\x00\xff", b"", None], pa.binary()),
        "kind": pa.array(["x", "y", "x"]).dictionary_encode(),
        "tags": pa.array([["a", None], [], None], pa.list_(pa.string())),
        "at": pa.array(
            [{"x": 1, "t": NANOSECONDS}, None, {"x": None, "t": None}],
            pa.struct([("x", pa.uint8()), ("t", pa.timestamp("ns"))]),
        ),
        "map": pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int16())),
        "half": pa.array([0.5, None, 2.0], pa.float16()),
    },
    metadata={"made by": "a test"},
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "in.parquet"


@pytest.fixture
def typed(path: Path) -> Path:
    pq.write_table(TYPED, path)
    return path


def good(rows: Iterator[Row | BadRow]) -> Iterator[Row]:
    for row in rows:
        assert isinstance(row, Row)
        yield row


def copied(source: Path, target: Path, **results: object) -> None:
    with read_rows(at(source)) as rows, open_writer(at(target), head=rows.head, results=list(results)) as writer:
        writer.write([OutRow(row, results) for row in good(iter(rows))])
        writer.commit()


def test_rows_have_values_of_python(typed: Path) -> None:
    first, second, _ = rows_of(typed)
    assert isinstance(first, Row)
    assert (first.number, first.line) == (0, 1)
    assert first.columns == {
        "id": 1,
        "text": "a",
        "when": dt.datetime(2023, 11, 14, 22, 13, 20, 123456, tzinfo=dt.UTC),
        "day": dt.date(1970, 1, 1),
        "took": dt.timedelta(0),
        "price": Decimal("1.10"),
        "raw": b"\x00\xff",
        "kind": "x",
        "tags": ["a", None],
        "at": {"x": 1, "t": dt.datetime(2023, 11, 14, 22, 13, 20, 123456)},
        "map": [("k", 1)],
        "half": 0.5,
    }
    assert isinstance(second, Row)
    assert second.columns["id"] is None


def test_a_parquet_output_keeps_every_type_and_value_of_a_parquet_input(typed: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.parquet"
    copied(typed, target, embedding=[0.1, 0.2])
    written = pq.read_table(target)
    assert written.drop_columns(["embedding"]).equals(TYPED)
    assert written.schema.remove(12).equals(TYPED.schema)
    assert (written.schema.metadata or {})[b"made by"] == b"a test"
    assert written.schema.field("embedding").type == pa.list_(pa.float32())
    assert written["embedding"][2].as_py() == [float(np.float32(0.1)), float(np.float32(0.2))]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_text_is_made_of_any_parquet_input(typed: Path, tmp_path: Path, suffix: str) -> None:
    target = tmp_path / f"out{suffix}"
    copied(typed, target, label="x")
    first = columns_of(target)[0]
    assert first["when"] == "2023-11-14T22:13:20.123456+00:00"
    assert first["price"] == "1.10"
    assert first["raw"] == "AP8="
    assert first["label"] == "x"


@pytest.mark.parametrize("start", [0, 1, 99, 100, 101, 250, 999, 1000])
def test_reading_on_begins_at_any_row(path: Path, start: int) -> None:
    pq.write_table(pa.table({"n": list(range(1000))}), path, row_group_size=100)
    rows = rows_of(path, start=start)
    assert [row.number for row in rows] == list(range(start, 1000))
    assert [row["n"] for row in columns_of(path, start=start)] == list(range(start, 1000))


def test_how_far_a_file_has_been_read_is_known(path: Path) -> None:
    pq.write_table(pa.table({"n": list(range(100))}), path)
    with read_rows(at(path), start=50) as rows:
        assert rows.ratio() == 0.5
        list(rows)
        assert rows.ratio() == 1


def test_a_value_that_cannot_be_read_spoils_its_row_alone(path: Path) -> None:
    broken = pa.Array.from_buffers(
        pa.string(), 3, [None, pa.py_buffer(np.array([0, 1, 2, 3], np.int32).tobytes()), pa.py_buffer(b"a\xffc")]
    )
    times = pa.array([0, 0, 2**50], pa.timestamp("ms"))
    pq.write_table(pa.table({"text": broken, "when": times}), path)
    first, second, third = rows_of(path)
    assert isinstance(first, Row)
    assert isinstance(second, BadRow)
    assert isinstance(third, BadRow)
    assert (second.number, second.reason) == (1, "unreadable_value")
    assert "out of range" in third.message


def test_a_file_without_rows_gives_one_without_rows_and_its_types(path: Path, tmp_path: Path) -> None:
    pq.write_table(TYPED.slice(0, 0), path)
    copied(path, tmp_path / "out.parquet", label="x")
    written = pq.read_table(tmp_path / "out.parquet")
    assert len(written) == 0
    assert written.schema.names == [*TYPED.schema.names, "label"]


def test_a_file_that_is_no_parquet_or_was_cut_is_refused(typed: Path) -> None:
    content = typed.read_bytes()
    for damaged in (b"", b"PAR1", content[:-10], b"{}\n" * 100):
        typed.write_bytes(damaged)
        with pytest.raises(InputFailed, match="no Parquet file that can be read"):
            rows_of(typed)


def test_damage_in_the_middle_gives_the_rows_before_it(path: Path) -> None:
    pq.write_table(pa.table({"n": np.random.default_rng(1).random(10_000)}), path, row_group_size=5000)
    content = bytearray(path.read_bytes())
    middle = len(content) * 3 // 4
    content[middle : middle + 5000] = b"\xff" * 5000
    # The pages after the first group are gone, its directory is not.
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).dictionary_page_offset or 0
    content[start : start + 100] = b"\xff" * 100
    path.write_bytes(content)
    with read_rows(at(path)) as rows:
        given = iter(rows)
        assert [next(given).number for _ in range(5000)] == list(range(5000))
        with pytest.raises(InputFailed, match="damaged after row 5000"):
            next(given)


def test_two_columns_of_one_name_are_refused(path: Path) -> None:
    pq.write_table(pa.table([pa.array([1]), pa.array([2])], names=["a", "a"]), path)
    with pytest.raises(InputFailed, match="two columns 'a'"):
        rows_of(path)


@pytest.mark.parametrize("name", ["-", "a.parquet.gz", "a.parquet.zst", "a.txt", "-x", "a"])
def test_what_cannot_hold_rows_is_refused(name: str) -> None:
    asked = Format.PARQUET if name == "-" else None
    with pytest.raises(UnsupportedFormat):
        read_rows(at(name), asked)
    with pytest.raises(UnsupportedFormat):
        open_writer(at(name), asked)


def test_json_rows_become_columns_that_grow_with_what_comes(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    rows: list[dict[str, Any]] = [
        {"n": 1, "late": None, "tags": []},
        {"n": 2.5, "late": "x", "tags": ["a"], "at": {"x": 1}},
        {"n": None, "tags": None, "at": {"x": 2, "y": [1]}, "new": True},
    ]
    with open_writer(at(path)) as writer:
        for number, row in enumerate(rows):
            writer.write(out([row], first=number, embedding=[1, 2] if number else None))
            writer.flush()
        writer.commit()
    written = pq.read_table(path)
    assert written.schema.names == ["n", "late", "tags", "embedding", "at", "new"]
    assert written.to_pylist() == [
        {"n": 1.0, "late": None, "tags": [], "embedding": None, "at": None, "new": None},
        {"n": 2.5, "late": "x", "tags": ["a"], "embedding": [1, 2], "at": {"x": 1, "y": None}, "new": None},
        {"n": None, "late": None, "tags": None, "embedding": [1, 2], "at": {"x": 2, "y": [1]}, "new": True},
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (1, "one"),
        ("one", 1),
        ([1], 1),
        ({"x": 1}, 1),
        ({"x": 1}, {"x": "one"}),
        (True, 1),
        (1.5, 2**60 + 1),
        (1, 2**64),
    ],
)
@pytest.mark.parametrize("flushed", [True, False])
def test_a_row_of_another_kind_is_refused_with_its_number(
    tmp_path: Path, before: object, after: object, flushed: bool
) -> None:
    with open_writer(at(tmp_path / "out.parquet")) as writer:
        writer.write(out([{"a": None}, {"a": before}]))
        if flushed:
            writer.flush()
        writer.write(out([{"a": None}, {"a": after}], first=2))
        with pytest.raises(SchemaMismatch, match=r"row 3 \(line 4\) does not fit the column 'a'"):
            writer.flush()


def test_text_columns_of_csv_stay_text_in_parquet(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("id,text\n007,\n")
    copied(tmp_path / "in.csv", tmp_path / "out.parquet", score=0.1)
    written = pq.read_table(tmp_path / "out.parquet")
    assert written.schema.types == [pa.string(), pa.string(), pa.float64()]
    assert written.to_pylist() == [{"id": "007", "text": "", "score": 0.1}]


def test_vectors_of_numpy_are_written_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    write(path, out([{"a": 1}], vector=np.array([0.5, 1.5], np.float32)))
    assert pq.read_table(path).to_pylist() == [{"a": 1, "vector": [0.5, 1.5]}]


def test_rows_that_were_left_out_are_missing_and_the_order_is_kept(path: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": list(range(5000))}), path)
    with read_rows(at(path)) as rows, open_writer(at(tmp_path / "out.parquet"), head=rows.head) as writer:
        for row in good(iter(rows)):
            if row.number % 3:
                writer.write([OutRow(row, {})])
        writer.commit()
    assert pq.read_table(tmp_path / "out.parquet")["n"].to_pylist() == [n for n in range(5000) if n % 3]


def test_an_output_of_json_without_any_row_is_a_parquet_file(tmp_path: Path) -> None:
    with open_writer(at(tmp_path / "out.parquet"), head=Head(), results=["label"]) as writer:
        writer.commit()
    assert pq.read_table(tmp_path / "out.parquet").schema.names == ["label"]


def test_the_columns_of_json_come_before_the_results_whenever_they_come(tmp_path: Path) -> None:
    with open_writer(at(tmp_path / "out.parquet"), head=Head(), results=["label"]) as writer:
        writer.write([OutRow(Row(0, 1, {"id": 1}), {"label": "a"})])
        writer.flush()
        writer.write([OutRow(Row(1, 2, {"id": 2, "late": True}), {"label": "b"})])
        writer.commit()
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.schema.names == ["id", "late", "label"]
    assert table.to_pylist() == [{"id": 1, "late": None, "label": "a"}, {"id": 2, "late": True, "label": "b"}]


def test_a_value_that_parquet_has_no_form_for_is_refused(tmp_path: Path) -> None:
    with open_writer(at(tmp_path / "out.parquet")) as writer:
        writer.write(out([{"a": {}}]))
        with pytest.raises(SchemaMismatch, match="Parquet"):
            writer.flush()
