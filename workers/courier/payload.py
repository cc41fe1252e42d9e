"""What is sent: thin, as Standard Webhooks asks for; a job's or batch's own fields, by the names that readers know."""

from __future__ import annotations

from datetime import UTC, datetime

import orjson

from broker import BatchEvent, BatchRecord, JobState
from broker.webhooks import Notification

#: Bytes that a payload stays below.
MAX_BYTES = 20_000
#: Characters of an error's message; the whole of it is with the job.
MAX_ERROR = 2000


def payload(told: Notification, subject: JobState | BatchRecord | None, public_url: str) -> str:
    """The body of a call, JSON. `subject` is the job or batch; None where it is not kept any more."""
    if isinstance(told.event, BatchEvent):
        assert not isinstance(subject, JobState)
        return _written(told, _of_batch(told, subject, public_url)).decode()
    assert not isinstance(subject, BatchRecord)
    return _of_job(told, subject, public_url)


def _of_job(told: Notification, job: JobState | None, public_url: str) -> str:
    """The output, then the metadata, are left out where they are too large, and the output of a job that is not kept
    any more; `output_omitted` and `metadata_omitted` say so.
    """
    data = _data(told, job, public_url)
    if job is None or told.event != f"job.{job.status}":
        # Its result is not kept any more, or is another life's of a dead letter that people have revived.
        return _written(told, data | {"output_omitted": True}).decode()
    with_metadata = data | {"metadata": orjson.Fragment(job.metadata)}
    if len(_written(told, with_metadata)) < MAX_BYTES:
        data = with_metadata
    else:
        data["metadata_omitted"] = True
    if job.result is not None:
        output = {"outputs" if job.many else "output": orjson.Fragment(job.result)}
        fits = len(job.result) < MAX_BYTES and len(_written(told, data | output)) < MAX_BYTES
        data |= output if fits else {"output_omitted": True}
    return _written(told, data).decode()


def _of_batch(told: Notification, batch: BatchRecord | None, public_url: str) -> dict[str, object]:
    path = f"{public_url}/v1/batches/{told.job_id}"
    data: dict[str, object] = {
        "id": told.job_id,
        "object": "batch",
        "model": told.model or None,
        "status": told.event.removeprefix("batch."),
        "urls": {"self": path, "deliveries": f"{path}/deliveries"},
    }
    if batch is not None:
        data |= {
            "endpoint": batch.endpoint,
            "input_file_id": batch.input_file_id,
            "output_file_id": batch.output_file_id,
            "error_file_id": batch.error_file_id,
            "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
            "created_at": _timestamp(batch.created_at),
            "finished_at": _timestamp(told.at),
            "error": batch.errors[0].message[:MAX_ERROR] if batch.errors else None,
            "metadata": batch.metadata,
        }
    return data


def _data(told: Notification, job: JobState | None, public_url: str) -> dict[str, object]:
    path = f"{public_url}/v1/jobs/{told.job_id}"
    data: dict[str, object] = {
        "id": told.job_id,
        "object": "job",
        "model": told.model,
        "status": told.event.removeprefix("job."),
        "created_at": None,
        "finished_at": _timestamp(told.at),
        "error": None,
        "urls": {"self": path, "deliveries": f"{path}/deliveries"},
    }
    if job is not None:
        data |= {"version": job.version, "created_at": _timestamp(job.created_at), "attempt": job.attempt}
        data |= {"started_at": _timestamp(job.started_at), "finished_at": _timestamp(job.finished_at or told.at)}
        if job.error is not None:
            data["error"] = {"type": job.error.type, "message": job.error.message[:MAX_ERROR]}
    return data


def _written(told: Notification, data: dict[str, object]) -> bytes:
    return orjson.dumps({"type": told.event.value, "timestamp": _timestamp(told.at), "data": data})


def _timestamp(moment: float | None) -> str | None:
    """RFC 3339 in UTC with milliseconds, as the API writes it."""
    if moment is None:
        return None
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
