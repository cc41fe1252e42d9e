"""A file to write rows into, whatever form it has: complete under its name, or not there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bulk.destination import Destination
from bulk.errors import NotResumable
from bulk.formats import Format, format_of
from bulk.formats.delimited import DelimitedEncoder
from bulk.formats.jsonl import JsonlEncoder
from bulk.locations import Location, exists
from bulk.output import Writer
from bulk.reading import DELIMITERS
from bulk.rows import Head
from bulk.text_output import StandardWriter, Text, TextWriter


def open_writer(
    location: Location,
    asked: Format | None = None,
    *,
    head: Head | None = None,
    results: Sequence[str] = (),
    vectors: bool = False,
    resume_at: int | None = None,
    overwrite: bool = False,
    folder: Path | None = None,
) -> Writer:
    """Open an output; `asked` is its format, else the suffix tells.

    `head` is what the input tells of its columns and `results` the names of those that are added: they make a header or
    a schema even where there are no rows; `vectors` says that the results are lists of floats. `resume_at` is the
    position of an earlier run's last checkpoint: what it wrote after that is cut away. Until the output is complete it
    grows beside its place, or for a remote one in `folder`, the working directory by default.

    Raises:
        UnsupportedFormat: the format is unknown, or cannot be written there.
        NotResumable: what the earlier run wrote is gone, or went to standard output.
        OutputExists: the output, or what an unfinished run left, is there, and `overwrite` and `resume_at` are not set.
        OutputFailed: no file can be made there, or another run is writing it.
    """
    file_format = format_of(location, asked)
    head = head or Head()
    if location.is_standard:
        if resume_at is not None:
            raise NotResumable("standard output cannot be cut back: write to a file to be able to resume")
        return StandardWriter(_text(location, file_format, head.names, results), location.compression)
    destination = Destination(location, overwrite, folder)
    destination.check()
    if file_format is Format.PARQUET:
        # Arrow takes a tenth of a second to import, for which those without Parquet need not wait.
        from bulk.parquet_output import ParquetWriter

        return ParquetWriter(destination, head, results, resume_at, vectors=vectors)
    return TextWriter(destination, _text(location, file_format, head.names, results), resume_at)


def finish_output(
    location: Location,
    asked: Format | None = None,
    *,
    position: int,
    head: Head | None = None,
    results: Sequence[str] = (),
    vectors: bool = False,
    folder: Path | None = None,
) -> None:
    """Give an output its name whose rows are all written up to `position`, unless it has it.

    For a run that ended between a checkpoint which says that it is complete and the removal of that checkpoint: the
    output may have its name, and is replaced by itself if what it was made of is still there.

    Raises:
        UnsupportedFormat, NotResumable, OutputFailed: as in `open_writer`.
    """
    destination = Destination(location, folder=folder)
    growing = destination.parts if format_of(location, asked) is Format.PARQUET else destination.partial
    if not growing.exists() and exists(location):
        return
    with open_writer(
        location,
        asked,
        head=head,
        results=results,
        vectors=vectors,
        resume_at=position,
        overwrite=True,
        folder=folder,
    ) as writer:
        writer.commit()


def _text(location: Location, file_format: Format, names: Sequence[str] | None, results: Sequence[str]) -> Text:
    if file_format is Format.JSONL:
        return Text(location.url, JsonlEncoder())
    columns = None if names is None else tuple(dict.fromkeys([*names, *results]))
    return Text(location.url, DelimitedEncoder(location.url, DELIMITERS[file_format], columns), results)
