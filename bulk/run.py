"""One file through a model: rows in, results and errors out, and a checkpoint so that it can go on after any end.

Owns the order of things: a row counts as done when its result, or its error, is on disk; the checkpoint says so after
that; the output has its name last. Files are read and written on threads, so that a slow disk or store holds up
neither the broker nor each other.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Self

from pydantic import JsonValue

from broker import AsyncBroker, JobFailure
from bulk.checkpoint import Checkpoint
from bulk.chunks import Item, Outcome
from bulk.destination import Destination
from bulk.driving import drive, to_its_end
from bulk.engine import WINDOW, Engine
from bulk.errors import ColumnTaken, NoSuchColumn, NothingToResume, NotResumable, OutputExists
from bulk.fingerprint import Fingerprint
from bulk.formats import Format, format_of
from bulk.formats.jsonl import json_text
from bulk.locations import Location, check_writable, exists
from bulk.output import Writer
from bulk.reading import Rows, read_rows
from bulk.rows import BadRow, OutRow, Row
from bulk.steering import Steering
from bulk.writing import finish_output, open_writer
from schemas.rows import INVALID_INPUT


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is asked for. Formats are told by the suffixes where they are None."""

    model: str
    input: Location
    output: Location
    #: Where rows that failed go, as JSON lines; None for nowhere but the count.
    errors: Location | None
    #: The column that is the model's input; None for the whole row.
    column: str | None
    #: The column that the output gets for the model's answer.
    result: str
    #: A column whose value is told beside each error.
    id_column: str | None = None
    #: Whether the model takes texts only, and answers with vectors.
    texts: bool = False
    input_format: Format | None = None
    output_format: Format | None = None
    window: int = WINDOW
    resume: bool = False
    overwrite: bool = False

    @property
    def resumable(self) -> bool:
        return not (self.input.is_standard or self.output.is_standard)

    @property
    def checkpoint_path(self) -> Path:
        return self.output.beside(".checkpoint")

    @property
    def places(self) -> list[tuple[str, Location | Path]]:
        """All that is read and written, and what people know it by; but for the two ends of a pipe."""
        places: list[tuple[str, Location | Path]] = [] if self.input.is_standard else [("INPUT", self.input)]
        written = (
            ("OUTPUT", self.output, (".partial", ".parts", ".checkpoint", ".checkpoint.new")),
            ("--errors", self.errors, (".partial",)),
        )
        for name, place, growing in written:
            if place is not None:
                places.append((name, place))
                if not place.is_standard:
                    places += [(f"{name}{suffix}", place.beside(suffix)) for suffix in growing]
        return places

    def checkpoint(self) -> Checkpoint:
        """That of a run which begins now. Raises `InputFailed` or `UnsupportedFormat`."""
        options: dict[str, JsonValue] = {"model": self.model, "column": self.column, "result column": self.result}
        return Checkpoint(
            input=self.input.url,
            fingerprint=Fingerprint.of(self.input),
            input_format=format_of(self.input, self.input_format) + (self.input.packed or ""),
            output=self.output.url,
            output_format=format_of(self.output, self.output_format) + (self.output.packed or ""),
            errors=None if self.errors is None else self.errors.url,
            options=options | {"id column": self.id_column},
            owner=_new_owner(),
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come. `begun_at` is monotonic, of this process."""

    begun_at: float
    #: Rows that earlier processes of the run had done.
    resumed_from: int
    succeeded: int = 0
    failed: int = 0
    #: How much of the input is done and written, 0 to 1; None where its size is unknown.
    ratio: float | None = None
    #: For how long it was paused.
    paused_s: float = 0.0

    @property
    def rows(self) -> int:
        return self.succeeded + self.failed

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun_at

    @property
    def rows_per_second(self) -> float:
        """Of this process alone, while it was not paused."""
        return (self.rows - self.resumed_from) / max(self.seconds - self.paused_s, 1e-9)

    @classmethod
    def of(cls, checkpoint: Checkpoint | None) -> Self:
        """Of a run that begins, or goes on."""
        counts = {} if checkpoint is None else checkpoint.counts
        return cls(time.monotonic(), sum(counts.values()), counts.get("succeeded", 0), counts.get("failed", 0))

    def counted(self, outcomes: Sequence[Outcome], ratio: float | None) -> Self:
        failed = sum(outcome.failure is not None for outcome in outcomes)
        succeeded = self.succeeded + len(outcomes) - failed
        return replace(self, succeeded=succeeded, failed=self.failed + failed, ratio=ratio)


class _Files:
    """The open files of a run, used from one thread at a time."""

    def __init__(self, task: Task, rows: Rows, checkpoint: Checkpoint | None) -> None:
        self._task = task
        self.rows = rows
        self._checkpoint = checkpoint
        at = checkpoint if checkpoint is not None and checkpoint.rows_done else None
        self._output = open_writer(
            task.output,
            task.output_format,
            head=rows.head,
            results=(task.result,),
            vectors=task.texts,
            resume_at=None if at is None else at.output_position,
            overwrite=task.overwrite or (task.resume and at is None),
        )
        self._errors: Writer | None = None
        if at is not None and at.errors_position:
            self._errors = self._open_errors(at.errors_position)
        #: Rows that were read and whose outcomes are not written, in order, each with how much of the input ends there.
        self._pending: deque[tuple[Row | BadRow, float | None]] = deque()
        self._rows_done = 0 if at is None else at.rows_done
        self.progress = Progress.of(checkpoint)

    def take(self, most: int) -> list[Item]:
        read = [(row, self.rows.ratio()) for row in islice(self.rows, most)]
        self._pending.extend(read)
        return [self._item(row) for row, _ in read]

    def write(self, outcomes: Sequence[Outcome]) -> None:
        good: list[OutRow] = []
        bad: list[OutRow] = []
        ratio = self.progress.ratio
        for outcome in outcomes:
            row, ratio = self._pending.popleft()
            assert row.number == outcome.number
            if outcome.failure is not None:
                bad.append(OutRow(Row(row.number, row.line, self._error(row, outcome.failure)), {}))
            else:
                assert isinstance(row, Row)
                good.append(OutRow(row, {self._task.result: outcome.output}))
        self._output.write(good)
        if bad and self._task.errors is not None:
            if self._errors is None:
                self._errors = self._open_errors(None)
            self._errors.write(bad)
        if outcomes:
            self._rows_done = outcomes[-1].number + 1
            self.progress = self.progress.counted(outcomes, ratio)

    def save(self, *, complete: bool = False) -> None:
        """Have all that was written on disk, and the checkpoint say so."""
        output_position = self._output.flush()
        errors_position = 0 if self._errors is None else self._errors.flush()
        if self._checkpoint is not None:
            replace(
                self._checkpoint,
                rows_done=self._rows_done,
                output_position=output_position,
                errors_position=errors_position,
                counts={"succeeded": self.progress.succeeded, "failed": self.progress.failed},
                complete=complete,
            ).save(self._task.checkpoint_path)

    def commit(self) -> None:
        self.save(complete=True)
        if self._errors is not None:
            self._errors.commit()
        self._output.commit()
        if self._checkpoint is not None:
            self._task.checkpoint_path.unlink()

    def close(self) -> None:
        self.rows.close()
        self._output.close()
        if self._errors is not None:
            self._errors.close()

    def _open_errors(self, resume_at: int | None) -> Writer:
        assert self._task.errors is not None
        # What an earlier process wrote without counting it is written again.
        again = self._task.overwrite or self._task.resume
        return open_writer(self._task.errors, Format.JSONL, resume_at=resume_at, overwrite=again)

    def _item(self, row: Row | BadRow) -> Item:
        if isinstance(row, BadRow):
            return Item(row.number, failure=JobFailure(row.reason.value, row.message))
        column, result = self._task.column, self._task.result
        if result in row.columns:
            return Item(row.number, failure=JobFailure("column_taken", f"the row {ColumnTaken.told(result)}"))
        if column is None:
            return Item(row.number, json_text(row.columns))
        if column not in row.columns:
            return Item(row.number, failure=JobFailure("missing_column", f"the row has no {column!r}"))
        value = row.columns[column]
        if self._task.texts and not isinstance(value, str):
            kind = "null" if value is None else type(value).__name__
            return Item(row.number, failure=JobFailure(INVALID_INPUT, f"{column!r} must be a text, and is {kind}"))
        return Item(row.number, json_text(value))

    def _error(self, row: Row | BadRow, failure: JobFailure) -> dict[str, object]:
        told: dict[str, object] = {"row": row.number, "line": row.line}
        if self._task.id_column is not None:
            told["id"] = None if isinstance(row, BadRow) else row.columns.get(self._task.id_column)
        told["input"] = row.raw if isinstance(row, BadRow) else self._input(row)
        return told | {"error": {"type": failure.type, "message": failure.message}}

    def _input(self, row: Row) -> object:
        return row.columns if self._task.column is None else row.columns.get(self._task.column)


class Prepared:
    """A run whose files are open, of which no row has been taken; or all of whose rows an earlier process has done."""

    def __init__(self, task: Task, checkpoint: Checkpoint | None, files: _Files | None) -> None:
        self._task = task
        self._checkpoint = checkpoint
        self._files = files

    async def run(
        self, broker: AsyncBroker, tell: Callable[[Progress], None], steering: Steering | None = None
    ) -> Progress:
        """Do all of it; `tell` is called whenever rows are done. It pauses and goes on as `steering` says.

        Raises:
            BulkError: it could not be done; unless said otherwise it can be resumed.
            asyncio.CancelledError: it was told to stop; what is done is in the checkpoint. One that comes when only
                the names of the outputs are outstanding is too late.
        """
        files, steering = self._files, steering or Steering()
        if files is None:
            assert self._checkpoint is not None
            await asyncio.to_thread(_finish, self._task, self._checkpoint)
            return Progress.of(self._checkpoint)
        earlier = "" if self._checkpoint is None else self._checkpoint.owner
        owner = earlier or _new_owner()
        engine = Engine(broker, self._task.model, owner=owner, window=self._task.window, steering=steering)
        if earlier:
            await engine.clear()

        def told() -> None:
            files.progress = replace(files.progress, paused_s=steering.paused_s)
            tell(files.progress)

        await drive(engine, files, told, steering)
        await to_its_end(files.commit)
        return files.progress


@asynccontextmanager
async def prepared(task: Task) -> AsyncIterator[Prepared]:
    """See all that can be wrong before a row is run, and open the files for as long as the body takes.

    Raises:
        BulkError: it cannot be done.
    """
    checkpoint = await asyncio.to_thread(_begun, task)
    if checkpoint is not None and checkpoint.complete:
        yield Prepared(task, checkpoint, None)
        return
    files = await asyncio.to_thread(_open, task, checkpoint)
    try:
        yield Prepared(task, checkpoint, files)
    finally:
        await asyncio.to_thread(files.close)


def _begun(task: Task) -> Checkpoint | None:
    """Where to begin: an earlier process' checkpoint, or a new one; None where none can be kept."""
    if not task.resumable:
        if task.resume:
            raise NotResumable("neither standard input nor standard output can be resumed: name files")
        _check_free(task)
        return None
    new = task.checkpoint()
    found = Checkpoint.load(task.checkpoint_path)
    if found is None or (task.overwrite and not task.resume):
        if task.resume and not task.overwrite and exists(task.output):
            raise NothingToResume(task.output.url)
        _check_free(task)
        return new
    if not task.resume:
        raise OutputExists(
            task.output.url,
            f"{task.checkpoint_path} tells of an unfinished run: --resume goes on, --overwrite begins anew",
        )
    found.check(new)
    return found


def _new_owner() -> str:
    return f"bulk-{uuid.uuid4().hex[:12]}"


def _check_free(task: Task) -> None:
    for place in (task.output, task.errors):
        if place is not None and not place.is_standard:
            Destination(place, task.overwrite).check()


def _finish(task: Task, checkpoint: Checkpoint) -> None:
    """All was written, and the process ended before the files had their names."""
    if task.errors is not None and checkpoint.errors_position:
        finish_output(task.errors, Format.JSONL, position=checkpoint.errors_position)
    finish_output(
        task.output,
        task.output_format,
        position=checkpoint.output_position,
        results=(task.result,),
        vectors=task.texts,
    )
    task.checkpoint_path.unlink()


def _open(task: Task, checkpoint: Checkpoint | None) -> _Files:
    # One is enough where both go into one folder, as they do unless told otherwise.
    remote = [place for place in (task.output, task.errors) if place is not None and "://" in place.url]
    for place in {place.url.rpartition("/")[0]: place for place in remote}.values():
        check_writable(place)
    rows = read_rows(task.input, task.input_format, start=0 if checkpoint is None else checkpoint.rows_done)
    try:
        names = rows.head.names
        for name in _named(task):
            if names is not None and name not in names:
                raise NoSuchColumn(task.input.url, name, names)
        if task.result in (names or ()):
            raise ColumnTaken(task.input.url, task.result)
        files = _Files(task, rows, checkpoint)
        if checkpoint is not None and not checkpoint.rows_done:
            # From now on what lies beside the output is told to be of this run.
            files.save()
    except BaseException:
        rows.close()
        raise
    return files


def _named(task: Task) -> Iterator[str]:
    yield from (name for name in (task.column, task.id_column) if name is not None)
