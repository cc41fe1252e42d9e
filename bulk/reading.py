"""A file as a stream of rows, whatever form it has: constant memory for any size, and no bad row ends it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType

from bulk.formats import Format, delimited, format_of, jsonl
from bulk.locations import REMOTE_READ_BYTES, Location, open_random, open_text
from bulk.rows import BadRow, Head, Row

#: A row's longest form in a text file unless the caller says otherwise, bytes.
MAX_ROW_BYTES = 16 << 20

_LOCAL_READ_BYTES = 1 << 20
DELIMITERS = {Format.CSV: ",", Format.TSV: "\t"}


@dataclass(slots=True)
class Rows:
    """The rows of one open file, to be iterated over once and closed: `with read_rows(location) as rows`."""

    head: Head
    _rows: Iterator[Row | BadRow]
    #: How much of the file was given as rows, 0 to 1; None where that is unknown.
    ratio: Callable[[], float | None]
    close: Callable[[], None]

    def __iter__(self) -> Iterator[Row | BadRow]:
        return self._rows

    def __enter__(self) -> Rows:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_rows(
    location: Location, asked: Format | None = None, *, start: int = 0, max_row_bytes: int = MAX_ROW_BYTES
) -> Rows:
    """Open the file at `location` and give its rows from row number `start` on, in order.

    `asked` is its format, else the suffix tells. A row of text longer than `max_row_bytes` is a bad one. Rows before
    `start` are read past: of Parquet only those of the row group that holds `start`.

    Raises:
        UnsupportedFormat: the format is unknown, or cannot be read from there.
        InputFailed: the file cannot be opened or is damaged from the start; iterating raises it where reading fails.
    """
    file_format = format_of(location, asked)
    if file_format is Format.PARQUET:
        return _parquet(location, start)
    opened = open_text(location)
    try:
        if file_format is Format.JSONL:
            names = None
            rows = jsonl.read(opened.text, location.url, start=start, limit=max_row_bytes)
        else:
            names, rows = delimited.read(
                opened.text, location.url, delimiter=DELIMITERS[file_format], start=start, limit=max_row_bytes
            )
    except BaseException:
        opened.text.close()
        raise
    return Rows(Head(names), rows, opened.used_ratio, opened.text.close)


def header_of(location: Location, delimiter: str) -> tuple[str, ...]:
    """The columns that a text with a header has.

    Raises:
        InputFailed: it cannot be read, or has no header.
    """
    opened = open_text(location)
    with opened.text:
        names, _ = delimited.read(opened.text, location.url, delimiter=delimiter, start=0, limit=MAX_ROW_BYTES)
    return names


def _parquet(location: Location, start: int) -> Rows:
    # Arrow takes a tenth of a second to import, for which those without Parquet need not wait.
    from bulk.formats.parquet import ParquetRows

    file, _ = open_random(location, ahead=False)
    read_bytes = _LOCAL_READ_BYTES if location.path is not None else REMOTE_READ_BYTES
    try:
        rows = ParquetRows.open(file, location.url, start=start, read_bytes=read_bytes)
    except BaseException:
        file.close()
        raise
    head = Head(tuple(rows.schema.names), rows.schema)
    return Rows(head, iter(rows), lambda: rows.next_row / rows.total if rows.total else None, file.close)
