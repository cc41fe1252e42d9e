"""A job as JSON bytes. Results travel from the broker to the caller without being parsed."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache

import orjson

from api.schemas import PRIORITY_NAMES
from broker import JobState, NewJob


def job(state: JobState) -> bytes:
    """The whole job, as `schemas.Job` describes it."""
    result = None if state.result is None else orjson.Fragment(state.result)
    error = None if state.error is None else {"type": state.error.type, "message": state.error.message}
    return orjson.dumps(
        {
            "id": state.id,
            "object": "job",
            "model": state.model,
            "version": state.version,
            "status": state.status.value,
            "priority": PRIORITY_NAMES[state.priority],
            "created_at": timestamp(state.created_at),
            "started_at": timestamp(state.started_at),
            "finished_at": timestamp(state.finished_at),
            "attempt": state.attempt,
            "queue_position": None,
            "output": None if state.many else result,
            "outputs": result if state.many else None,
            "error": error,
            "metadata": orjson.Fragment(state.metadata),
            "urls": _urls(state.id),
            "timings": None if state.timings is None else orjson.Fragment(state.timings),
        }
    )


def accepted(job_id: str, submitted: NewJob) -> bytes:
    """What a submit answers, as `schemas.Accepted` describes it."""
    return orjson.dumps(
        {
            "id": job_id,
            "object": "job",
            "status": "queued",
            "model": submitted.model,
            "created_at": timestamp(submitted.created_at),
            "urls": _urls(job_id),
        }
    )


def url(job_id: str) -> str:
    return f"/v1/jobs/{job_id}"


def _urls(job_id: str) -> dict[str, str]:
    own = url(job_id)
    return {"self": own, "cancel": f"{own}/cancel"}


def timestamp(moment: float | None) -> str | None:
    """RFC 3339 in UTC with milliseconds."""
    if moment is None:
        return None
    milliseconds = int(moment * 1000)
    return f"{_second(milliseconds // 1000)}.{milliseconds % 1000:03d}Z"


@lru_cache(maxsize=64)
def _second(moment: int) -> str:
    """Thousands of jobs are submitted in the same second."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%S")
