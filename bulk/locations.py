"""Where a file of rows lies: a path, a URL that fsspec opens, or `-` for standard input and output.

Only here is it known that files come from elsewhere: what a far end raises leaves as `InputFailed` or `OutputFailed`.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import secrets
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast
from urllib.parse import unquote, urlsplit

from fsspec.core import url_to_fs

from bulk.compression import DAMAGED, Compression, unpacked
from bulk.errors import InputFailed, OutputFailed, UnsupportedFormat

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

#: What one read asks a disk for, bytes.
_READ_BYTES = 1 << 20
#: What is unpacked at a time, bytes: where a packed file is damaged, as much before that is lost. A block of zstd is no
#: larger, so what was read of the file when it is unpacked is not far ahead.
_UNPACK_BYTES = 128 << 10
#: What one request asks a remote store for, bytes: enough that the round trip does not count.
REMOTE_READ_BYTES = 8 << 20
#: Stores take ten thousand parts an upload at most; these are the smallest parts that we send.
_UPLOAD_PART_BYTES = 16 << 20
_UPLOAD_PARTS = 9_000

#: What stands before the host of a URL: a name and a password.
_USER = re.compile(r"(?<=://)[^/\s]*@")
#: An HTTP URL with a query, which may be the signature that opens it.
_QUERY = re.compile(r"(https?://[^\s?'\"]*)\?[^\s'\"]*")


@dataclass(frozen=True, slots=True)
class Location:
    """A place for one file. `url` is what messages and checkpoints call it; it is absolute."""

    url: str
    #: Set for a file of this machine, links followed.
    path: Path | None
    name: str
    #: How the file is packed where that was said; else the name tells.
    packed: Compression | None = None

    @classmethod
    def parse(cls, text: str | os.PathLike[str]) -> Location:
        """The place that `text` names: `-`, a path, `file://`, or any URL that fsspec knows.

        Raises:
            UnsupportedFormat: `text` names nothing.
        """
        text = os.fspath(text)
        if not text or "\0" in text:
            raise UnsupportedFormat(f"{text!r} names no file")
        if text == "-":
            return cls("-", None, "-")
        if text.startswith("file://"):
            text = unquote(urlsplit(text).path)
        if "://" in text:
            # Elsewhere than in HTTP a name may hold `?` and `#`.
            path_part = unquote(urlsplit(text).path) if text.startswith(("http://", "https://")) else text
            return cls(text, None, path_part.rpartition("/")[2])
        path = Path(os.path.realpath(text))
        return cls(str(path), path, path.name)

    @property
    def is_standard(self) -> bool:
        """Whether this is standard input or output."""
        return self.url == "-"

    @property
    def compression(self) -> Compression:
        """How the file is packed, as its name says unless somebody did."""
        if self.packed is not None:
            return self.packed
        return next(
            (kind for kind in (Compression.GZIP, Compression.ZSTD) if self._lowered.endswith(kind)), Compression.NONE
        )

    @property
    def suffix(self) -> str:
        """The suffix in lower case, that of the compression left out: `.jsonl` for `a/b.JSONL.gz`."""
        return Path(self._lowered.removesuffix(self.compression)).suffix

    @property
    def _lowered(self) -> str:
        return self.name.lower()

    def beside(self, suffix: str, folder: Path | None = None) -> Path:
        """Where this machine keeps something that belongs to the file: next to it, or for a remote one in `folder`.

        `folder` is the working directory unless given. The same location always gets the same path.
        """
        if self.path is not None:
            return self.path.with_name(self.path.name + suffix)
        told_apart = hashlib.sha256(self.url.encode()).hexdigest()[:12]
        return (folder or Path.cwd()) / f"{self.name if not self.is_standard else 'standard'}.{told_apart}{suffix}"


def without_credentials(text: str) -> str:
    """A URL, or words with URLs in them, as others may read it."""
    return _QUERY.sub(r"\1?…", _USER.sub("", text))


class _Guarded(io.RawIOBase):
    """Reads another stream; whatever goes wrong there is an `InputFailed`."""

    def __init__(self, location: Location, stream: BinaryIO, raw: BinaryIO) -> None:
        self._location = location
        self._stream = stream
        self._raw = raw
        self._at_once = _READ_BYTES if stream is raw else _UNPACK_BYTES
        #: How much was given in all, and how much of the file that took; and both as they were before the last read.
        self._given, self._taken = 0, 0
        self._before = (0, 0)

    def tell(self) -> int:
        """How much was given: from this the buffer in front of it tells how much of that was used."""
        return self._given

    def place_of(self, used: int) -> float:
        """How far into the file that lies which was given up to `used`, bytes: of packed ones about."""
        given, taken = self._before
        share = (used - given) / (self._given - given) if self._given > given else 1.0
        return taken + (self._taken - taken) * share

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer)
        try:
            data = self._stream.read(min(len(view), self._at_once))
        except DAMAGED as error:
            raise InputFailed(self._location.url, cause(error)) from error
        except Exception as error:  # what clients of remote stores raise has no common base
            raise InputFailed(self._location.url, cause(error)) from error
        view[: len(data)] = data
        if data:
            self._before = (self._given, self._taken)
            self._given += len(data)
            self._taken = self._given if self._stream is self._raw else self._raw.tell()
        return len(data)

    def close(self) -> None:
        if not self.closed and not self._location.is_standard:
            self._stream.close()
            self._raw.close()
        super().close()


class _InPieces(io.RawIOBase):
    """A packed file that is read in pieces so small that what was read of it tells how far the unpacker is."""

    def __init__(self, file: BinaryIO, size: int | None) -> None:
        self._file = file
        self._read = 0
        self._at_most = _UNPACK_BYTES if size is None else max(512, min(_UNPACK_BYTES, size >> 8))

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer)
        data = self._file.read(min(len(view), self._at_most))
        view[: len(data)] = data
        self._read += len(data)
        return len(data)

    def tell(self) -> int:
        return self._read

    def close(self) -> None:
        if not self.closed and self._file is not sys.stdin.buffer:
            self._file.close()
        super().close()


@dataclass(frozen=True, slots=True)
class Opened:
    """An open text file: its text, unpacked, and how far that has been used."""

    text: io.BufferedReader
    source: _Guarded
    size: int | None

    def used_ratio(self) -> float | None:
        """How much of the file was read from `text`, 0 to 1, what is buffered left out; None if its size is unknown."""
        return min(1.0, self.source.place_of(self.text.tell()) / self.size) if self.size else None


def open_text(location: Location) -> Opened:
    """Open a text file for reading from its beginning, unpacked as its name says.

    Raises:
        InputFailed: it cannot be opened; reading raises it as well.
    """
    raw, size = (sys.stdin.buffer, None) if location.is_standard else open_random(location)
    packed = raw if location.compression is Compression.NONE else cast("BinaryIO", _InPieces(raw, size))
    try:
        stream = unpacked(location.compression, packed)
    except DAMAGED as error:
        raise InputFailed(location.url, cause(error)) from error
    source = _Guarded(location, stream, packed)
    return Opened(io.BufferedReader(source, _READ_BYTES), source, size)


def open_random(location: Location, *, ahead: bool = True) -> tuple[BinaryIO, int | None]:
    """Open a file as it lies there, and tell its size in bytes; it can be sought in. Not for standard input.

    `ahead` says that it will be read from front to back.

    Raises:
        InputFailed: it cannot be opened.
    """
    with _failing_as(InputFailed, location):
        if location.path is not None:
            file = location.path.open("rb", buffering=0 if ahead else _READ_BYTES)
            return file, os.fstat(file.fileno()).st_size
        fs, path = url_to_fs(location.url)
        kind = "readahead" if ahead else "none"
        remote = fs.open(path, "rb", block_size=REMOTE_READ_BYTES, cache_type=kind)
        return remote, getattr(remote, "size", None)


def describe(location: Location) -> dict[str, Any]:
    """What the remote store tells of a file: its size and whatever tells versions apart there.

    Raises:
        InputFailed: there is no such file, or the store does not answer.
    """
    with _failing_as(InputFailed, location):
        fs, path = url_to_fs(location.url)
        fs.invalidate_cache()
        return dict(fs.info(path))


def size_of(location: Location) -> int:
    """A file's bytes.

    Raises:
        InputFailed: there is no such file, or the store does not answer.
    """
    if location.path is None:
        return int(describe(location)["size"])
    with _failing_as(InputFailed, location):
        return location.path.stat().st_size


def exists(location: Location) -> bool:
    """Whether there is a file, or anything else of that name.

    Raises:
        OutputFailed: the store does not tell.
    """
    if location.path is not None:
        return os.path.lexists(location.path)
    with _failing_as(OutputFailed, location):
        fs, path = url_to_fs(location.url)
        fs.invalidate_cache()
        return bool(fs.exists(path))


def check_writable(location: Location) -> None:
    """Write an empty object beside a remote place and remove it again, as no store tells whether it would take one.

    Raises:
        OutputFailed: the store does not take it.
    """
    folder, _, name = location.url.rpartition("/")
    probe = replace(location, url=f"{folder}/.{secrets.token_hex(6)}.probe", name=name)
    try:
        with upload(probe, 0):
            pass
    except OutputFailed as error:
        raise OutputFailed(location.url, error.reason) from error
    # Where things may be written and not removed, it stays.
    with suppress(Exception):
        fs, path = url_to_fs(probe.url)
        fs.rm_file(path)


@contextmanager
def upload(location: Location, size: int) -> Iterator[BinaryIO]:
    """A stream whose bytes, about `size` of them, become the remote file all at once, or after an exception nothing.

    Raises:
        OutputFailed: the store does not take them, or whoever writes them failed.
    """
    part = max(_UPLOAD_PART_BYTES, -(-size // _UPLOAD_PARTS))
    try:
        # A transaction belongs to the file system's object, so this one is ours alone.
        fs, path = url_to_fs(location.url, skip_instance_cache=True)
        with fs.transaction, fs.open(path, "wb", block_size=part) as stream:
            yield cast("BinaryIO", stream)
    except OutputFailed:
        raise
    except FileNotFoundError as error:
        folder = location.url.rpartition("/")[0]
        raise OutputFailed(location.url, f"there is no bucket or folder {without_credentials(folder)}") from error
    except Exception as error:  # what clients of remote stores raise has no common base
        raise OutputFailed(location.url, cause(error, location)) from error


@contextmanager
def _failing_as(kind: type[InputFailed | OutputFailed], location: Location) -> Generator[None]:
    """What goes wrong within is told as this; what clients of remote stores raise has no common base."""
    try:
        yield
    except Exception as error:
        raise kind(location.url, cause(error, location)) from error


def cause(error: Exception, location: Location | None = None) -> str:
    """An exception in words for whoever named the file."""
    if isinstance(error, OSError) and error.strerror and not isinstance(error, FileNotFoundError):
        return error.strerror
    match error:
        case FileNotFoundError():
            return "there is no such file"
        case EOFError():
            return "the compressed file ends too early"
        case ImportError() if location is not None:
            scheme = location.url.partition("://")[0]
            extra = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}.get(scheme)
            return f"{scheme}:// needs a package that is missing" + (
                f": pip install 'sheaf[{extra}]'" if extra else f" ({error})"
            )
        case ValueError() if location is not None and "Protocol not known" in str(error):
            return f"nothing here opens {location.url.partition('://')[0]}:// URLs"
    return str(error) or type(error).__name__
