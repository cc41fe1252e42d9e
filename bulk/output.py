"""What a writer promises, whatever form the output has and wherever it lies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from bulk.destination import Destination
from bulk.durable import failing_as_output
from bulk.errors import OutputFailed
from bulk.rows import OutRow


class Writer(ABC):
    """Takes rows in order; the output has its name only after `commit`, and then all of them.

    After a flush the rows before it are on disk. A writer that failed takes nothing more: the position of the last
    flush stays good to resume at.
    """

    @abstractmethod
    def write(self, rows: Sequence[OutRow]) -> None:
        """Add rows.

        Raises:
            SchemaMismatch: a row does not fit the output's columns; it may be told as late as at the next flush.
            OutputFailed: they cannot be written.
        """

    @abstractmethod
    def flush(self) -> int:
        """Make all rows so far last, and tell the position to resume at. It is worth a checkpoint, not less.

        Raises:
            SchemaMismatch: as in `write`.
            OutputFailed: they cannot be written.
        """

    @abstractmethod
    def commit(self) -> None:
        """Flush, then give the output its name.

        Raises:
            SchemaMismatch: as in `write`.
            OutputExists: the name was taken meanwhile.
            OutputFailed: the output cannot be finished; resuming at the last position and committing again may help.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of the files; what was not committed stays where a resumed run finds it."""

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class FileWriter(Writer):
    """One whose output grows in files of this machine, and which takes nothing more after it failed."""

    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        self._place = destination.location.url
        self._failed = False

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """For all that writes. What is raised within leaves the writer failed."""
        if self._failed:
            raise OutputFailed(self._place, "an earlier write failed; resume at the last checkpoint")
        self._failed = True
        with failing_as_output(self._place):
            yield
        self._failed = False
