"""The three files of a batch: requests in, answers and errors out, and a checkpoint.

A line's answer is written once all of its rows have an outcome; so what the checkpoint counts are whole lines.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from broker import BatchRecord, JobFailure
from bulk.batches.endpoints import Answer, Call, Models, call_of
from bulk.checkpoint import Checkpoint
from bulk.chunks import Item, Outcome
from bulk.fingerprint import Fingerprint
from bulk.formats import Format
from bulk.locations import Location
from bulk.output import Writer
from bulk.reading import read_rows
from bulk.rows import BadRow, OutRow, Row
from bulk.writing import finish_output, open_writer
from schemas.rows import INVALID_INPUT

_NAMESPACE = uuid.UUID("0c6f7a7e-5d3a-5f0e-9c3b-6b1f0f2f4a51")


@dataclass(frozen=True, slots=True)
class Places:
    """Where a batch's files lie. `folder` is the work's, of this machine."""

    requests: Location
    answers: Location
    errors: Location
    folder: Path

    def checkpoint(self, batch_id: str) -> Path:
        return self.folder / f"{batch_id}.checkpoint"


@dataclass(slots=True)
class _Line:
    row: Row
    call: Call | Answer
    #: Rows of it that have no outcome yet.
    open: int
    outcomes: list[Outcome] = field(default_factory=list)


class BatchFiles:
    """Used from one thread at a time."""

    def __init__(self, batch: BatchRecord, places: Places, models: Models) -> None:
        """Open them, where an earlier holder of the batch stopped if there was one.

        Raises:
            InputFailed, OutputFailed: as when they are used.
            NotResumable: what the earlier one left cannot be gone on with; `discard` it.
        """
        self._batch = batch
        self._places = places
        self._models = models
        self._path = places.checkpoint(batch.id)
        self._checkpoint = _begun(batch, places)
        done = self._checkpoint.rows_done
        self._rows = read_rows(places.requests, Format.JSONL, start=done)
        self._iterator = iter(self._rows)
        self._answers: Writer | None = None
        self._errors: Writer | None = None
        try:
            self._answers = self._reopened(places.answers, self._checkpoint.output_position)
            self._errors = self._reopened(places.errors, self._checkpoint.errors_position)
        except BaseException:
            self.close()
            raise
        #: Lines that were read and not written, in order.
        self._pending: deque[_Line] = deque()
        self._items = 0
        self._lines_done = done
        counts = self._checkpoint.counts
        #: Lines that were never run, because time or patience had run out.
        self.cut = counts.get("cut", 0)
        self.completed = counts.get("completed", 0)
        #: With those that were never run.
        self.failed = counts.get("failed", 0) + self.cut

    @property
    def complete(self) -> bool:
        """All lines were written by an earlier holder."""
        return self._checkpoint.complete

    def take(self, most: int) -> list[Item]:
        items: list[Item] = []
        while len(items) < most and (row := next(self._iterator, None)) is not None:
            items += self._items_of(row)
        return items

    def write(self, outcomes: Sequence[Outcome]) -> None:
        good: list[OutRow] = []
        bad: list[OutRow] = []
        for outcome in outcomes:
            line = self._pending[0]
            line.outcomes.append(outcome)
            line.open -= 1
            if line.open:
                continue
            self._pending.popleft()
            answer = line.call if isinstance(line.call, Answer) else line.call.answer(line.outcomes)
            (good if answer.succeeded else bad).append(self._told(line.row, answer))
            self._lines_done = line.row.number + 1
        self._put(good, bad)

    def cut_short(self, code: str, message: str) -> None:
        """Write each line that has no answer yet as an error; with them all lines are done."""
        self._rows.close()
        self._pending.clear()
        fault = {"code": code, "message": message}
        with read_rows(self._places.requests, Format.JSONL, start=self._lines_done) as rows:
            for row in rows:
                assert isinstance(row, Row)
                self._put([], [self._told(row, None, fault)])
                self._lines_done = row.number + 1
                self.cut += 1

    def save(self, *, complete: bool = False) -> None:
        self._checkpoint = replace(
            self._checkpoint,
            rows_done=self._lines_done,
            output_position=0 if self._answers is None else self._answers.flush(),
            errors_position=0 if self._errors is None else self._errors.flush(),
            counts={"completed": self.completed, "failed": self.failed - self.cut, "cut": self.cut},
            complete=complete,
        )
        self._checkpoint.save(self._path)

    def commit(self) -> None:
        """Give the outputs their names; may be done again. An output without lines is none."""
        if not self.complete:
            self.save(complete=True)
            for writer in (self._answers, self._errors):
                if writer is not None:
                    writer.commit()
            return
        for place, position in (
            (self._places.answers, self._checkpoint.output_position),
            (self._places.errors, self._checkpoint.errors_position),
        ):
            if position:
                finish_output(place, Format.JSONL, position=position, folder=self._places.folder)

    def close(self) -> None:
        self._rows.close()
        for writer in (self._answers, self._errors):
            if writer is not None:
                writer.close()

    def _items_of(self, row: Row | BadRow) -> list[Item]:
        # All lines were looked at before, and the file is not written to after it was stored.
        assert isinstance(row, Row)
        call = call_of(self._batch.endpoint, row.columns["body"], self._models)
        if isinstance(call, Answer):
            # It keeps its place among the others, and goes nowhere.
            items = [Item(self._items, failure=JobFailure(INVALID_INPUT, ""))]
        else:
            items = [Item(self._items + index, payload) for index, payload in enumerate(call.rows())]
        self._items += len(items)
        self._pending.append(_Line(row, call, len(items)))
        return items

    def _told(self, row: Row, answer: Answer | None, fault: dict[str, str] | None = None) -> OutRow:
        response: dict[str, object] | None = None
        if answer is not None:
            request_id = f"{self._batch.id}-{row.line}"
            response = {"status_code": answer.status, "request_id": request_id, "body": answer.body}
        name = uuid.uuid5(_NAMESPACE, f"{self._batch.id}/{row.line}").hex
        columns = {"id": f"batch_req_{name}", "custom_id": row.columns["custom_id"], "response": response}
        return OutRow(Row(row.number, row.line, columns | {"error": fault}), {})

    def _put(self, good: Sequence[OutRow], bad: Sequence[OutRow]) -> None:
        if good:
            if self._answers is None:
                self._answers = self._opened(self._places.answers, None)
            self._answers.write(good)
        if bad:
            if self._errors is None:
                self._errors = self._opened(self._places.errors, None)
            self._errors.write(bad)
        self.completed += len(good)
        self.failed += len(bad)

    def _reopened(self, place: Location, position: int) -> Writer | None:
        return self._opened(place, position) if position and not self.complete else None

    def _opened(self, place: Location, resume_at: int | None) -> Writer:
        return open_writer(place, Format.JSONL, resume_at=resume_at, overwrite=True, folder=self._places.folder)


def discard(batch_id: str, places: Places) -> None:
    """Forget what was done of a batch on this machine."""
    places.checkpoint(batch_id).unlink(missing_ok=True)
    for place in (places.answers, places.errors):
        place.beside(".partial", places.folder).unlink(missing_ok=True)


def _begun(batch: BatchRecord, places: Places) -> Checkpoint:
    """Where to begin. Raises `NotResumable`."""
    new = Checkpoint(
        input=places.requests.url,
        fingerprint=Fingerprint.of(places.requests),
        input_format=Format.JSONL,
        output=places.answers.url,
        output_format=Format.JSONL,
        errors=places.errors.url,
        options={"endpoint": batch.endpoint},
    )
    found = Checkpoint.load(places.checkpoint(batch.id))
    if found is None:
        return new
    found.check(new)
    return found
