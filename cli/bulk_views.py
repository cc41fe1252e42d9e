"""What `sheaf bulk list` and `show` tell of a run of a file, and of a batch of `/v1/batches`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from broker import BatchRecord, BulkRun, RunState
from cli.moments import moment


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One of either kind."""

    id: str
    #: `file` or `batch`.
    kind: str
    state: str
    #: Whether nothing more comes of it by itself.
    ended: bool
    #: "" while it is not known.
    model: str
    #: Of a batch; "" where it is nobody's in particular.
    owner: str
    #: URLs of a run of a file, ids of files of a batch.
    input: str
    output: str
    #: Unix seconds.
    created_at: float
    #: Rows, or lines of a batch.
    succeeded: int
    failed: int
    rows_per_second: float
    #: How much of the input is done, 0 to 1; None where its size is unknown.
    ratio: float | None
    #: Why it ended before all was done.
    error: str | None
    #: What people may do with one that has ended before that; None where there is nothing.
    cure: str | None
    #: What only one kind has.
    more: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of_run(cls, run: BulkRun) -> Self:
        return cls(
            id=run.id,
            kind="file",
            state=run.state,
            ended=run.ended,
            model=run.model,
            owner="",
            input=run.input,
            output=run.output,
            created_at=run.created_at,
            succeeded=run.succeeded,
            failed=run.failed,
            rows_per_second=run.rows_per_second,
            ratio=run.ratio,
            error=run.error,
            cure=_cure(run),
            more={"host": run.host, "pid": run.pid, "updated_at": moment(run.updated_at)},
        )

    @classmethod
    def of_batch(cls, batch: BatchRecord) -> Self:
        done = batch.completed + batch.failed
        return cls(
            id=batch.id,
            kind="batch",
            state="paused" if batch.rests else batch.shown,
            ended=batch.ended,
            model=batch.model or "",
            owner=batch.owner,
            input=batch.input_file_id,
            output=batch.output_file_id or "",
            created_at=batch.created_at,
            succeeded=batch.completed,
            failed=batch.failed,
            rows_per_second=_rate(batch, done),
            ratio=done / batch.total if batch.total else None,
            error=batch.errors[0].message if batch.errors else None,
            cure=None,
            more={
                "endpoint": batch.endpoint,
                "total": batch.total,
                "error_file_id": batch.error_file_id,
                "expires_at": moment(batch.expires_at),
            },
        )

    def as_json(self) -> dict[str, object]:
        return {
            "id": self.id,
            "kind": self.kind,
            "state": self.state,
            "model": self.model,
            "owner": self.owner,
            "input": self.input,
            "output": self.output,
            "created_at": moment(self.created_at),
            "succeeded": self.succeeded,
            "failed": self.failed,
            "rows": self.succeeded + self.failed,
            "rows_per_second": round(self.rows_per_second, 1),
            "ratio": None if self.ratio is None else round(self.ratio, 4),
            "error": self.error,
            **self.more,
        }


def _cure(run: BulkRun) -> str | None:
    unfinished = run.state in (RunState.STOPPED, RunState.CANCELLED, RunState.FAILED)
    return "the same command with --resume goes on" if unfinished and "-" not in (run.input, run.output) else None


def _rate(batch: BatchRecord, done: int) -> float:
    """Lines a second since it was begun, by the clocks of whoever ran it; 0 while it is paused."""
    if batch.in_progress_at is None or batch.rests:
        return 0.0
    ends = (batch.completed_at, batch.failed_at, batch.expired_at, batch.cancelled_at)
    until = next((end for end in ends if end is not None), time.time())
    return done / max(until - batch.in_progress_at, 0.001)
