"""JSON Lines: one object a line.

A name that stands twice in an object has its last value, as in most parsers of JSON. Integers of any size keep their
digits. NaN and infinities are no JSON: they are refused where they are read and become null where they are written.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from io import BufferedReader

import orjson

from bulk.formats.lines import lines
from bulk.rows import BadRow, OutRow, Reason, Row, shown

# Numbers of more digits may lie beyond 64 bits, where orjson makes floats of them.
_MANY_DIGITS = re.compile(rb"[0-9]{19}")
#: Rows nested deeper could not be written again; fewer brackets than that cannot be.
_MAX_DEPTH = 200


def read(stream: BufferedReader, place: str, *, start: int, limit: int) -> Iterator[Row | BadRow]:
    """The rows of a text from row `start` on; blank lines are no rows.

    Raises:
        InputFailed: the stream breaks off, or is no text.
    """
    number = -1
    for line in lines(stream, place, limit):
        if line.whole and (not line.data or line.data.isspace()):
            continue
        number += 1
        if number < start:
            continue
        if not line.whole:
            message = f"the line is longer than {limit} bytes"
            yield BadRow(number, line.number, shown(line.data), Reason.LINE_TOO_LONG, message)
            continue
        yield _row(number, line.number, line.data)


def _row(number: int, line: int, data: bytes) -> Row | BadRow:
    try:
        value = _parsed(data)
    except (ValueError, RecursionError) as error:
        return BadRow(number, line, shown(data), *_fault(data, error))
    if not isinstance(value, dict):
        return BadRow(number, line, shown(data), Reason.NOT_AN_OBJECT, "the line is JSON, but no object")
    return Row(number, line, value)


def _parsed(data: bytes) -> object:
    value = orjson.loads(data)
    if _MANY_DIGITS.search(data):
        value = json.loads(data)
    if data.count(b"[") + data.count(b"{") > _MAX_DEPTH:
        _check_depth(value)
    return value


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise ValueError(f"nested more than {_MAX_DEPTH} deep")


def _fault(data: bytes, error: Exception) -> tuple[Reason, str]:
    try:
        data.decode()
    except UnicodeDecodeError as broken:
        return Reason.INVALID_UTF8, f"byte {broken.start + 1} of the line is no UTF-8"
    return Reason.INVALID_JSON_LINE, f"the line is no JSON: {error}"


class JsonlEncoder:
    """Rows as lines; it needs no head and remembers nothing."""

    def encode(self, rows: Sequence[OutRow]) -> bytes:
        """One line a row: the columns in their order, then the results."""
        return b"".join(json_text(row.merged()) + b"\n" for row in rows)


def json_text(value: object) -> bytes:
    """A value as JSON in UTF-8, on one line.

    What JSON lacks: bytes are written in base64, decimals as text with all their digits, times in ISO 8601, durations
    in seconds.

    Raises:
        TypeError: it holds something that has no form in JSON.
    """
    try:
        return orjson.dumps(value, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError:
        if not isinstance(value, (int, dict, list, tuple)):
            raise
        return _json_text_by_parts(value)


def _json_text_by_parts(value: int | dict[object, object] | list[object] | tuple[object, ...]) -> bytes:
    """For what orjson does not write in one piece: integers beyond 64 bits, wherever they are."""
    match value:
        case int():
            return b"%d" % value
        case dict():
            pairs = (orjson.dumps(str(name)) + b":" + json_text(inner) for name, inner in value.items())
            return b"{" + b",".join(pairs) + b"}"
        case _:
            return b"[" + b",".join(map(json_text, value)) + b"]"


def _plain(value: object) -> object:
    match value:
        case bytes():
            return base64.b64encode(value).decode()
        case Decimal():
            return str(value)
        case dt.timedelta():
            return value.total_seconds()
    raise TypeError(f"{type(value).__name__} has no form in JSON")
