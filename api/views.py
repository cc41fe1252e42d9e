"""A job as JSON bytes. Results travel from the broker to the caller without being parsed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache

import orjson
from starlette.responses import Response

from api.schemas import PRIORITY_NAMES
from broker import JobState, JobStatus, Submitted


def job(state: JobState, position: int | None = None) -> bytes:
    """The whole job, as `schemas.Job` describes it."""
    return orjson.dumps(_whole(state, position))


def _whole(state: JobState, position: int | None) -> dict[str, object]:
    result = None if state.result is None else orjson.Fragment(state.result)
    return {
        **_head(state),
        "queue_position": position,
        "progress": progress(state),
        "output": None if state.many else result,
        "outputs": result if state.many else None,
        **_tail(state),
    }


def _head(state: JobState) -> dict[str, object]:
    return {
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
    }


def _tail(state: JobState) -> dict[str, object]:
    return {
        "error": None if state.error is None else {"type": state.error.type, "message": state.error.message},
        "metadata": orjson.Fragment(state.metadata),
        "urls": _urls(state.id),
        "timings": None if state.timings is None else orjson.Fragment(state.timings),
        "usage": None if state.input_tokens is None else {"input_tokens": state.input_tokens},
    }


def progress(state: JobState) -> dict[str, int] | None:
    """Rows of a job of many that runs."""
    return None if state.progress is None else {"done": state.progress[0], "total": state.progress[1]}


def listed(states: Sequence[JobState], next_cursor: str | None) -> bytes:
    """A page of jobs without their answers, as `schemas.JobList` describes it."""
    data = [_head(state) | _tail(state) for state in states]
    return orjson.dumps({"object": "list", "data": data, "next_cursor": next_cursor})


def page(found: Sequence[Mapping[str, object]], limit: int) -> dict[str, object]:
    """A page of a list as OpenAI has them, of at most `limit`; `found` is one more where there are more."""
    data = found[:limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(found) > limit,
    }


def accepted(submitted: Submitted, model: str, status: JobStatus) -> bytes:
    """What a submit answers, as `schemas.Accepted` describes it."""
    return orjson.dumps(
        {
            "id": submitted.id,
            "object": "job",
            "status": status.value,
            "model": model,
            "created_at": timestamp(submitted.created_at),
            "urls": _urls(submitted.id),
        }
    )


def response(
    body: bytes, status: int, headers: Mapping[str, str] | None = None, ended: JobState | None = None
) -> Response:
    """A JSON answer; of a job that has ended, `Server-Timing` tells what took its time."""
    told = dict(headers or {})
    if ended is not None and ended.timings is not None:
        told["server-timing"] = server_timing(ended.timings)
    return Response(body, status_code=status, headers=told, media_type="application/json")


def server_timing(timings: bytes) -> str:
    """Milliseconds of a job's steps. Source: W3C Server Timing."""
    steps = {name.removesuffix("_ms"): took for name, took in orjson.loads(timings).items() if name.endswith("_ms")}
    return ", ".join(f"{name};dur={took:g}" for name, took in steps.items())


def url(job_id: str) -> str:
    return f"/v1/jobs/{job_id}"


def _urls(job_id: str) -> dict[str, str]:
    own = url(job_id)
    return {"self": own, "cancel": f"{own}/cancel", "events": f"{own}/events"}


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
