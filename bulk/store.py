"""Where the content of files lies that are known by an id alone: a folder of this machine, or a URL that fsspec opens.

A file is there whole or not at all. Only ids become a part of a path, never a name that a caller made up.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fsspec.core import url_to_fs

from broker import is_file_id
from bulk.durable import Sink, failing_as_output, rename, write_all
from bulk.errors import InputFailed, OutputFailed
from bulk.locations import Location, cause, open_random, upload

#: What one read gives, bytes.
READ_BYTES = 256 << 10
#: Ends the names of files that are not whole yet.
_INCOMING = ".incoming"


class FileStore:
    """The files of one storage, a folder or a URL. Its verbs block; nothing is done before one is called."""

    def __init__(self, storage: str) -> None:
        # A folder stays where it is now, whatever becomes of the working directory.
        url = Location.parse(storage).url
        self._root = url if url.endswith("://") else url.rstrip("/")

    def location(self, file_id: str) -> Location:
        """Where the content of this file lies, or is to lie. Raises `ValueError` for what is no id."""
        if not is_file_id(file_id):
            raise ValueError(f"{file_id!r} is no id of a file")
        return Location.parse(f"{self._root}/{file_id}")

    @contextmanager
    def receive(self, file_id: str) -> Iterator[Sink]:
        """A sink whose bytes become the file at the end, in place of any that was there, or after an exception nothing.

        What the caller raises leaves as it is. Writing may raise it as well.

        Raises:
            OutputFailed: the storage does not take it; `is_full` tells whether that is for want of room.
        """
        location = self.location(file_id)
        if location.path is not None:
            with self._received_here(location, location.path) as sink:
                yield sink
            return
        failed: Exception | None = None
        try:
            # Its size is not known ahead: 16 MiB are held, and sent, at a time.
            with upload(location, 0) as stream:
                try:
                    yield _Guarded(location, stream)
                except Exception as error:
                    failed = error
                    raise
        except OutputFailed as error:
            if failed is None or failed is error:
                raise
            raise failed from failed.__cause__

    @contextmanager
    def _received_here(self, location: Location, path: Path) -> Iterator[Sink]:
        # Two writers of one file do not meet: the last one's is kept.
        incoming = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_INCOMING}")
        with failing_as_output(location.url):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = incoming.open("wb", buffering=0)
        try:
            with file:
                yield _Guarded(location, file)
                with failing_as_output(location.url):
                    os.fsync(file.fileno())
            with failing_as_output(location.url):
                rename(incoming, path)
        except BaseException:
            incoming.unlink(missing_ok=True)
            raise

    @contextmanager
    def read(self, file_id: str) -> Iterator[tuple[Iterator[bytes], int | None]]:
        """The content in parts, and its size in bytes where the storage tells it.

        Raises:
            InputFailed: it cannot be read, or not any further; `is_missing` tells whether it is not there.
        """
        location = self.location(file_id)
        file, size = open_random(location)
        with file:
            yield _parts(location, file), size

    def remove(self, file_id: str) -> None:
        """Remove the content, if there is any. Raises `OutputFailed` when it may be there still."""
        location = self.location(file_id)
        if location.path is not None:
            with failing_as_output(location.url):
                location.path.unlink(missing_ok=True)
            return
        try:
            fs, path = url_to_fs(location.url)
            fs.invalidate_cache()
            with suppress(FileNotFoundError):
                fs.rm_file(path)
        except Exception as error:  # what clients of remote stores raise has no common base
            raise OutputFailed(location.url, cause(error, location)) from error

    def sweep(self, older_than_s: float) -> int:
        """Remove what writers that died left behind in a folder: files that are not whole, and that nobody has written
        to for so long. Says how many. A store elsewhere keeps such parts out of sight.

        Raises:
            OutputFailed: the folder cannot be read, or not be written.
        """
        folder = Path(self._root)
        if "://" in self._root or not folder.is_dir():
            return 0
        oldest = time.time() - older_than_s
        removed = 0
        with failing_as_output(self._root):
            for path in folder.glob(f"file-*{_INCOMING}"):
                # Its writer may end it at this moment.
                with suppress(FileNotFoundError):
                    if path.stat().st_mtime < oldest:
                        path.unlink()
                        removed += 1
        return removed


class _Guarded:
    """Writes to a file; whatever goes wrong there is an `OutputFailed`."""

    def __init__(self, location: Location, file: Sink) -> None:
        self._location = location
        self._file = file

    def write(self, data: bytes | memoryview, /) -> int:
        try:
            write_all(self._file, data)
        except Exception as error:  # what clients of remote stores raise has no common base
            raise OutputFailed(self._location.url, cause(error, self._location)) from error
        return len(data)


def _parts(location: Location, file: BinaryIO) -> Iterator[bytes]:
    while True:
        try:
            part = file.read(READ_BYTES)
        except Exception as error:  # what clients of remote stores raise has no common base
            raise InputFailed(location.url, cause(error, location)) from error
        if not part:
            return
        yield part
