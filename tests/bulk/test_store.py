"""Files that are known by an id alone: whole or not there, in a folder and in stores elsewhere."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import fsspec
import pytest

from bulk.errors import InputFailed, OutputFailed
from bulk.store import FileStore

ID = "file-" + "0a" * 16
OTHER = "file-" + "0b" * 16
#: More than a remote store is sent at a time.
LARGE = os.urandom(1 << 20) * 20


@pytest.fixture(params=["folder", "file-url", "s3", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "folder":
            return str(tmp_path / "a" / "files")
        case "file-url":
            return f"file://{tmp_path}/a b/files/"
        case name:
            url: str = request.getfixturevalue(name)
            return f"{url}/prefix"


def put(store: FileStore, file_id: str, *parts: bytes) -> None:
    with store.receive(file_id) as sink:
        for part in parts:
            sink.write(part)


def content(store: FileStore, file_id: str) -> bytes:
    with store.read(file_id) as (parts, _):
        return b"".join(parts)


@pytest.mark.parametrize("parts", [(), (b"one ", b"two"), (LARGE, b"end")])
def test_a_file_is_read_back_as_it_came(storage: str, parts: tuple[bytes, ...]) -> None:
    store = FileStore(storage)
    put(store, ID, *parts)
    with store.read(ID) as (read, size):
        assert b"".join(read) == b"".join(parts)
    assert size == sum(map(len, parts))


def test_its_location_is_where_a_run_of_bulk_would_open_it(storage: str) -> None:
    store = FileStore(storage)
    put(store, ID, b"content")
    with fsspec.open(store.location(ID).url, "rb") as file:
        assert file.read() == b"content"


def test_a_file_is_not_there_before_it_is_whole(storage: str) -> None:
    store = FileStore(storage)
    with store.receive(ID) as sink:
        sink.write(LARGE)
        with pytest.raises(InputFailed) as caught:
            content(store, ID)
        assert caught.value.is_missing
    assert content(store, ID) == LARGE


def test_a_file_whose_writer_fails_is_not_there_and_the_writers_error_leaves_as_it_is(
    storage: str, tmp_path: Path
) -> None:
    store = FileStore(storage)

    def broken_off() -> None:
        with store.receive(ID) as sink:
            sink.write(LARGE)
            raise KeyError("the writer's own")

    with pytest.raises(KeyError, match="the writer's own"):
        broken_off()
    with pytest.raises(InputFailed, match="there is no such file"):
        content(store, ID)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_file_that_is_written_again_is_replaced_only_when_it_is_whole(storage: str) -> None:
    store = FileStore(storage)
    put(store, ID, b"first")
    with store.receive(ID) as sink:
        sink.write(b"second")
        assert content(store, ID) == b"first"
    assert content(store, ID) == b"second"


def test_removing_a_file_leaves_the_others_and_may_be_done_twice(storage: str) -> None:
    store = FileStore(storage)
    put(store, ID, b"one")
    put(store, OTHER, b"two")
    store.remove(ID)
    store.remove(ID)
    with pytest.raises(InputFailed) as caught:
        content(store, ID)
    assert caught.value.is_missing
    assert content(store, OTHER) == b"two"


@pytest.mark.parametrize(
    "name", ["", "file-", "../" + ID, ID + "/..", ID.upper(), ID + "\n", ID + ".incoming", "file-" + "0" * 31]
)
def test_nothing_but_an_id_becomes_a_part_of_a_path(name: str, tmp_path: Path) -> None:
    store = FileStore(str(tmp_path))
    with pytest.raises(ValueError, match="no id of a file"):
        store.location(name)
    with pytest.raises(ValueError, match="no id of a file"):
        store.remove(name)


def test_a_store_that_refuses_says_so(s3: str) -> None:
    store = FileStore("s3://no-such-bucket/files")
    with pytest.raises(OutputFailed, match="no-such-bucket"):
        put(store, ID, LARGE)
    with pytest.raises(InputFailed):
        content(store, ID)


def test_a_full_disk_is_told_from_other_faults(tmp_path: Path) -> None:
    full = OutputFailed("place", "full")
    full.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert full.is_full
    (tmp_path / "files").write_text("no folder")
    with pytest.raises(OutputFailed) as caught:
        put(FileStore(str(tmp_path / "files")), ID, b"content")
    assert not caught.value.is_full


def test_what_a_writer_that_died_left_behind_is_swept_once_it_is_old(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path))
    put(store, ID, b"whole")
    old = tmp_path / f"{OTHER}.01234567.incoming"
    old.write_bytes(b"half")
    os.utime(old, (0, time.time() - 7200))
    with store.receive(OTHER) as sink:
        sink.write(b"still being written")
        assert store.sweep(3600) == 1
    assert not old.exists()
    assert (content(store, ID), content(store, OTHER)) == (b"whole", b"still being written")


@pytest.mark.parametrize("name", ["s3", "memory"])
def test_elsewhere_there_is_nothing_to_sweep(name: str, request: pytest.FixtureRequest) -> None:
    assert FileStore(f"{request.getfixturevalue(name)}/prefix").sweep(0) == 0


def test_a_folder_that_is_not_there_yet_is_swept_without_a_word(tmp_path: Path) -> None:
    assert FileStore(str(tmp_path / "later")).sweep(0) == 0
