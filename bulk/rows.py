"""A row on its way: as it was read, as one that cannot be read, and as it is written with what the model said of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

#: A bad row's text in reports, characters: enough to find it by, short enough for a terminal.
_SHOWN = 200


class Reason(StrEnum):
    """Why a row is bad."""

    INVALID_JSON_LINE = "invalid_json_line"
    NOT_AN_OBJECT = "not_an_object"
    INVALID_UTF8 = "invalid_utf8"
    LINE_TOO_LONG = "line_too_long"
    WRONG_FIELD_COUNT = "wrong_field_count"
    INVALID_CSV_RECORD = "invalid_csv_record"
    UNREADABLE_VALUE = "unreadable_value"


@dataclass(frozen=True, slots=True)
class Head:
    """What is known of all rows before the first is read: their columns, with types where the file has some."""

    names: tuple[str, ...] | None = None
    schema: pa.Schema | None = None


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a row lies in Arrow's own form, so that an output of the same kind keeps every type as it was."""

    batch: pa.RecordBatch
    index: int


@dataclass(frozen=True, slots=True)
class Row:
    """Row `number` (from 0) of the input, on `line` (from 1; in Parquet the number plus 1)."""

    number: int
    line: int
    columns: Mapping[str, object]
    origin: Origin | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be read. It has a number like any other; `raw` is safe to print and never long."""

    number: int
    line: int
    raw: str
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class OutRow:
    """A row and its results, whose names are none of its columns'."""

    row: Row
    results: Mapping[str, object]

    def merged(self) -> dict[str, object]:
        """Columns, then results, by name."""
        return {**self.row.columns, **self.results}


def shown(raw: bytes | str) -> str:
    """A row's text for people: the beginning of it, without what a terminal would obey."""
    # Four bytes are the longest character, so this cuts none of those that are kept.
    text = raw[: 4 * _SHOWN + 4].decode(errors="replace") if isinstance(raw, bytes) else raw
    kept = text[:_SHOWN]
    safe = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in kept)
    return safe if len(text) <= _SHOWN else f"{safe}…"
