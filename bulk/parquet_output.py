"""Rows as Parquet: whole numbered files, which a checkpoint counts, are joined into the output at the end.

A Parquet file has its directory at its end, so none can be cut back or gone on with; small ones can be left out.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from bulk.destination import Destination
from bulk.durable import failing_as_output, lock, sync_folder, write_atomically
from bulk.errors import NotResumable, OutputExists, SchemaMismatch
from bulk.formats.tables import Tables, fitted
from bulk.output import FileWriter
from bulk.rows import Head, OutRow

#: How many rows become a table at once: enough that the work a table takes does not count, few if they are large.
_TABLE_ROWS = 128
#: A part is finished when it has that much, and a row group of the output too: it is held in memory.
_PART_ROWS = 64 << 10
_PART_BYTES = 16 << 20


class ParquetWriter(FileWriter):
    """Rows in numbered parts; a position is their count. A flush ends a part, so flushes should be seconds apart."""

    def __init__(
        self,
        destination: Destination,
        head: Head,
        results: Sequence[str],
        resume_at: int | None,
        *,
        vectors: bool = False,
    ) -> None:
        """Make the folder of parts, or drop what came after `resume_at` in an earlier run's; hold it against others.

        Raises:
            NotResumable: parts are missing that the earlier run is said to have written.
            OutputExists: the folder is there, and nothing was said of resuming or overwriting.
            OutputFailed: it cannot be made, or another run holds it.
        """
        super().__init__(destination)
        self._folder = destination.parts
        self._waiting: list[OutRow] = []
        self._gathered = _Gathered()
        with failing_as_output(self._place):
            self._lock: int | None = _held(destination, resume_at)
        self._parts = resume_at or 0
        try:
            schema = _schema_of(self._part(self._parts - 1)) if self._parts else None
            self._tables = Tables(self._place, head, results, schema)
            self._vectors = tuple(results) if vectors else ()
        except BaseException:
            self.close()
            raise

    def write(self, rows: Sequence[OutRow]) -> None:
        self._waiting += rows
        with self._failing():
            while len(self._waiting) >= _TABLE_ROWS:
                self._gather(self._waiting[:_TABLE_ROWS])
                del self._waiting[:_TABLE_ROWS]

    def flush(self) -> int:
        with self._failing():
            if self._waiting:
                self._gather(self._waiting)
                self._waiting = []
            if self._gathered.rows:
                self._finish_part()
        return self._parts

    def commit(self) -> None:
        self.flush()
        parts = [self._part(number) for number in range(self._parts)]
        size = sum(part.stat().st_size for part in parts)
        with self._destination.receive(size) as stream:
            try:
                _join(parts, self._tables.typed(self._vectors), stream)
            except pa.ArrowException as error:
                raise SchemaMismatch(self._place, f"the rows do not fit one schema: {error}") from error
        with failing_as_output(self._place):
            shutil.rmtree(self._folder)
        self.close()

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _gather(self, rows: Sequence[OutRow]) -> None:
        self._gathered.add(self._tables.of(rows))
        if self._gathered.full:
            self._finish_part()

    def _finish_part(self) -> None:
        buffer = pa.BufferOutputStream()
        try:
            table = self._gathered.taken(self._tables.schema)
            pq.write_table(table, buffer)
        except pa.ArrowException as error:
            raise SchemaMismatch(self._place, f"the rows do not fit into Parquet: {error}") from error
        write_atomically(self._part(self._parts), memoryview(buffer.getvalue()))
        self._parts += 1

    def _part(self, number: int) -> Path:
        return _part(self._folder, number)


class _Gathered:
    """Tables that wait for one another, to be one part or one row group."""

    def __init__(self) -> None:
        self._tables: list[pa.Table] = []
        self.rows = 0
        self._bytes = 0

    def add(self, table: pa.Table) -> None:
        self._tables.append(table)
        self.rows += table.num_rows
        self._bytes += table.nbytes

    @property
    def full(self) -> bool:
        return self.rows >= _PART_ROWS or self._bytes >= _PART_BYTES

    def taken(self, schema: pa.Schema) -> pa.Table:
        """All of it as one table; nothing waits afterwards."""
        table = pa.concat_tables([fitted(table, schema) for table in self._tables]).unify_dictionaries()
        self._tables, self.rows, self._bytes = [], 0, 0
        return table


def _join(parts: Sequence[Path], schema: pa.Schema, stream: BinaryIO) -> None:
    gathered = _Gathered()
    with pq.ParquetWriter(stream, schema, compression="zstd") as output:
        for part in parts:
            gathered.add(pq.read_table(part, partitioning=None, use_threads=False))
            if gathered.full:
                output.write_table(gathered.taken(schema))
        if gathered.rows:
            output.write_table(gathered.taken(schema))


def _held(destination: Destination, resume_at: int | None) -> int:
    """The folder of parts, made or cleared of what came after `resume_at`, open and locked."""
    folder, place = destination.parts, destination.location.url
    if resume_at is None and not destination.overwrite and folder.exists():
        raise OutputExists(place, f"an unfinished run left {folder}: --resume goes on, --overwrite begins anew")
    if resume_at is None:
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)
    elif not folder.is_dir():
        raise NotResumable(f"the unfinished output {folder} is gone; --overwrite begins anew")
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        lock(descriptor, place)
        kept = {_part(folder, number) for number in range(resume_at or 0)}
        there = set(folder.iterdir())
        if missing := kept - there:
            raise NotResumable(f"{min(missing)} is gone, which the checkpoint counts; --overwrite begins anew")
        for path in there - kept:
            path.unlink()
        os.fsync(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _part(folder: Path, number: int) -> Path:
    return folder / f"part-{number:06d}.parquet"


def _schema_of(part: Path) -> pa.Schema:
    try:
        return pq.read_schema(part)
    except (pa.ArrowException, OSError) as error:
        raise NotResumable(f"{part} is damaged: {error}; --overwrite begins anew") from error
