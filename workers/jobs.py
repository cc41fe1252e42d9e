"""A leased job inside the worker, from its message to its settlement."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from broker import BadMessage, FollowUp, JobStatus, Lease, Settlement
from broker.keys import PRIORITY_STEPS
from broker.message import Message, salvaged_webhook
from broker.results import (
    CELERY_STATES,
    FAILURE,
    REVOKED,
    Failure,
    RunFacts,
    encode_dropped,
    encode_failure,
    encode_success,
    revocation,
)
from inference import RowError
from workers.outbox import Canvas, Outbox

LEVEL_OF_STEP = {step: level for level, step in enumerate(PRIORITY_STEPS)}


@dataclass(slots=True, eq=False)
class Job:
    """One leased job. Clock: `time.monotonic`, but for the `_at` fields, which are Unix seconds."""

    id: str
    lease: Lease
    message: Message
    inputs: list[object]
    #: True for `inputs` (a list of outcomes), False for `input` (one outcome).
    many: bool
    #: When it was put on the queue, as far as known; what `max_wait_ms` and queue wait count from.
    queued: float
    canvas: Canvas | None = None
    #: The device has taken it, or it was dropped before: neither happens to the same job.
    claimed: bool = False
    dropped: bool = False
    #: Rows of it have run, or run now; until then a worker that stops gives it back.
    begun: bool = False
    outputs: list[object | RowError] = field(default_factory=list)
    rows_left: int = 0
    #: Rows that the device has not taken yet, and those of them that the batcher has not been given yet.
    rows_waiting: int = 0
    rest: deque[Any] = field(default_factory=deque)
    #: Longest row, tokens.
    tokens: int = 0
    #: Of each row, tokens; 0 for one that cannot run.
    row_tokens: list[int] = field(default_factory=list)
    encode_s: float = 0.0
    started: float = 0.0
    started_at: float | None = None
    infer_s: float = 0.0
    postprocess_s: float = 0.0
    batch_size: int = 0
    #: When its progress may be told of again.
    tell_at: float = 0.0
    #: The times above as readers and logs see them; None for a job that did not run.
    timings: dict[str, float | int] | None = None

    @property
    def level(self) -> int:
        """Its priority as the batcher counts: 0 is served first."""
        return LEVEL_OF_STEP[self.lease.step]

    @property
    def flow(self) -> str | None:
        """Whose rows these are, where more than one row may be theirs: a flood must not hold others up."""
        return self.message.owner or (self.id if self.many else None)


def parse(lease: Lease, message: Message, task: str, queued: float) -> Job:
    """A job of its message. Raises `BadMessage` when it is not a call of `task` that can be served."""
    if message.task != task:
        raise BadMessage(f"this queue serves the task {task}, not {message.task!r}", job_id=message.id)
    inputs, many = _inputs(message)
    return Job(
        id=message.id,
        lease=lease,
        message=message,
        inputs=inputs,
        many=many,
        queued=queued,
        canvas=Canvas.of(message) if message.embed else None,
        outputs=[None] * len(inputs),
        rows_left=len(inputs),
    )


def _inputs(message: Message) -> tuple[list[object], bool]:
    args, kwargs = message.args, message.kwargs
    if len(args) == 1 and not kwargs:
        return args, False
    if not args and kwargs.keys() == {"input"}:
        return [kwargs["input"]], False
    if not args and kwargs.keys() == {"inputs"}:
        rows = kwargs["inputs"]
        if isinstance(rows, list) and rows:
            return rows, True
        raise BadMessage("`inputs` must be a list with at least one row", job_id=message.id)
    given = f"{len(args)} positional and the keywords {sorted(kwargs)}"
    raise BadMessage(
        f"{message.task} takes one argument, `input` (positional or keyword) or `inputs` (keyword): got {given}",
        job_id=message.id,
    )


@dataclass(slots=True)
class Ending:
    """How a job ended: what is stored, and what logs, metrics and events say of it."""

    job: Job
    status: JobStatus
    settlement: Settlement
    error: RowError | None = None
    #: One line that describes the output without quoting it.
    summary: str = ""

    @property
    def dropped(self) -> bool:
        """It was not run: somebody cancelled it, or its time was over."""
        return self.status in (JobStatus.CANCELLED, JobStatus.EXPIRED)


@dataclass(frozen=True, slots=True)
class Burial:
    """A message that goes to the dead letters. `kind` is the failure's type, as its caller sees it."""

    settlement: Settlement
    error: BadMessage
    kind: str
    #: None where the message was too broken to tell.
    task: str | None = None


@dataclass(frozen=True, slots=True)
class Served:
    """By which model, in which version, a queue's jobs are run; and where what follows them is put."""

    model: str
    version: str
    outbox: Outbox


def finished(job: Job, served: Served, now: float) -> Ending:
    """The ending, at Unix time `now`, of a job all of whose rows have an outcome."""
    outputs = [_checked(row) for row in job.outputs]
    if not job.many and isinstance(outputs[0], RowError):
        return failed(job, served, outputs[0], now)
    output = [_row_outcome(row) for row in outputs] if job.many else outputs[0]
    try:
        return _succeeded(job, served, output, now)
    except TypeError as error:
        if job.many:
            # Rows that can be written alone may be nested too deeply for the list of all.
            with suppress(TypeError):
                return _succeeded(job, served, [_row_outcome(_writable(row)) for row in outputs], now)
        return failed(job, served, _not_json(error), now)


def _succeeded(job: Job, served: Served, output: object, now: float) -> Ending:
    """Raises `TypeError` for an output that cannot be written as JSON."""
    result = None
    if not job.message.ignore_result:
        facts = _facts(job, served, now, job.canvas.called if job.canvas else ())
        result = encode_success(job.id, output, facts)
    settlement = _settlement(job, served, result, JobStatus.SUCCEEDED, output)
    return Ending(job, JobStatus.SUCCEEDED, settlement, summary=_summary(output))


