"""Submit a job and read it."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
import uuid
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query
from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from api import problems, state, views
from api.body import body_of
from api.problems import PROBLEM, Problem
from api.schemas import PRIORITIES, Accepted, Job, JobRequest
from broker import BrokerUnavailable, JobState, NewJob, queue_name

#: Seconds after which a model that could not be loaded may be worth another try.
RETRY_FAILED_MODEL_S = 60

router = APIRouter(tags=["jobs"])

#: Until there are callers with names, all idempotency keys belong to one.
_OWNER = "all"
#: RFC 7240, with the one preference that is honoured here.
_WAIT = re.compile(r'(?:^|[,;])\s*wait\s*=\s*"?(\d+(?:\.\d+)?)"?\s*(?=$|[,;])', re.IGNORECASE)
_BEARER = re.compile(r"bearer\s+(\S+)\s*", re.IGNORECASE)
_IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_REQUESTS = TypeAdapter(JobRequest)

_HEADERS = [
    {
        "name": "Prefer",
        "in": "header",
        "schema": {"type": "string", "examples": ["wait=10"]},
        "description": "`wait=N`: answer 200 with the result if it is there within N seconds, else 202.",
    },
    {
        "name": "Idempotency-Key",
        "in": "header",
        "schema": {"type": "string", "maxLength": 255},
        "description": "A repeated submit with the same key and payload within a day returns the first one's job.",
    },
    {
        "name": "X-Request-ID",
        "in": "header",
        "schema": {"type": "string", "maxLength": 128},
        "description": "Found again in the answer, in log lines and in problems; made here when it is missing.",
    },
]


@router.post(
    "/v1/jobs",
    summary="Submit a job",
    response_class=Response,
    status_code=202,
    responses={
        202: {"model": Accepted, "description": "The broker holds the job. `Location` is where to read it."},
        200: {"model": Job, "description": "With `Prefer: wait=N`: the job has ended in time."},
        400: {"description": "The body is not JSON.", **PROBLEM},
        404: {"description": "There is no such model.", **PROBLEM},
        413: {"description": "The body is over `api.max_payload_bytes`.", **PROBLEM},
        415: {"description": "The content type is not JSON.", **PROBLEM},
        422: {"description": "A field is wrong, or the idempotency key belongs to another payload.", **PROBLEM},
        503: {
            "description": "The queue is full, the model did not load, or the broker is away; see `Retry-After`.",
            **PROBLEM,
        },
    },
    openapi_extra={
        "parameters": _HEADERS,
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": JobRequest.model_json_schema()}},
        },
    },
)
async def submit(request: Request) -> Response:
    """Put a job on its model's queue. Answered only after the broker has accepted it."""
    shared = state.of(request)
    body = await body_of(request, shared.settings.api.max_payload_bytes)
    job = _new_job(request, body, shared)
    infos = (await shared.announced()).get(job.model, [])
    if state.model_state(infos) == "failed":
        raise Problem(
            problems.MODEL_FAILED,
            f"no worker could load {job.model}: {infos[0].error}",
            headers={"retry-after": str(RETRY_FAILED_MODEL_S)},
        )
    wait_s = _preferred_wait(request, shared.settings.api.max_wait_s)
    if wait_s is None:
        job_id = await shared.broker.submit(job)
        return _accepted(request, job_id, job)
    with shared.broker.waiter(job.id) as waiter:
        job_id = await shared.broker.submit(job)
        fresh = (waiter, job.expires_at) if job_id == job.id else ()
        waiting = shared.broker.wait(job_id, wait_s, *fresh)
        try:
            ended = await _while_connected(request, shared, waiting)
        except BrokerUnavailable:
            # The broker went away after it had accepted the job.
            ended = None
    if ended is None or not ended.ended:
        return _accepted(request, job_id, job, wait_s)
    request.state.job_id = job_id
    return _json(views.job(ended), 200, wait_s)


@router.get(
    "/v1/jobs/{job_id}",
    summary="Read a job",
    response_class=Response,
    responses={
        200: {"model": Job},
        404: {"description": "The id is unknown, or its result has passed its time to live.", **PROBLEM},
        503: {"description": "The broker is away.", **PROBLEM},
    },
)
async def read(
    request: Request,
    job_id: str,
    wait: Annotated[float, Query(ge=0, description="Seconds to wait for the job to end.", allow_inf_nan=False)] = 0.0,
) -> Response:
    """The job as it is now; with `wait`, as soon as it has ended, or as it is after so many seconds."""
    shared = state.of(request)
    request.state.job_id = job_id
    if wait:
        waiting = shared.broker.wait(job_id, min(wait, shared.settings.api.max_wait_s))
        found = await _while_connected(request, shared, waiting) or await shared.broker.fetch(job_id)
    else:
        found = await shared.broker.fetch(job_id)
    if found is None:
        raise _unknown(job_id)
    return _json(views.job(found), 200)


