"""Results as Celery's Redis backend keeps them, with one more field, `sheaf`, that Celery clients do not look at.

Source: `celery.backends.base` (`_get_result_meta`, `prepare_exception`), which reads status, result, traceback and
children.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache

import orjson

from broker.jobs import JobFailure, JobState, JobStatus, NewJob, Priority, Webhook

#: Celery's states of a task that has ended.
SUCCESS, FAILURE, REVOKED = "SUCCESS", "FAILURE", "REVOKED"
#: What a job's end is to Celery.
CELERY_STATES = {
    JobStatus.SUCCEEDED: SUCCESS,
    JobStatus.FAILED: FAILURE,
    JobStatus.CANCELLED: REVOKED,
    JobStatus.EXPIRED: REVOKED,
}
_STATUSES = {SUCCESS: JobStatus.SUCCEEDED, FAILURE: JobStatus.FAILED, REVOKED: JobStatus.CANCELLED}
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception as Celery stores it. `module` lets a caller that has the class re-raise that very class."""

    type: str
    message: str
    module: str = "builtins"
    traceback: str | None = None

    def stored(self) -> dict[str, object]:
        """The exception in Celery's JSON form."""
        return {"exc_type": self.type, "exc_message": [self.message], "exc_module": self.module}


def revocation(reason: str) -> Failure:
    """What the caller of a job that was dropped gets."""
    return Failure("TaskRevokedError", reason, "celery.exceptions")


@dataclass(slots=True)
class RunFacts:
    """What a run adds to a result: where, when, how long. Times are Unix seconds."""

    model: str
    #: None for a job that no worker has looked at.
    version: str | None
    priority: int
    attempt: int
    many: bool
    enqueued_at: float | None
    started_at: float | None
    finished_at: float
    timings: Mapping[str, float | int] | None
    #: Of all rows together, as the model counts; None for a job that did not run.
    input_tokens: int | None = None
    #: Of each row of a job of many.
    row_tokens: Sequence[int] | None = None
    #: Ids of the tasks that were called because of this one.
    children: Sequence[str] = ()


def encode_success(job_id: str, output: object, facts: RunFacts) -> bytes:
    """The stored form of a success. `output` may hold numpy arrays. Raises `TypeError` when it is not JSON-able."""
    return orjson.dumps(_meta(job_id, JobStatus.SUCCEEDED, output, None, facts), option=_OPTIONS)


def encode_failure(job_id: str, failure: Failure, facts: RunFacts) -> bytes:
    """The stored form of a failure."""
    return orjson.dumps(_meta(job_id, JobStatus.FAILED, failure.stored(), failure.traceback, facts))


def encode_dropped(job_id: str, status: JobStatus, reason: str, facts: RunFacts) -> bytes:
    """The stored form of a job that never ran: cancelled or expired."""
    return orjson.dumps(_meta(job_id, status, revocation(reason).stored(), None, facts))


def _meta(job_id: str, status: JobStatus, result: object, traceback: str | None, facts: RunFacts) -> dict[str, object]:
    return {
        "status": CELERY_STATES[status],
        "result": result,
        "traceback": traceback,
        # A result as a tuple: its id and parent, and its own children.
        "children": [[[child, None], None] for child in facts.children],
        "date_done": _iso(facts.finished_at),
        "task_id": job_id,
        "sheaf": {
            "status": status.value,
            "model": facts.model,
            "version": facts.version,
            "priority": facts.priority,
            "attempt": facts.attempt,
            "many": facts.many,
            "enqueued_at": facts.enqueued_at,
            "started_at": facts.started_at,
            "finished_at": facts.finished_at,
            "timings": facts.timings,
            "input_tokens": facts.input_tokens,
            **({} if facts.row_tokens is None else {"row_tokens": facts.row_tokens}),
        },
    }


@lru_cache(maxsize=8)
def _iso(moment: float) -> str:
    """Jobs of a batch end at the same moment."""
    return datetime.fromtimestamp(moment, UTC).isoformat()