def failed(job: Job, served: Served, error: RowError, now: float) -> Ending:
    """The ending of a job that failed as a whole."""
    failure = Failure(error.type, error.message, error.module, error.traceback)
    result = None if job.message.ignore_result else encode_failure(job.id, failure, _facts(job, served, now))
    settlement = _settlement(job, served, result, JobStatus.FAILED, failure.stored(), error.traceback)
    return Ending(job, JobStatus.FAILED, settlement, error=error)


def dropped(job: Job, served: Served, status: JobStatus, reason: str) -> Ending:
    """The ending of a job that was not run: cancelled or expired."""
    facts = _facts(job, served, time.time())
    result = None if job.message.ignore_result else encode_dropped(job.id, status, reason, facts)
    return Ending(job, status, _settlement(job, served, result, status, revocation(reason).stored()))


def _settlement(
    job: Job, served: Served, result: bytes | None, status: JobStatus, outcome: object, traceback: str | None = None
) -> Settlement:
    message = job.message
    settlement = Settlement(job.lease.tag, job.id, result, message.recorded, counted_by=message.counted_by)
    outbox, webhook = served.outbox, message.webhook
    if job.canvas is not None:
        tag, revoked = job.lease.tag, revocation("revoked").stored()
        settlement.follow_ups = (job.canvas.follow_up(outbox, tag, CELERY_STATES[status], outcome, traceback),)
        settlement.if_revoked = (job.canvas.follow_up(outbox, tag, REVOKED, revoked, None),)
    if webhook is not None:
        now = time.time()
        settlement.follow_ups += outbox.told(webhook, status, job.id, served.model, now)
        settlement.if_revoked += outbox.told(webhook, JobStatus.CANCELLED, job.id, served.model, now)
    return settlement


def buried(
    lease: Lease, error: BadMessage, served: Served, dead_letter: FollowUp, kind: str, message: Message | None
) -> Burial:
    """The end of a message that cannot be run: to the dead letters, with a stored failure where it has an id."""
    result = None
    follow_ups = [dead_letter]
    if error.job_id is not None:
        now = time.time()
        failure = Failure(kind, error.reason)
        facts = RunFacts(served.model, served.version, lease.step, lease.attempt, False, None, None, now, None)
        result = encode_failure(error.job_id, failure, facts)
        canvas = _canvas_if_any(message)
        if canvas is not None:
            follow_ups.append(canvas.follow_up(served.outbox, lease.tag, FAILURE, failure.stored(), None))
        webhook = message.webhook if message is not None else salvaged_webhook(lease.message)
        follow_ups += served.outbox.told(webhook, JobStatus.FAILED, error.job_id, served.model, now)
    counted_by = message.counted_by if message is not None else ""
    settlement = Settlement(
        lease.tag, error.job_id or "", result, recorded=False, follow_ups=tuple(follow_ups), counted_by=counted_by
    )
    return Burial(settlement, error, kind, None if message is None else str(message.task))


def _canvas_if_any(message: Message | None) -> Canvas | None:
    """What hangs on a message that is buried; a burial must not fail, so none where that is what cannot be read."""
    try:
        return Canvas.of(message) if message is not None else None
    except BadMessage:
        return None


def _facts(job: Job, served: Served, now: float, children: Sequence[str] = ()) -> RunFacts:
    if job.started_at is not None:
        job.timings = {
            "queue_ms": round((job.started - job.queued) * 1e3, 3),
            "preprocess_ms": round(job.encode_s * 1e3, 3),
            "inference_ms": round(job.infer_s * 1e3, 3),
            "postprocess_ms": round(job.postprocess_s * 1e3, 3),
            "batch_size": job.batch_size,
        }
    return RunFacts(
        model=served.model,
        version=served.version,
        priority=job.lease.step,
        attempt=job.lease.attempt,
        many=job.many,
        enqueued_at=job.message.enqueued_at,
        started_at=job.started_at,
        finished_at=now,
        timings=job.timings,
        input_tokens=sum(job.row_tokens) if job.started_at is not None else None,
        row_tokens=job.row_tokens if job.many and job.started_at is not None else None,
        children=children,
    )


def _checked(output: object | RowError) -> object | RowError:
    """The output as it can be written; an error for numbers that JSON has no way to write."""
    if isinstance(output, np.ndarray):
        if output.dtype.kind == "f" and not np.isfinite(output).all():
            return RowError("NotFinite", "the output holds NaN or infinity: the model overflowed, or its input does")
        return np.ascontiguousarray(output)
    if isinstance(output, float) and not math.isfinite(output):
        return RowError("NotFinite", f"the output is {output}, which JSON cannot hold")
    return output


def _writable(output: object | RowError) -> object | RowError:
    """The output, or an error when it cannot be written as JSON."""
    if not isinstance(output, RowError):
        try:
            orjson.dumps(output, option=orjson.OPT_SERIALIZE_NUMPY)
        except TypeError as error:
            return _not_json(error)
    return output


def _not_json(error: TypeError) -> RowError:
    return RowError("TypeError", f"the output cannot be written as JSON: {error}")


def _row_outcome(row: object | RowError) -> dict[str, object]:
    if isinstance(row, RowError):
        return {"error": {"type": row.type, "message": row.message}}
    return {"output": row}


def _summary(output: object) -> str:
    if isinstance(output, np.ndarray):
        return f"{output.dtype}{list(output.shape)}"
    if isinstance(output, (list, dict, str)):
        return f"{type(output).__name__}[{len(output)}]"
    return type(output).__name__