@router.post(
    "/v1/jobs/{job_id}/cancel",
    summary="Cancel a job",
    response_class=Response,
    responses={
        200: {"model": Job},
        404: {"description": "The id is unknown.", **PROBLEM},
        409: {"description": "The job has ended; nothing was changed.", **PROBLEM},
        503: {"description": "The broker is away.", **PROBLEM},
    },
)
async def cancel(request: Request, job_id: str) -> Response:
    """End a job that has not ended. One that has not begun never runs; of one that runs, the result is not kept."""
    request.state.job_id = job_id
    cancelled = await state.of(request).broker.cancel(job_id)
    if cancelled is None:
        raise _unknown(job_id)
    return _json(views.job(cancelled), 200)


def _unknown(job_id: str) -> Problem:
    return Problem(
        problems.UNKNOWN_JOB,
        f"no job {job_id!r}: its id is wrong, its result is no longer kept, or it is a Celery client's and has not "
        "ended (that one is cancelled with revoke)",
    )


def _new_job(request: Request, body: bytes, shared: state.ApiState) -> NewJob:
    try:
        parsed = _REQUESTS.validate_python(orjson.loads(body))
    except orjson.JSONDecodeError as error:
        raise Problem(problems.NOT_JSON, f"the body is not JSON: {error}") from None
    except ValidationError as error:
        raise problems.invalid(error.errors(include_url=False, include_input=False)) from None
    shared.model(parsed.model)
    many = parsed.inputs is not None
    now = time.time()
    key = request.headers.get("idempotency-key")
    if key is not None and not _IDEMPOTENCY_KEY.fullmatch(key):
        raise Problem(problems.INVALID_REQUEST, "Idempotency-Key must be 1 to 255 visible ASCII characters")
    return NewJob(
        id=str(uuid.uuid4()),
        model=parsed.model,
        queue=queue_name(parsed.model),
        payload=_written({"inputs": parsed.inputs} if many else {"input": parsed.input}),
        priority=PRIORITIES[parsed.priority],
        created_at=now,
        expires_at=None if parsed.timeout_s is None else now + parsed.timeout_s,
        metadata=_written(parsed.metadata) if parsed.metadata else b"{}",
        many=many,
        request_id=request.state.request_id,
        owner=_owner(request),
        idempotency_key=None if key is None else (_OWNER, key),
        fingerprint="" if key is None else hashlib.sha256(body).hexdigest(),
    )


def _owner(request: Request) -> str:
    """Who gets a share of their own: whoever comes with the same token. Nobody is asked to prove anything."""
    bearer = _BEARER.fullmatch(request.headers.get("authorization", ""))
    return hashlib.sha256(bearer[1].encode()).hexdigest()[:16] if bearer else ""


def _written(value: object) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:
        # The only thing that can be read and not written again.
        raise Problem(
            problems.INVALID_REQUEST, "the input or the metadata is nested too deeply: 250 levels at most"
        ) from None


def _preferred_wait(request: Request, limit_s: float) -> float | None:
    """Seconds that the caller wants to wait at most; None when it does not want to, or says it in no known way."""
    for value in request.headers.getlist("prefer"):
        if found := _WAIT.search(value):
            return min(float(found[1]), limit_s)
    return None


async def _while_connected(
    request: Request, shared: state.ApiState, waiting: Coroutine[Any, Any, JobState | None]
) -> JobState | None:
    """The result of `waiting`; None when the caller has gone or the server stops before it is there."""
    wait = asyncio.ensure_future(waiting)
    ends = [asyncio.ensure_future(_disconnected(request)), asyncio.ensure_future(shared.envelope.stopping.wait())]
    try:
        await asyncio.wait([wait, *ends], return_when=asyncio.FIRST_COMPLETED)
        return wait.result() if wait.done() else None
    finally:
        for task in (wait, *ends):
            task.cancel()
        with suppress(asyncio.CancelledError):
            await wait


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _accepted(request: Request, job_id: str, job: NewJob, waited_s: float | None = None) -> Response:
    request.state.job_id = job_id
    return _json(views.accepted(job_id, job), 202, waited_s, {"location": views.url(job_id)})


def _json(
    body: bytes, status: int, waited_s: float | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    told = dict(headers or {})
    if waited_s is not None:
        told["preference-applied"] = f"wait={waited_s:g}"
    return Response(body, status_code=status, headers=told, media_type="application/json")
