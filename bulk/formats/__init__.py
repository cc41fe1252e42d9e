"""The forms that rows have in files, one module each; this one tells which form a file has."""

from __future__ import annotations

from enum import StrEnum

from bulk.compression import Compression
from bulk.errors import UnknownFormat, UnsupportedFormat
from bulk.locations import Location


class Format(StrEnum):
    """How rows lie in a file."""

    JSONL = "jsonl"
    CSV = "csv"
    TSV = "tsv"
    PARQUET = "parquet"


#: Suffix -> format; text may have a suffix of its compression behind it.
SUFFIXES = {
    ".jsonl": Format.JSONL,
    ".ndjson": Format.JSONL,
    ".csv": Format.CSV,
    ".tsv": Format.TSV,
    ".parquet": Format.PARQUET,
}


def named(text: str) -> tuple[Format, Compression]:
    """The format of which `text` is the name, with the suffix of a compression behind it: `csv`, `jsonl.gz`.

    Raises:
        UnsupportedFormat: there is none of that name.
    """
    packed = next((kind for kind in Compression if kind and text.endswith(kind)), Compression.NONE)
    try:
        return Format(text.removesuffix(packed)), packed
    except ValueError:
        raise UnsupportedFormat(
            f"it is one of {', '.join(Format)}, of a packed text with .gz or .zst behind it"
        ) from None


def format_of(location: Location, asked: Format | None = None) -> Format:
    """The format that was asked for, or else the one that the suffix names.

    Raises:
        UnknownFormat: there is neither.
        UnsupportedFormat: the file could not hold it.
    """
    found = asked or SUFFIXES.get(location.suffix)
    if found is None:
        raise UnknownFormat(f"{location.url} has none of the suffixes {', '.join(SUFFIXES)}")
    if found is Format.PARQUET and location.is_standard:
        raise UnsupportedFormat("Parquet is read from its end and written in one piece: a pipe cannot hold it")
    if found is Format.PARQUET and location.compression is not Compression.NONE:
        raise UnsupportedFormat(f"{location.url}: Parquet is packed inside, without {location.compression} around it")
    return found


__all__ = ["SUFFIXES", "Format", "format_of", "named"]
