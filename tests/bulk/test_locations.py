from __future__ import annotations

from pathlib import Path

import pytest

from bulk.compression import Compression
from bulk.errors import BulkError, InputFailed, UnsupportedFormat
from bulk.formats import Format, format_of
from bulk.locations import Location, open_text, without_credentials
from bulk.reading import read_rows
from tests.bulk.files import at, out
from tests.bulk.files import write as put


@pytest.mark.parametrize(
    ("text", "name", "suffix", "compression"),
    [
        ("a/in.JSONL.GZ", "in.JSONL.GZ", ".jsonl", Compression.GZIP),
        ("s3://bucket/a/in.csv.zst", "in.csv.zst", ".csv", Compression.ZSTD),
        ("s3://bucket/what?.jsonl", "what?.jsonl", ".jsonl", Compression.NONE),
        ("https://host/in.parquet?signature=a/b", "in.parquet", ".parquet", Compression.NONE),
        ("in.gz", "in.gz", "", Compression.GZIP),
        ("-", "-", "", Compression.NONE),
    ],
)
def test_a_name_tells_format_and_compression(text: str, name: str, suffix: str, compression: Compression) -> None:
    location = Location.parse(text)
    assert (location.name, location.suffix, location.compression) == (name, suffix, compression)


def test_a_local_place_is_told_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path(tmp_path).resolve() / "a b.jsonl"
    for text in ("a b.jsonl", "./a b.jsonl", f"file://{tmp_path}/a%20b.jsonl", str(path)):
        assert Location.parse(text) == Location(str(path), path, "a b.jsonl")


@pytest.mark.parametrize("text", ["", "a\0b"])
def test_what_names_no_file_is_refused(text: str) -> None:
    with pytest.raises(UnsupportedFormat):
        Location.parse(text)


def test_what_belongs_to_a_file_lies_beside_it_or_in_a_folder_of_this_machine(tmp_path: Path) -> None:
    assert at(tmp_path / "out.csv").beside(".partial") == tmp_path.resolve() / "out.csv.partial"
    one, other = (at(f"s3://{bucket}/out.csv").beside(".partial", tmp_path) for bucket in ("a", "b"))
    assert one != other
    assert one == at("s3://a/out.csv").beside(".partial", tmp_path)
    assert (one.parent, one.name.startswith("out.csv."), one.suffix) == (tmp_path, True, ".partial")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.jsonl", Format.JSONL),
        ("a.ndjson.gz", Format.JSONL),
        ("a.CSV", Format.CSV),
        ("a.tsv.zst", Format.TSV),
        ("a.parquet", Format.PARQUET),
    ],
)
def test_the_suffix_tells_the_format_unless_one_is_asked_for(name: str, expected: Format) -> None:
    assert format_of(at(name)) is expected
    assert format_of(at("a.txt"), expected) is expected


def test_a_file_that_cannot_be_opened_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputFailed, match="there is no such file"):
        open_text(at(tmp_path / "in.jsonl"))
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(InputFailed, match="Is a directory"):
        open_text(at(tmp_path / "folder.jsonl"))


def test_files_are_closed_when_the_rows_are(tmp_path: Path) -> None:
    for name in ("in.jsonl", "in.csv.gz", "in.jsonl.zst"):
        path = tmp_path / name
        path.write_bytes(b"")
        try:
            with read_rows(at(path)) as rows:
                list(rows)
        except BulkError:
            pass
    assert not [link for link in Path("/proc/self/fd").iterdir() if str(tmp_path) in str(link.resolve())]


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ("s3://me:secret@bucket/a.jsonl", "s3://bucket/a.jsonl"),
        ("sftp://me@host/a@b.csv", "sftp://host/a@b.csv"),
        ("https://host/a.csv?X-Signature=secret&b=1", "https://host/a.csv?…"),
        ("zip://a.csv::https://me:secret@host/a.zip?sig=secret", "zip://a.csv::https://host/a.zip?…"),
        ("cannot read ftp://me:p@ss@host/a: it is gone", "cannot read ftp://host/a: it is gone"),
        ("404, url='http://host/?t=secret'", "404, url='http://host/?…'"),
        ("gs://bucket/what?.csv", "gs://bucket/what?.csv"),
        ("/data/a@b?.csv", "/data/a@b?.csv"),
    ],
)
def test_credentials_are_not_shown(told: str, shown: str) -> None:
    assert without_credentials(told) == shown


@pytest.mark.parametrize("name", ["in.jsonl", "in.csv", "in.jsonl.gz", "in.csv.zst", "in.parquet"])
@pytest.mark.parametrize("count", [100, 5000])
def test_how_much_was_given_as_rows_is_told_at_every_row(tmp_path: Path, name: str, count: int) -> None:
    digits = [f"{number * 2654435761 % 2**32:010}" for number in range(4 * count)]
    put(tmp_path / name, out([{"text": " ".join(digits[4 * number : 4 * number + 4])} for number in range(count)]))
    with read_rows(at(tmp_path / name)) as rows:
        for row in rows:
            ratio = rows.ratio()
            assert ratio is not None
            assert abs(ratio - (row.number + 1) / count) < 0.05
