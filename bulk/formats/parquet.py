"""Parquet, read batch by batch: each row as Python values for the model, and as it lies in Arrow for an output alike.

Times finer than a microsecond lose those digits in the Python values, so in text too; a Parquet output keeps them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from bulk.errors import InputFailed
from bulk.rows import BadRow, Origin, Reason, Row, shown

#: A batch's rows, and its bytes as the file tells them: what is in memory at a time, several times over.
_BATCH_ROWS = 1024
_BATCH_BYTES = 4 << 20

#: What Arrow raises on a damaged file.
_DAMAGED = (pa.ArrowException, OSError)


@dataclass(slots=True)
class ParquetRows:
    """An open Parquet file, positioned at a row."""

    schema: pa.Schema
    total: int
    #: The number of the next row.
    next_row: int
    _file: pq.ParquetFile
    _place: str

    @classmethod
    def open(cls, source: BinaryIO, place: str, *, start: int, read_bytes: int) -> ParquetRows:
        """Read the file's directory. `read_bytes` is what one read of a column asks for.

        Raises:
            InputFailed: it is no Parquet file, or two of its columns have one name.
        """
        try:
            # With a buffer a column is read piece by piece, without one a row group at once.
            file = pq.ParquetFile(source, buffer_size=read_bytes, pre_buffer=False)
            schema = file.schema_arrow
        except _DAMAGED as error:
            raise InputFailed(place, f"it is no Parquet file that can be read: {error}") from error
        twice = next((name for name in schema.names if schema.names.count(name) > 1), None)
        if twice is not None:
            raise InputFailed(place, f"it has two columns {twice!r}")
        return cls(schema, file.metadata.num_rows, start, file, place)

    def __iter__(self) -> Iterator[Row | BadRow]:
        """The rows from the start on.

        Raises:
            InputFailed: a part of the file is damaged.
        """
        try:
            for batch in self._batches():
                for row in _rows(batch, self.next_row):
                    self.next_row += 1
                    yield row
        except _DAMAGED as error:
            raise InputFailed(self._place, f"it is damaged after row {self.next_row}: {error}") from error

    def _batches(self) -> Iterator[pa.RecordBatch]:
        """What lies from the next row on; row groups before it are not touched."""
        metadata = self._file.metadata
        groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        ends = [0]
        for group in groups:
            ends.append(ends[-1] + group.num_rows)
        for index, (first, end) in enumerate(pairwise(ends)):
            if end <= self.next_row:
                continue
            to_skip = max(0, self.next_row - first)
            a_row = groups[index].total_byte_size // (end - first) + 1
            size = max(1, min(_BATCH_ROWS, _BATCH_BYTES // a_row))
            for batch in self._file.iter_batches(batch_size=size, row_groups=[index], use_threads=False):
                rest = batch.slice(min(to_skip, batch.num_rows))
                to_skip -= batch.num_rows - rest.num_rows
                if rest.num_rows:
                    yield rest


def _rows(batch: pa.RecordBatch, first: int) -> Iterator[Row | BadRow]:
    try:
        values = _values(batch)
    except _UNREADABLE:
        # One value spoils the batch: row by row the others are saved.
        for index in range(batch.num_rows):
            yield _alone(batch, index, first + index)
        return
    for index, columns in enumerate(values):
        yield Row(first + index, first + index + 1, columns, Origin(batch, index))


#: Text that is no UTF-8, years beyond 9999.
_UNREADABLE = (ValueError, OverflowError, pa.ArrowException)


def _alone(batch: pa.RecordBatch, index: int, number: int) -> Row | BadRow:
    try:
        (columns,) = _values(batch.slice(index, 1))
    except _UNREADABLE as error:
        return BadRow(number, number + 1, "", Reason.UNREADABLE_VALUE, f"a value cannot be read: {shown(str(error))}")
    return Row(number, number + 1, columns, Origin(batch, index))


def _values(batch: pa.RecordBatch) -> list[dict[str, object]]:
    columns = [_as_python(column, field.type) for column, field in zip(batch.columns, batch.schema, strict=True)]
    names = batch.schema.names
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)] if columns else [{}] * len(batch)


def _as_python(column: Any, kind: pa.DataType) -> list[object]:
    readable = _readable(kind)
    values: list[object] = (column if readable == kind else column.cast(readable, safe=False)).to_pylist()
    return values


def _readable(kind: Any) -> Any:
    """The nearest type whose every value Python has: microseconds, and UTC for a zone that it may not know."""
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz else None)
    if pa.types.is_time64(kind):
        return pa.time64("us")
    if pa.types.is_duration(kind):
        return pa.duration("us")
    if pa.types.is_dictionary(kind):
        return _readable(kind.value_type)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_readable(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_readable(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_readable(kind.value_type)))
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, kind.item_field.with_type(_readable(kind.item_type)))
    return kind
