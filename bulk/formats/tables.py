"""Rows to Arrow tables under one schema, which grows only so far that the tables before it still fit.

A column that was null gets a type, whole numbers become floats beside floats, a new column is null in the rows before.
Lists of floats among results are float32, as models compute them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from bulk.errors import SchemaMismatch
from bulk.rows import Head, OutRow

#: What Arrow raises on values that do not fit a type or one another.
_UNFIT = (pa.ArrowException, TypeError, ValueError, OverflowError)


class Tables:
    """Makes tables of rows; `schema` is what all of them so far fit."""

    def __init__(self, place: str, head: Head, results: Sequence[str], schema: pa.Schema | None = None) -> None:
        """Begin with what the input tells of its columns, or go on with the `schema` of an earlier run."""
        self._place = place
        self._results = frozenset(results)
        self.schema = schema if schema is not None else _beginning(head, results)

    def of(self, rows: Sequence[OutRow]) -> pa.Table:
        """The rows as a table, its schema that of now.

        Raises:
            SchemaMismatch: a value fits neither the column so far nor any type that would hold both.
        """
        table = _originals(rows)
        columns = {} if table is None else dict(zip(table.schema.names, table.columns, strict=True))
        if table is None:
            for name in dict.fromkeys(name for row in rows for name in row.row.columns):
                columns[name] = self._column(name, rows, [row.row.columns.get(name) for row in rows])
        for name in dict.fromkeys(name for row in rows for name in row.results):
            values = [row.results.get(name) for row in rows]
            columns[name] = self._column(name, rows, values, result=True)
        for name, column in columns.items():
            self._grow(name, column, rows)
        return fitted(pa.table(columns) if columns else _empty(len(rows)), self.schema)

    def typed(self, vectors: Sequence[str]) -> pa.Schema:
        """The schema, with these columns as lists of floats if no row has told their type."""
        schema = self.schema
        for name in vectors:
            if pa.types.is_null(schema.field(name).type):
                schema = schema.set(schema.get_field_index(name), pa.field(name, pa.list_(pa.float32())))
        return schema

    def _column(self, name: str, rows: Sequence[OutRow], values: list[Any], *, result: bool = False) -> Any:
        try:
            # Not with the type known so far: under that Arrow cuts 2.5 to 2, and fields from objects.
            column: Any = pa.array(values)
            return column.cast(_narrowed(column.type)) if result else column
        except _UNFIT as error:
            index = bisect_left(range(len(values)), True, key=lambda last: not _has_type(values[: last + 1]))
            raise self._mismatch(name, rows[index], str(error)) from error

    def _grow(self, name: str, column: Any, rows: Sequence[OutRow]) -> None:
        known = self._known(name)
        if known == column.type:
            return
        if known is None and name not in self._results:
            # The input's columns come before the results, also those that no row had so far.
            place = sum(field.name not in self._results for field in self.schema)
            self.schema = self.schema.insert(place, pa.field(name, column.type))
            return
        try:
            self.schema = pa.unify_schemas(
                [self.schema, pa.schema([(name, column.type)])], promote_options="permissive"
            )
            grown = self.schema.field(name).type
            if known is not None and not pa.types.is_null(known):
                column.cast(grown)
        except _UNFIT as error:
            first = next(row for row, value in zip(rows, column, strict=True) if value.is_valid)
            raise self._mismatch(name, first, f"{column.type} came where {known} was before") from error

    def _known(self, name: str) -> pa.DataType | None:
        index = self.schema.get_field_index(name)
        return None if index < 0 else self.schema.field(index).type

    def _mismatch(self, name: str, row: OutRow, reason: str) -> SchemaMismatch:
        return SchemaMismatch(
            self._place,
            f"row {row.row.number} (line {row.row.line}) does not fit the column {name!r}: {reason}; JSONL takes it",
        )


def fitted(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table under a schema that its own has grown into: columns that it lacks are null."""
    if table.schema.equals(schema):
        return table
    columns = [
        table[field.name].cast(field.type) if field.name in table.schema.names else pa.nulls(len(table), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _beginning(head: Head, results: Sequence[str]) -> pa.Schema:
    schema = head.schema
    if schema is None:
        # Columns that are named and have no types are text.
        schema = pa.schema([(name, pa.string()) for name in head.names or ()])
    for name in results:
        schema = schema.append(pa.field(name, pa.null()))
    return schema


def _originals(rows: Sequence[OutRow]) -> pa.Table | None:
    """The rows' columns as they lay in the input; None where that was no Arrow."""
    runs: list[tuple[pa.RecordBatch, list[int]]] = []
    for row in rows:
        origin = row.row.origin
        if origin is None:
            return None
        if not runs or runs[-1][0] is not origin.batch:
            runs.append((origin.batch, []))
        runs[-1][1].append(origin.index)
    # Taken, not sliced: a slice would keep the whole batch in memory.
    return pa.Table.from_batches([batch.take(pa.array(indices)) for batch, indices in runs])


def _empty(rows: int) -> pa.Table:
    return pa.table({"": pa.nulls(rows)}).select([])


def _narrowed(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind):
        return pa.list_(pa.float32() if pa.types.is_float64(kind.value_type) else _narrowed(kind.value_type))
    return kind


def _has_type(values: list[Any]) -> bool:
    try:
        pa.array(values)
    except _UNFIT:
        return False
    return True
