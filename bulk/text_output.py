"""Rows as text: a partial file that grows, is cut back to a checkpoint, and gets the output's name when it is whole."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from io import FileIO

from bulk.compression import Compression, member
from bulk.destination import Destination
from bulk.durable import failing_as_output, lock, sync_folder, write_all
from bulk.errors import InputFailed, NotResumable, OutputExists, SchemaMismatch
from bulk.formats.delimited import DelimitedEncoder
from bulk.formats.jsonl import JsonlEncoder
from bulk.locations import Location
from bulk.output import FileWriter, Writer
from bulk.reading import header_of
from bulk.rows import OutRow

#: How much text is gathered before it is packed and written, bytes: a member or frame holds about that much.
_MEMBER_BYTES = 1 << 20


class Text:
    """Rows to text, the header before the first. The first rows may add columns to those known before."""

    def __init__(self, place: str, encoder: JsonlEncoder | DelimitedEncoder, results: Sequence[str] = ()) -> None:
        self._place = place
        self._encoder = encoder
        self._results = tuple(results)
        #: Whether the header is out; JSONL has none.
        self.begun = isinstance(encoder, JsonlEncoder)

    def go_on(self, written: Location) -> None:
        """Write as before: under the header that an earlier run wrote.

        Raises:
            NotResumable: it cannot be read.
        """
        if isinstance(self._encoder, DelimitedEncoder):
            try:
                self._encoder.names = header_of(written, self._encoder.delimiter)
            except InputFailed as error:
                raise NotResumable(f"the unfinished output is damaged: {error}; --overwrite begins anew") from error
        self.begun = True

    def of(self, rows: Sequence[OutRow]) -> bytes:
        """The rows' text, and the header's if it is due.

        Raises:
            SchemaMismatch: a column is not in the header, or a value has no form in text.
        """
        if isinstance(self._encoder, DelimitedEncoder) and not self.begun:
            columns = [name for row in rows for name in row.row.columns]
            results = [name for row in rows for name in row.results]
            self._encoder.names = tuple(dict.fromkeys([*(self._encoder.names or columns), *self._results, *results]))
        try:
            body = self._encoder.encode(rows)
        except TypeError as error:
            raise SchemaMismatch(self._place, f"a value has no form in text: {error}") from error
        return self.header() + body

    def header(self) -> bytes:
        """The header, once, as soon as the columns are known."""
        if self.begun or isinstance(self._encoder, JsonlEncoder):
            return b""
        header = self._encoder.header()
        self.begun = bool(header)
        return header


class TextWriter(FileWriter):
    """Text in a partial file. A position is its size in bytes, which lies between two members where it is packed."""

    def __init__(self, destination: Destination, text: Text, resume_at: int | None) -> None:
        """Begin a partial file, or cut an earlier run's to `resume_at`, and hold it against other runs.

        Raises:
            NotResumable: the file lacks what the earlier run is said to have written.
            OutputExists: the file is there, and nothing was said of resuming or overwriting.
            OutputFailed: it cannot be made, or another run holds it.
        """
        super().__init__(destination)
        self._compression = destination.location.compression
        self._text = text
        self._gathered = bytearray()
        with failing_as_output(self._place):
            self._file = _opened(destination, resume_at)
        self._size = resume_at or 0
        if self._size:
            try:
                self._text.go_on(replace(destination.location, path=destination.partial))
            except BaseException:
                self.close()
                raise

    def write(self, rows: Sequence[OutRow]) -> None:
        if not rows:
            return
        with self._failing():
            self._gathered += self._text.of(rows)
            if len(self._gathered) >= _MEMBER_BYTES:
                self._pack()

    def flush(self) -> int:
        with self._failing():
            if self._gathered:
                self._pack()
            os.fsync(self._file.fileno())
        return self._size

    def commit(self) -> None:
        with self._failing():
            self._gathered += self._text.header()
            if not self._size and not self._gathered and self._compression is not Compression.NONE:
                self._pack()  # no bytes at all are no packed file
        self.flush()
        self._destination.deliver()
        self.close()

    def close(self) -> None:
        self._file.close()

    def _pack(self) -> None:
        packed = member(self._compression, bytes(self._gathered))
        write_all(self._file, packed)
        self._size += len(packed)
        self._gathered.clear()


def _opened(destination: Destination, resume_at: int | None) -> FileIO:
    partial, place = destination.partial, destination.location.url
    if resume_at is None and not destination.overwrite and partial.exists():
        raise OutputExists(place, f"an unfinished run left {partial}: --resume goes on, --overwrite begins anew")
    try:
        descriptor = os.open(partial, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if resume_at is None else 0), 0o666)
    except FileNotFoundError as error:
        if resume_at is None:
            raise
        raise NotResumable(f"the unfinished output {partial} is gone; --overwrite begins anew") from error
    file = FileIO(descriptor, "r+")
    try:
        lock(descriptor, place)
        size = os.fstat(descriptor).st_size
        if resume_at is not None and size < resume_at:
            raise NotResumable(
                f"{partial} has {size} bytes, at the checkpoint it had {resume_at}; --overwrite begins anew"
            )
        file.truncate(resume_at or 0)
        file.seek(resume_at or 0)
        sync_folder(partial.parent)
    except BaseException:
        file.close()
        raise
    return file


class StandardWriter(Writer):
    """Text on standard output, written at once: it is never cut back, so no run can go on with it."""

    def __init__(self, text: Text, compression: Compression = Compression.NONE) -> None:
        self._text = text
        self._compression = compression
        self._begun = False

    def write(self, rows: Sequence[OutRow]) -> None:
        if rows:
            self._put(self._text.of(rows))

    def flush(self) -> int:
        with failing_as_output("standard output"):
            sys.stdout.buffer.flush()
        return 0

    def commit(self) -> None:
        header = self._text.header()
        if header or not self._begun:
            self._put(header)
        self.flush()

    def close(self) -> None:
        """Standard output stays open: it is not ours."""

    def _put(self, text: bytes) -> None:
        self._begun = True
        with failing_as_output("standard output"):
            sys.stdout.buffer.write(member(self._compression, text))