def encode_record(job: NewJob) -> bytes:
    """What `submit` keeps of a job for its readers."""
    return orjson.dumps(
        {
            "model": job.model,
            "priority": int(job.priority),
            "created_at": job.created_at,
            "expires_at": job.expires_at,
            "many": job.many,
            "metadata": orjson.Fragment(job.metadata),
            "owner": job.owner,
            "counted_by": job.counted_by,
            "fingerprint": job.fingerprint if job.chosen_id else "",
            **({} if job.webhook is None else {"webhook": job.webhook}),
        }
    )


def job_state(job_id: str, record: bytes | None, started: bytes | None, meta: bytes | None) -> JobState | None:
    """Put a job's state together from what the server keeps of it; None when it keeps nothing."""
    ending = _ending(meta)
    if ending is not None:
        return _ended_state(job_id, record, ending)
    if record is None:
        return None
    known = orjson.loads(record)
    attempt, moment, *rows = (started or b"0:").split(b":")
    return JobState(
        id=job_id,
        model=known["model"],
        version=None,
        status=JobStatus.QUEUED if started is None else JobStatus.RUNNING,
        priority=Priority(known["priority"]),
        created_at=known["created_at"],
        expires_at=known["expires_at"],
        started_at=float(moment) if moment else None,
        finished_at=None,
        attempt=int(attempt),
        many=known["many"],
        result=None,
        error=None,
        metadata=_trimmed(orjson.dumps(known["metadata"])),
        timings=None,
        progress=(int(rows[0]), int(rows[1])) if rows else None,
        owner=known.get("owner", ""),
        ticket=known.get("ticket") if started is None else None,
        counted_by=known.get("counted_by", ""),
        webhook=Webhook.of_json(known.get("webhook")),
    )


def _trimmed(text: bytes) -> bytes:
    """A copy of what orjson wrote, which keeps its buffer of 4 kB or more: thousands may wait, with a state each."""
    return bytes(memoryview(text))


def _ending(meta: bytes | None) -> dict[str, object] | None:
    """The stored result as a mapping; None when there is none, or when it is another application's and no ending."""
    if meta is None:
        return None
    try:
        found = orjson.loads(meta)
    except orjson.JSONDecodeError:
        return None
    ended = isinstance(found, dict) and found.get("status") in _STATUSES and "result" in found
    return found if ended else None


def _ended_state(job_id: str, record: bytes | None, meta: dict[str, object]) -> JobState:
    known = orjson.loads(record) if record is not None else {}
    own = meta.get("sheaf")
    facts: dict[str, object] = own if isinstance(own, dict) else {}
    status = JobStatus(str(facts["status"])) if "status" in facts else _STATUSES[str(meta["status"])]
    timings = facts.get("timings")
    created_at = known.get("created_at", facts.get("enqueued_at"))
    return JobState(
        id=job_id,
        model=str(known.get("model", facts.get("model", ""))),
        version=_text(facts.get("version")),
        status=status,
        priority=Priority.of_list(int(known.get("priority", facts.get("priority", Priority.NORMAL)))),
        created_at=created_at,
        expires_at=None,
        started_at=_number(facts.get("started_at")),
        finished_at=_number(facts.get("finished_at")),
        attempt=int(_number(facts.get("attempt")) or 0),
        many=bool(known.get("many", facts.get("many", False))),
        result=orjson.dumps(meta["result"]) if status is JobStatus.SUCCEEDED else None,
        error=None if status is JobStatus.SUCCEEDED else _failure(status, meta["result"]),
        metadata=orjson.dumps(known.get("metadata", {})),
        timings=None if timings is None else orjson.dumps(timings),
        input_tokens=_whole(facts.get("input_tokens")),
        row_tokens=_wholes(facts.get("row_tokens")),
        owner=None if record is None else known.get("owner", ""),
        counted_by=known.get("counted_by", ""),
        webhook=Webhook.of_json(known.get("webhook")),
    )


def _failure(status: JobStatus, result: object) -> JobFailure:
    stored: dict[str, object] = result if isinstance(result, dict) else {}
    message = stored.get("exc_message")
    text = " ".join(str(part) for part in message) if isinstance(message, list) else str(message)
    return JobFailure(str(stored.get("exc_type", status.value)) if status is JobStatus.FAILED else status.value, text)


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _wholes(value: object) -> tuple[int, ...] | None:
    return tuple(value) if isinstance(value, list) else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
