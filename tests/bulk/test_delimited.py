from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulk.errors import InputFailed, SchemaMismatch
from bulk.reading import read_rows
from bulk.rows import Head, Row
from bulk.writing import open_writer
from tests.bulk.files import at, bad, columns_of, out, rows_of, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "in.csv"


def test_a_record_may_span_lines_and_the_row_has_its_first(path: Path) -> None:
    path.write_bytes(b'a,b\r\n1,"x\r\ny"\r\n\r\n2,z')
    assert rows_of(path) == [Row(0, 2, {"a": "1", "b": "x\r\ny"}), Row(1, 5, {"a": "2", "b": "z"})]


def test_a_byte_order_mark_is_no_part_of_the_header(path: Path) -> None:
    path.write_bytes(b"\xef\xbb\xbfa,b\n1,2\n")
    with read_rows(at(path)) as rows:
        assert rows.head == Head(("a", "b"))
        assert next(iter(rows)) == Row(0, 2, {"a": "1", "b": "2"})


def test_tabs_separate_what_ends_in_tsv(tmp_path: Path) -> None:
    path = tmp_path / "in.tsv"
    path.write_bytes(b'a\tb\n1,2\t"x\ty"\n')
    assert columns_of(path) == [{"a": "1,2", "b": "x\ty"}]


@pytest.mark.parametrize(
    ("record", "fields"),
    [
        (b'5" pipe,6" pipe', ['5" pipe', '6" pipe']),
        (b'5" pipe,x', ['5" pipe', "x"]),
        (b'"say ""hi""","a, b"', ['say "hi"', "a, b"]),
        (b'"",""""', ["", '"']),
        (b'x"y,"a\nb"', ['x"y', "a\nb"]),
        (b'"a"b,c', ["ab", "c"]),
        (b'"one""\n""two",c', ['one"\n"two', "c"]),
        ("ä,\N{GRINNING FACE}".encode(), ["ä", "\N{GRINNING FACE}"]),
    ],
)
def test_quotes_mean_what_they_mean_elsewhere(path: Path, record: bytes, fields: list[str]) -> None:
    path.write_bytes(b"a,b\n" + record + b"\nlast,row\n")
    assert columns_of(path) == [{"a": fields[0], "b": fields[1]}, {"a": "last", "b": "row"}]


@pytest.mark.parametrize(
    ("record", "reason", "message"),
    [
        (b"1", "wrong_field_count", "has 1 fields, the header 2"),
        (b"1,2,3", "wrong_field_count", "has 3 fields, the header 2"),
        (b'"1\n2"', "wrong_field_count", "it goes on to line 4"),
        (b"1,\xff", "invalid_utf8", "byte 3 of the record"),
        (b"x" * 100, "line_too_long", "longer than 64 bytes"),
        (b'1,"' + b"x" * 100 + b'\n\n"', "line_too_long", "it goes on to line 5"),
        (b'1,"' + b"x\n" * 100 + b'"', "line_too_long", "it goes on to line 103"),
    ],
)
def test_a_bad_record_is_told_and_the_next_is_read(path: Path, record: bytes, reason: str, message: str) -> None:
    path.write_bytes(b"a,b\n1,2\n" + record + b"\n3,4\n")
    with read_rows(at(path), max_row_bytes=64) as rows:
        first, broken, last = rows
    assert isinstance(first, Row)
    assert isinstance(last, Row)
    assert (first.columns, last.number, last.columns) == ({"a": "1", "b": "2"}, 2, {"a": "3", "b": "4"})
    assert (bad(broken).number, bad(broken).line, bad(broken).reason) == (1, 3, reason)
    assert message in bad(broken).message


def test_a_quote_that_is_never_closed_makes_one_bad_row_that_says_how_far_it_went(path: Path) -> None:
    path.write_bytes(b'a,b\n1,2\n3,"open\n5,6\n')
    _, broken = rows_of(path)
    assert bad(broken).message == "a quote is opened and never closed; it goes on to line 4"


def test_a_field_may_be_as_long_as_a_row_may_be(path: Path) -> None:
    path.write_bytes(b'a\n"' + b"x," * 200_000 + b'"\n')
    assert len(str(columns_of(path)[0]["a"])) == 400_000


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not even a header"),
        (b"\n\n", "not even a header"),
        (b"a,b,a\n1,2,3\n", "names the column 'a' twice"),
        (b"a,\xff\n", "its header on line 1 is no record in UTF-8"),
        (b'a,"b\n', "its header on line 1 is no record"),
        (b"a,b\r1,2\r3,4\r", "end in CR alone"),
    ],
)
def test_a_file_without_a_header_that_can_be_used_is_refused(path: Path, content: bytes, reason: str) -> None:
    path.write_bytes(content)
    with pytest.raises(InputFailed, match=reason):
        rows_of(path)


def test_a_header_alone_has_no_rows(path: Path) -> None:
    path.write_bytes(b"a,b\n")
    assert rows_of(path) == []


@pytest.mark.parametrize("start", range(5))
def test_reading_on_skips_rows_good_and_bad(path: Path, start: int) -> None:
    path.write_bytes(b'a\n1\n\n"2\n2"\n3,3\n4\n')
    assert rows_of(path, start=start) == rows_of(path)[start:]


def test_values_that_are_no_text_are_written_as_json(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    write(path, out([{"a": None, "b": True, "c": 1.5, "d": b"\x00"}], vector=[0.5, 1], label={"name": 'a "b"'}))
    assert path.read_bytes() == b'a,b,c,d,vector,label\n,true,1.5,AA==,"[0.5,1]","{""name"":""a \\""b\\""""}"\n'


def test_the_header_is_written_even_where_there_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    with open_writer(at(path), head=Head(("a", "b")), results=["label"]) as writer:
        writer.commit()
    assert path.read_bytes() == b"a,b,label\n"


def test_a_row_with_a_column_that_the_header_lacks_is_refused(tmp_path: Path) -> None:
    with open_writer(at(tmp_path / "out.csv")) as writer:
        writer.write(out([{"a": 1}, {"b": 2}]))
        with pytest.raises(SchemaMismatch, match=r"row 2 \(line 3\) has a column 'c'"):
            writer.write(out([{"c": 3}], first=2))


NAMES = st.lists(st.text(st.characters(codec="utf-8"), max_size=5), min_size=1, max_size=4, unique=True)
FIELD = st.text(st.sampled_from(list('a"\r\n,\t ä\0')) | st.characters(codec="utf-8"), max_size=8)


@st.composite
def tables(draw: st.DrawFn) -> list[dict[str, str]]:
    names = draw(NAMES)
    return draw(st.lists(st.fixed_dictionaries(dict.fromkeys(names, FIELD)), min_size=1, max_size=6))


@settings(deadline=None, max_examples=25)
@given(rows=tables(), suffix=st.sampled_from([".csv", ".tsv", ".csv.gz", ".csv.zst"]))
def test_what_is_written_is_read_back_the_same(
    rows: list[dict[str, str]], suffix: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("rows") / f"out{suffix}"
    write(path, out(rows))
    assert columns_of(path) == rows


@settings(deadline=None, max_examples=80)
@given(rows=tables())
def test_what_another_program_writes_is_read_the_same(
    rows: list[dict[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("rows") / "out.csv"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, list(rows[0]), quoting=csv.QUOTE_ALL)
        writer.writeheader()
        writer.writerows(rows)
    assert columns_of(path) == rows
