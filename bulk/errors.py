"""What can go wrong between a file of rows and the file of their results.

BulkError
├── UnsupportedFormat   this place cannot hold the format (Parquet on a pipe), or is none at all
│   └── UnknownFormat   the suffix names no format, and nobody else did
├── SamePlace           two of the files of a run are one
├── InputFailed         the input cannot be opened or read on; the rows given before are good
│   └── NoText          it is no text in UTF-8, whenever it is read
├── NoSuchColumn        the input lacks a column that was named
├── ColumnTaken         the input has a column of the name that was meant for the results
├── OutputFailed        the output cannot be written; what the last checkpoint holds stays usable
│   ├── OutputExists    a file of that name, or what an unfinished run left of it, is there already
│   └── SchemaMismatch  a row does not fit the columns that the rows before it gave the output
├── RowFailed           the model has no answer to a row, and the caller wants none without it
├── RunCancelled        people wanted the run to end; what is done is in the checkpoint
└── NotResumable        this run cannot go on where an earlier one stopped
    ├── BadCheckpoint   the checkpoint cannot be read
    ├── InputChanged    the input is another one than the checkpoint's
    ├── OptionsChanged  the run was asked for with other options than the checkpoint's
    └── NothingToResume the output is there, and no checkpoint of what made it

One row that cannot be read is no error here: it is a `BadRow` among the rows. `RowFailed` is for `bulk.map` alone.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class BulkError(Exception):
    """Base of everything this room raises on purpose."""


class UnsupportedFormat(BulkError):
    """The format is unknown, or the place cannot hold it."""


class UnknownFormat(UnsupportedFormat):
    """Neither the caller nor the suffix of the place names a format."""


class SamePlace(BulkError):
    """What is called `one` and `other` lies in the same place."""

    def __init__(self, one: str, other: str, place: str) -> None:
        super().__init__(f"{one} and {other} are one and the same file, {place}: give them names of their own")


class InputFailed(BulkError):
    """The input at `place` cannot be read, or not any further."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"cannot read {place}: {reason}")
        self.place = place
        self.reason = reason

    @property
    def is_missing(self) -> bool:
        """Whether there is nothing at the place."""
        return isinstance(self.__cause__, FileNotFoundError)


class NoText(InputFailed):
    """The input is something else than lines of text: packed, of another encoding, a Parquet file."""


class NoSuchColumn(BulkError):
    """The input's header, or its schema, lacks a column that the caller names."""

    def __init__(self, place: str, name: str, names: Sequence[str]) -> None:
        super().__init__(f"{place} has no column {name!r}; it has {', '.join(names) or 'none'}")


class ColumnTaken(BulkError):
    """The input's header, or its schema, has the column that the results should get."""

    def __init__(self, place: str, name: str) -> None:
        super().__init__(f"{place} {self.told(name)}")

    @staticmethod
    def told(name: str) -> str:
        """What is wrong with it, be it a file or a row, and what to do."""
        return f"has a column {name!r} already: give the results another name with --result-column"


class OutputFailed(BulkError):
    """The output at `place` cannot be written; what was flushed before stays as it is."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"cannot write {place}: {reason}")
        self.place = place
        self.reason = reason

    @property
    def is_full(self) -> bool:
        """Whether there is no room for it: the disk, or what may be used of it, is full."""
        return isinstance(self.__cause__, OSError) and self.__cause__.errno in _FULL


class OutputExists(OutputFailed):
    """Something is there already that a new output would replace."""


class SchemaMismatch(OutputFailed):
    """A row brings a column, or a value of a type, that the output has no place for."""


class NotResumable(BulkError):
    """An earlier run cannot be gone on with."""


class BadCheckpoint(NotResumable):
    """The file at `path` is no checkpoint that this version understands."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"cannot use the checkpoint {path}: {reason}")


class InputChanged(NotResumable):
    """The input is not the one that the checkpoint counts rows of."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the input changed since the checkpoint: {reason}; --overwrite begins anew, or bring the old input back"
        )


class OptionsChanged(NotResumable):
    """The option `name` differs from the one that the earlier rows were made with."""

    def __init__(self, name: str, before: object, now: object) -> None:
        super().__init__(
            f"{name} was {_told(before)} when the run began and is {_told(now)} now; --overwrite begins anew, or ask "
            "as before"
        )
        self.name = name


class NothingToResume(NotResumable):
    """The output at `place` is whole. Who made it, of which input and with which options, is told nowhere."""

    def __init__(self, place: str) -> None:
        super().__init__(
            f"{place} is there, whole, and nothing beside it tells of an unfinished run: if it was this run's, nothing "
            "is left to do; that cannot be known. --overwrite begins anew"
        )


class RunCancelled(BulkError):
    """The run was told to end by the registry of runs."""


class RowFailed(BulkError):
    """The model has no answer to row `number`, counted from 0."""

    def __init__(self, number: int, kind: str, message: str) -> None:
        super().__init__(f"row {number}: {kind}: {message}")
        self.number = number
        self.type = kind
        self.message = message


def _told(value: object) -> str:
    """An option's value, as a user gave it."""
    return "none" if value is None else str(value)
