"""Bytes into lines, in constant memory however long a line is."""

from __future__ import annotations

from collections.abc import Iterator
from io import BufferedReader
from typing import NamedTuple

from bulk.compression import packed_after_all
from bulk.errors import NoText

_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
_PARQUET_MAGIC = b"PAR1"

#: How much of a line beyond the limit is held at a time, bytes.
_SKIP_BYTES = 64 << 10


class Line(NamedTuple):
    """Line `number` (from 1) without its end; of one beyond the limit `data` is the beginning only."""

    number: int
    data: bytes
    end: bytes = b""
    whole: bool = True
    #: How many quotes lie in what was left out.
    quotes_beyond: int = 0


def lines(stream: BufferedReader, place: str, limit: int) -> Iterator[Line]:
    """The lines of `stream`, which end in LF or CR LF; a byte order mark before the first is left out.

    `limit` is in bytes, line end included.

    Raises:
        NoText: this is no UTF-8 text at all.
    """
    beginning = stream.peek(4)[:4]
    if beginning.startswith(_UTF8_BOM):
        stream.read(len(_UTF8_BOM))
    elif not_text := _no_text(beginning):
        raise NoText(place, not_text)
    number = 0
    while data := stream.readline(limit):
        number += 1
        if data.endswith(b"\n"):
            end = b"\r\n" if data.endswith(b"\r\n") else b"\n"
            yield Line(number, data[: -len(end)], end)
        elif len(data) < limit:
            yield Line(number, data.removesuffix(b"\r"))
        else:
            yield _beyond(stream, number, data)


def _beyond(stream: BufferedReader, number: int, data: bytes) -> Line:
    quotes = 0
    while rest := stream.readline(_SKIP_BYTES):
        quotes += rest.count(b'"')
        if rest.endswith(b"\n"):
            break
    return Line(number, data, whole=False, quotes_beyond=quotes)


def _no_text(beginning: bytes) -> str | None:
    if beginning.startswith(_UTF16_BOMS):
        return "it is UTF-16, only UTF-8 is read"
    if beginning == _PARQUET_MAGIC:
        return "it is a Parquet file: its name, or --input-format, should say so"
    packed = packed_after_all(beginning)
    return (
        f"it is packed with {packed.name.lower()}: its name, or --input-format, should end in {packed}"
        if packed
        else None
    )
