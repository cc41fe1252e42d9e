"""Bytes that are still there after the power went: what is written to this machine's disks, and in which order."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from bulk.errors import OutputFailed


class Sink(Protocol):
    """What bytes can be written to; it may take fewer than it was given."""

    def write(self, data: bytes | memoryview, /) -> int | None:
        """Take some bytes, and say how many."""


@contextmanager
def failing_as_output(place: str) -> Iterator[None]:
    """What the operating system refuses within is an `OutputFailed` of `place`."""
    try:
        yield
    except OSError as error:
        raise OutputFailed(place, error.strerror or str(error)) from error


def write_all(sink: Sink, data: bytes | memoryview) -> None:
    """Write all of `data`, however little is taken at a time."""
    rest = memoryview(data)
    while rest:
        rest = rest[sink.write(rest) or 0 :]


def write_atomically(path: Path, data: bytes | memoryview) -> None:
    """Make `data` the file's content: whoever looks finds the old content or the new, also after a crash."""
    beginning = path.with_name(f"{path.name}.new")
    try:
        with beginning.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        rename(beginning, path)
    except BaseException:
        # On a full disk this is what the next attempt needs.
        beginning.unlink(missing_ok=True)
        raise


def rename(source: Path, target: Path) -> None:
    """Give a file its name, in place of any file that had it."""
    source.replace(target)
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Make the folder's names last: a file's own fsync does not."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(descriptor: int, place: str) -> None:
    """Hold an open file or folder for this process, until it is closed or the process ends.

    Raises:
        OutputFailed: another one holds it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OutputFailed(place, "another run is writing it") from error
