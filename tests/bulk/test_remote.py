from __future__ import annotations

from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.core import url_to_fs

from bulk.errors import InputFailed, OutputExists, OutputFailed, SchemaMismatch
from bulk.fingerprint import Fingerprint
from bulk.locations import REMOTE_READ_BYTES, check_writable, exists, upload
from bulk.writing import finish_output, open_writer
from tests.bulk.files import at, columns_of, out, rows_of

TEXTS = [{"text": f"row {number}"} for number in range(10)]


def put(url: str, content: bytes) -> None:
    with fsspec.open(url, "wb") as file:
        file.write(content)


@pytest.fixture(params=["s3", "memory"])
def store(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(request.param)
    return url


@pytest.mark.parametrize("name", ["in.jsonl", "in.csv.gz", "in.jsonl.zst", "in.parquet"])
def test_a_remote_file_is_written_and_read_back(store: str, name: str, tmp_path: Path) -> None:
    with open_writer(at(f"{store}/{name}"), folder=tmp_path) as writer:
        writer.write(out(TEXTS))
        writer.commit()
    assert columns_of(f"{store}/{name}") == TEXTS
    assert columns_of(f"{store}/{name}", start=7) == TEXTS[7:]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_a_remote_output_is_not_there_before_it_is_whole(store: str, name: str, tmp_path: Path) -> None:
    url = f"{store}/{name}"
    with open_writer(at(url), folder=tmp_path) as writer:
        writer.write(out(TEXTS[:5]))
        position = writer.flush()
        writer.write(out(TEXTS[5:], first=5))
    with pytest.raises(InputFailed):
        rows_of(url)
    with open_writer(at(url), folder=tmp_path, resume_at=position) as writer:
        writer.write(out(TEXTS[5:], first=5))
        writer.commit()
    assert columns_of(url) == TEXTS


def test_an_upload_of_many_parts_that_fails_leaves_nothing(s3: str) -> None:
    location = at(f"{s3}/big.jsonl")

    def broken_off() -> None:
        with upload(location, 1) as stream:
            for _ in range(5):
                stream.write(b"x" * REMOTE_READ_BYTES)
            raise OSError("the disk it came from is gone")

    with pytest.raises(OutputFailed, match="the disk it came from"):
        broken_off()
    files = fsspec.filesystem("s3")
    files.invalidate_cache()
    assert files.ls("rows") == []
    assert not files.call_s3("list_multipart_uploads", Bucket="rows").get("Uploads")


def test_an_upload_of_many_parts_arrives_whole(s3: str) -> None:
    location = at(f"{s3}/big.jsonl")
    line = b'{"text":"' + b"x" * (REMOTE_READ_BYTES - 12) + b'"}\n'
    with upload(location, 5 * len(line)) as stream:
        for _ in range(5):
            stream.write(line)
    assert len(columns_of(location.url)) == 5


def test_a_remote_output_that_is_there_is_not_replaced_unless_asked(store: str, tmp_path: Path) -> None:
    url = f"{store}/out.jsonl"
    put(url, b"{}\n")
    with pytest.raises(OutputExists):
        open_writer(at(url), folder=tmp_path)
    with open_writer(at(url), folder=tmp_path, overwrite=True) as writer:
        writer.write(out(TEXTS))
        writer.commit()
    assert columns_of(url) == TEXTS


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_finishing_a_remote_output_twice_is_finishing_it_once(store: str, name: str, tmp_path: Path) -> None:
    location = at(f"{store}/{name}")
    with open_writer(location, folder=tmp_path) as writer:
        writer.write(out(TEXTS))
        position = writer.flush()
    finish_output(location, position=position, folder=tmp_path)
    finish_output(location, position=position, folder=tmp_path)
    assert columns_of(location.url) == TEXTS


def test_a_store_that_refuses_fails_the_output_and_keeps_what_was_made(s3: str, tmp_path: Path) -> None:
    location = at("s3://no-such-bucket/out.jsonl")
    with open_writer(location, folder=tmp_path) as writer:
        writer.write(out(TEXTS))
        position = writer.flush()
        with pytest.raises(OutputFailed, match="no-such-bucket"):
            writer.commit()
    assert location.beside(".partial", tmp_path).stat().st_size == position


def test_rows_of_two_kinds_fail_a_remote_parquet_output_with_their_row(memory: str, tmp_path: Path) -> None:
    with open_writer(at(f"{memory}/out.parquet"), folder=tmp_path) as writer:
        writer.write(out([{"a": 1}]))
        writer.flush()
        writer.write(out([{"a": "one"}], first=1))
        with pytest.raises(SchemaMismatch, match="row 1 "):
            writer.flush()


def test_a_remote_parquet_file_is_read_from_the_row_that_was_asked_for(s3: str) -> None:
    with fsspec.open(f"{s3}/in.parquet", "wb") as file:
        pq.write_table(pa.table({"n": list(range(1000))}), file, row_group_size=100)
    assert [row["n"] for row in columns_of(f"{s3}/in.parquet", start=995)] == [995, 996, 997, 998, 999]


@pytest.mark.parametrize("name", ["missing.jsonl", "missing.parquet"])
def test_a_remote_file_that_is_not_there_is_told_by_its_name(store: str, name: str) -> None:
    with pytest.raises(InputFailed, match=f"{name}: there is no such file"):
        rows_of(f"{store}/{name}")


def test_a_remote_fingerprint_changes_with_the_content_alone(store: str) -> None:
    url = f"{store}/in.jsonl"
    put(url, b'{"a": 1}\n')
    before = Fingerprint.of(at(url))
    assert before.difference(Fingerprint.of(at(url))) is None
    put(url, b'{"a": 1}\n')
    assert store != "s3://rows" or before.difference(Fingerprint.of(at(url))) is None
    put(url, b'{"a": 2}\n')
    assert before.difference(Fingerprint.of(at(url)))
    put(url, b'{"a": 22}\n')
    assert before.difference(Fingerprint.of(at(url))) == "it had 9 bytes and has 10 now"


def test_a_scheme_that_nothing_opens_is_named() -> None:
    with pytest.raises(InputFailed, match="nothing here opens nonsense://"):
        rows_of("nonsense://a/b.jsonl")


def test_a_scheme_whose_package_is_missing_says_what_to_install() -> None:
    with pytest.raises(InputFailed, match=r"pip install 'sheaf\[gcs\]'"):
        rows_of("gs://a/b.jsonl")


def test_a_place_is_seen_to_take_a_file_and_keeps_nothing_of_that(store: str) -> None:
    check_writable(at(f"{store}/out.jsonl"))
    location = at(f"{store}/out.jsonl")
    assert not exists(location)
    files, path = url_to_fs(store)
    files.invalidate_cache()
    assert files.ls(path) == []


def test_a_place_that_takes_no_files_is_told_by_its_bucket(s3: str) -> None:
    with pytest.raises(OutputFailed, match=r"out\.jsonl: there is no bucket or folder s3://no-such-bucket/a"):
        check_writable(at("s3://no-such-bucket/a/out.jsonl"))
