"""CSV and TSV as RFC 4180 has them: a header, quotes around what needs them, records that may span lines.

All values are text; an empty field is an empty text, and a null is written as one. A record ends where its quotes are
closed, so a quote that somebody forgot to close takes the lines up to the next one with it: they are one bad row that
says how far it went.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from io import BufferedReader
from typing import NamedTuple

from bulk.errors import InputFailed, SchemaMismatch
from bulk.formats.jsonl import json_text
from bulk.formats.lines import Line, lines
from bulk.rows import BadRow, OutRow, Reason, Row, shown

# Ours is the only limit: a record's bytes are bounded before the parser sees them.
csv.field_size_limit(2**31 - 1)


class _Record(NamedTuple):
    line: int
    last_line: int
    data: bytes
    whole: bool = True
    closed: bool = True


def read(
    stream: BufferedReader, place: str, *, delimiter: str, start: int, limit: int
) -> tuple[tuple[str, ...], Iterator[Row | BadRow]]:
    """The header's names, and the rows from row `start` on; empty lines are no rows.

    Raises:
        InputFailed: there is no header, it cannot be read, or it names a column twice; later: the stream breaks off.
    """
    records = _records(lines(stream, place, limit), delimiter, limit)
    names = _header(next(records, None), place, delimiter)
    return names, _rows(records, names, delimiter, start, limit)


def _header(record: _Record | None, place: str, delimiter: str) -> tuple[str, ...]:
    if record is None:
        raise InputFailed(place, "it is empty: not even a header is there")
    fields = _fields(record.data, delimiter) if record.whole and record.closed else None
    if not isinstance(fields, list):
        raise InputFailed(place, f"its header on line {record.line} is no record in UTF-8")
    if b"\r" in record.data and b'"' not in record.data:
        raise InputFailed(place, "its lines seem to end in CR alone; LF or CR LF is needed")
    twice = next((name for name in fields if fields.count(name) > 1), None)
    if twice is not None:
        raise InputFailed(place, f"its header names the column {twice!r} twice")
    return tuple(fields)


def _rows(
    records: Iterator[_Record], names: tuple[str, ...], delimiter: str, start: int, limit: int
) -> Iterator[Row | BadRow]:
    for number, record in enumerate(records):
        if number < start:
            continue
        fault = _fault(record, limit)
        fields = fault or _fields(record.data, delimiter)
        if isinstance(fields, list) and len(fields) != len(names):
            message = f"the record has {len(fields)} fields, the header {len(names)}{_span(record)}"
            fields = (Reason.WRONG_FIELD_COUNT, message)
        if isinstance(fields, list):
            yield Row(number, record.line, dict(zip(names, fields, strict=True)))
        else:
            yield BadRow(number, record.line, shown(record.data), *fields)


def _fault(record: _Record, limit: int) -> tuple[Reason, str] | None:
    if not record.whole:
        return Reason.LINE_TOO_LONG, f"the record is longer than {limit} bytes{_span(record)}"
    if not record.closed:
        return Reason.INVALID_CSV_RECORD, f"a quote is opened and never closed{_span(record)}"
    return None


def _span(record: _Record) -> str:
    return f"; it goes on to line {record.last_line}" if record.last_line > record.line else ""


def _fields(data: bytes, delimiter: str) -> list[str] | tuple[Reason, str]:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        return Reason.INVALID_UTF8, f"byte {error.start + 1} of the record is no UTF-8"
    if '"' not in text:
        return text.split(delimiter)
    try:
        return next(csv.reader([text], delimiter=delimiter))
    except csv.Error as error:
        return Reason.INVALID_CSV_RECORD, f"the record cannot be read: {error}"


def _records(source: Iterator[Line], delimiter: str, limit: int) -> Iterator[_Record]:
    quotes = _Quotes(delimiter)
    for line in source:
        if not line.data:
            continue
        if b'"' not in line.data and line.whole:
            yield _Record(line.number, line.number, line.data)
        else:
            yield _joined(line, source, quotes, limit)


def _joined(first: Line, source: Iterator[Line], quotes: _Quotes, limit: int) -> _Record:
    """The record that begins with `first`: lines join it until its quotes are closed, kept up to `limit` bytes."""
    kept, size, line, inside = [first.data], len(first.data), first, quotes.open_after(first, inside=False)
    whole = first.whole
    while inside:
        following = next(source, None)
        if following is None:
            break
        inside = quotes.open_after(following, inside=True)
        size += len(line.end) + len(following.data)
        whole = whole and following.whole and size <= limit
        if whole:
            kept += (line.end, following.data)
        line = following
    return _Record(first.number, line.number, b"".join(kept), whole, not inside)


class _Quotes:
    """Tells whether a line ends within quotes. Possessive groups keep it linear in the line's length."""

    def __init__(self, delimiter: str) -> None:
        field_end = delimiter.encode()
        quoted, rest = rb'"(?:[^"]++|"")*+', rb"[^%b]*+" % field_end
        fields = rb'(?:(?:%b"%b|[^"%b]%b)?+%b)*+' % (quoted, rest, field_end, rest, field_end)
        self._opens = re.compile(fields + quoted + rb"\Z")
        self._closes = re.compile(rb'(?:[^"]++|"")*+"%b(?:%b)?+' % (rest, field_end))

    def open_after(self, line: Line, *, inside: bool) -> bool:
        """Whether quotes are open at the end of the line, `inside` those that an earlier line opened or not."""
        rest = line.data
        if inside:
            closing = self._closes.match(rest)
            rest = b"" if closing is None else rest[closing.end() :]
            inside = closing is None
        inside = inside or self._opens.match(rest) is not None
        # Beyond the limit nothing is held that could be looked at closely; each quote there opens or closes.
        return inside != bool(line.quotes_beyond % 2)


class DelimitedEncoder:
    """Rows as records under a header; `names` is None until the columns are known."""

    def __init__(self, place: str, delimiter: str, names: Sequence[str] | None) -> None:
        self._place = place
        self.delimiter = delimiter
        self._special = re.compile(rf'[{delimiter}"\r\n\ufeff]')
        self.names = None if names is None else tuple(names)

    def header(self) -> bytes:
        """The header's record; nothing before the columns are known."""
        return b"" if self.names is None else self._record(self.names)

    def encode(self, rows: Sequence[OutRow]) -> bytes:
        """One record a row.

        Raises:
            SchemaMismatch: a row has a column that the header lacks.
        """
        assert self.names is not None, "the header comes first"
        known = frozenset(self.names)
        return b"".join(self._row(row.row, row.merged(), self.names, known) for row in rows)

    def _row(self, row: Row, values: Mapping[str, object], names: tuple[str, ...], known: frozenset[str]) -> bytes:
        if not values.keys() <= known:
            added = next(name for name in values if name not in known)
            raise SchemaMismatch(
                self._place, f"row {row.number} (line {row.line}) has a column {added!r} that the header lacks"
            )
        return self._record([_field(values.get(name)) for name in names])

    def _record(self, fields: Sequence[str]) -> bytes:
        if len(fields) == 1 and not fields[0]:
            return b'""\n'  # an empty line would be no record
        return (self.delimiter.join(map(self._quoted, fields)) + "\n").encode()

    def _quoted(self, field: str) -> str:
        return '"' + field.replace('"', '""') + '"' if self._special.search(field) else field


def _field(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    text = json_text(value).decode()
    # What JSON has no form of is text there; here it needs no quotes of its own.
    return text[1:-1] if text.startswith('"') else text
