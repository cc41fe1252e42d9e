"""Files of rows, made and read back in a line each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from bulk.formats import Format
from bulk.locations import Location
from bulk.reading import read_rows
from bulk.rows import BadRow, OutRow, Row
from bulk.writing import open_writer


def at(place: str | Path) -> Location:
    return Location.parse(place)


def rows_of(place: str | Path, asked: Format | None = None, *, start: int = 0) -> list[Row | BadRow]:
    with read_rows(at(place), asked, start=start) as rows:
        return list(rows)


def columns_of(place: str | Path, asked: Format | None = None, *, start: int = 0) -> list[Mapping[str, object]]:
    """The columns of each row; none may be bad."""
    rows = rows_of(place, asked, start=start)
    assert not [row for row in rows if isinstance(row, BadRow)]
    return [row.columns for row in rows if isinstance(row, Row)]


def bad(row: Row | BadRow) -> BadRow:
    """The row, which has to be a bad one."""
    assert isinstance(row, BadRow)
    return row


def out(columns: Iterable[Mapping[str, object]], first: int = 0, **results: object) -> list[OutRow]:
    """Rows to write, numbered from `first`, all with the same results."""
    return [OutRow(Row(number, number + 1, values), results) for number, values in enumerate(columns, first)]


def write(place: str | Path, rows: Sequence[OutRow], asked: Format | None = None) -> None:
    with open_writer(at(place), asked) as writer:
        writer.write(rows)
        writer.commit()
