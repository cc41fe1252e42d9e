"""Submit jobs, read them, list them, cancel them."""

from __future__ import annotations

import asyncio
import base64
import re
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from api import intake, kinds, state, views
from api.auth import Caller
from api.body import body_of
from api.intake import Wait
from api.openapi import request_body
from api.problems import Problem, described, shown, wrong
from api.schemas import Accepted, Job, JobList, JobRequest
from broker import JobState, JobStatus, NewJob, Scope

#: Jobs of one page of a list, at most, and without a word.
MAX_PAGE, DEFAULT_PAGE = 100, 20
#: How many pages of all jobs are looked at for one of those that a filter lets through.
PAGES_LOOKED_AT = 10

router = APIRouter(tags=["jobs"])

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

JobId = Annotated[str, Path(description="A job's id.", min_length=1, max_length=256)]

_WAIT = {
    "name": "wait",
    "in": "query",
    "schema": {"type": "number", "minimum": 0},
    "description": "Seconds to wait for the job to end, `api.max_wait_s` at most.",
}
_PREFER = {
    "name": "Prefer",
    "in": "header",
    "schema": {"type": "string", "examples": ["wait=10"]},
    "description": "`wait=N` is `?wait=N` as RFC 7240 writes it; `Preference-Applied` tells what was honoured.",
}
_SUBMIT_RESPONSES: dict[int | str, dict[str, Any]] = {
    202: {
        "model": Accepted,
        "description": "The broker holds the job. `Location` is where to read it.",
        "headers": {
            "Location": {"schema": {"type": "string"}},
            "Preference-Applied": {"schema": {"type": "string"}, "description": "With `Prefer: wait=N`."},
            "Idempotency-Replayed": {"schema": {"type": "string"}, "description": "`true` for a repeated submit."},
            "RateLimit": {"schema": {"type": "string"}, "description": "For a key with a rate."},
            "RateLimit-Policy": {"schema": {"type": "string"}, "description": "For a key with a rate."},
        },
    },
    200: {"model": Job, "description": "With `Prefer: wait=N`: the job has ended in time."},
    **described(
        kinds.NOT_JSON,
        kinds.UNKNOWN_MODEL,
        kinds.PAYLOAD_TOO_LARGE,
        kinds.MEDIA_TYPE_REFUSED,
        kinds.INVALID_REQUEST,
        kinds.IDEMPOTENCY_CONFLICT,
        kinds.PRIORITY_FORBIDDEN,
        kinds.TOO_FAST,
        kinds.TOO_MANY_OPEN,
        kinds.QUEUE_FULL,
        kinds.MODEL_FAILED,
    ),
}
_SUBMIT = {
    "parameters": [_WAIT, _PREFER, intake.IDEMPOTENCY_KEY_PARAMETER],
    "requestBody": request_body(JobRequest),
}


@router.post(
    "/v1/jobs",
    summary="Submit a job",
    response_class=Response,
    status_code=202,
    responses=_SUBMIT_RESPONSES,
    openapi_extra=_SUBMIT,
)
async def submit(request: Request) -> Response:
    """Put a job on its model's queue. Answered only after the broker has accepted it."""
    shared = state.of(request)
    caller = await shared.gate.caller(request, Scope.SUBMIT)
    body = await body_of(request, shared.settings.api.max_payload_bytes)
    wait = intake.wanted_wait(request, shared.settings.api.max_wait_s)
    job = await intake.new_job(request, shared, caller, intake.job_request(body), body)
    # The broker will hold the job, and thousands may wait.
    del body
    return await _submit(request, shared, caller, job, wait)


@router.put(
    "/v1/jobs/{job_id}",
    summary="Submit a job under an id of your own",
    response_class=Response,
    status_code=202,
    responses=_SUBMIT_RESPONSES | described(kinds.ID_TAKEN),
    openapi_extra=_SUBMIT,
)
async def put(request: Request, job_id: JobId) -> Response:
    """As `POST /v1/jobs`, with a UUID that the caller has chosen: repeated with the same payload it is the same job, as
    long as that is kept.
    """
    shared = state.of(request)
    caller = await shared.gate.caller(request, Scope.SUBMIT)
    if not _UUID.fullmatch(job_id):
        raise wrong("job_id", f"an id is a UUID in lower case, not {shown(job_id)}")
    body = await body_of(request, shared.settings.api.max_payload_bytes)
    wait = intake.wanted_wait(request, shared.settings.api.max_wait_s)
    job = await intake.new_job(request, shared, caller, intake.job_request(body), body, chosen_id=job_id)
    del body
    return await _submit(request, shared, caller, job, wait)


async def _submit(request: Request, shared: state.ApiState, caller: Caller, job: NewJob, wait: Wait) -> Response:
    submitted, found = await intake.submit(request, shared, caller, job, wait.seconds)
    headers = {**intake.told(job, submitted), **wait.headers}
    if found is not None and found.ended:
        return views.response(views.job(found), 200, headers, found)
    headers["location"] = views.url(submitted.id)
    status = JobStatus.QUEUED if found is None else found.status
    return views.response(views.accepted(submitted, job.model, status), 202, headers)


@router.get(
    "/v1/jobs/{job_id}",
    summary="Read a job",
    response_class=Response,
    responses={200: {"model": Job}, **described(kinds.UNKNOWN_JOB, kinds.INVALID_REQUEST)},
    openapi_extra={"parameters": [_WAIT, _PREFER]},
)
async def read(request: Request, job_id: JobId) -> Response:
    """The job as it is now; with `wait`, as soon as it has ended, or as it is after so many seconds."""
    shared = state.of(request)
    caller = await shared.gate.caller(request, Scope.READ)
    wait = intake.wanted_wait(request, shared.settings.api.max_wait_s)
    found = await job_of(request, shared, caller, job_id)
    if wait.seconds is not None and not found.ended:
        found = await intake.wait_for(request, shared, caller, found, wait.seconds)
    position = await shared.broker.overview.position(found)
    return views.response(views.job(found, position), 200, wait.headers, found)


@router.post(
    "/v1/jobs/{job_id}/cancel",
    summary="Cancel a job",
    response_class=Response,
    responses={200: {"model": Job}, **described(kinds.UNKNOWN_JOB, kinds.JOB_ENDED)},
)
async def cancel(request: Request, job_id: JobId) -> Response:
    """End a job that has not ended. One that has not begun never runs; of one that runs, the result is not kept."""
    shared = state.of(request)
    await own_job(request, shared, job_id, Scope.SUBMIT)
    cancelled = await shared.broker.cancel(job_id)
    if cancelled is None:
        raise unknown(job_id)
    return views.response(views.job(cancelled), 200, {}, cancelled)


@router.get(
    "/v1/jobs",
    summary="List jobs",
    response_class=Response,
    responses={200: {"model": JobList}, **described(kinds.INVALID_REQUEST)},
)
async def list_jobs(
    request: Request,
    status: Annotated[JobStatus | None, Query(description="Only jobs of this status.")] = None,
    model: Annotated[str | None, Query(description="Only jobs of this model.", max_length=64)] = None,
    owner: Annotated[
        str | None, Query(description="Whose jobs, for a key with the scope `admin`.", max_length=64)
    ] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = DEFAULT_PAGE,
    cursor: Annotated[str | None, Query(description="`next_cursor` of the page before.", max_length=128)] = None,
) -> Response:
    """The caller's own jobs, the newest first, without their answers. The newest 10,000 are listed, as long as they are
    kept; jobs of Celery clients are not.
    """
    shared = state.of(request)
    caller = await shared.gate.caller(request, Scope.READ)
    if owner is None:
        owner = caller.owner
    elif owner != caller.owner and caller.key is not None and not caller.key.allows(Scope.ADMIN):
        raise Problem(kinds.FORBIDDEN, "jobs of other owners are listed for keys with the scope admin alone")
    position = None if cursor is None else _position(cursor)
    jobs: list[JobState] = []
    for _ in range(PAGES_LOOKED_AT):
        page = await shared.broker.overview.listed(owner, position, MAX_PAGE)
        states = await asyncio.gather(*(shared.broker.fetch(job_id) for _, job_id in page))
        for position, found in zip(page, states, strict=True):
            if found is not None and status in (None, found.status) and model in (None, found.model):
                jobs.append(found)
                if len(jobs) == limit:
                    return views.response(views.listed(jobs, _cursor(position)), 200)
        if len(page) < MAX_PAGE:
            return views.response(views.listed(jobs, None), 200)
    assert position is not None
    return views.response(views.listed(jobs, _cursor(position)), 200)


async def own_job(request: Request, shared: state.ApiState, job_id: str, scope: Scope = Scope.READ) -> JobState:
    """A job that the caller may know of. Raises `Problem` for any other."""
    return await job_of(request, shared, await shared.gate.caller(request, scope), job_id)


async def job_of(request: Request, shared: state.ApiState, caller: Caller, job_id: str) -> JobState:
    """A job that this caller may know of. Raises `Problem` for any other."""
    request.state.job_id = job_id
    found = await shared.broker.fetch(job_id)
    if found is None or not caller.may_read(found):
        raise unknown(job_id)
    return found


def unknown(job_id: str) -> Problem:
    return Problem(
        kinds.UNKNOWN_JOB,
        f"no job {shown(job_id)}: its id is wrong, its result is no longer kept, or it is a Celery client's and has "
        "not ended (that one is cancelled with revoke)",
    )


def _cursor(position: tuple[int, str]) -> str:
    return base64.urlsafe_b64encode(f"{position[0]}:{position[1]}".encode()).decode().rstrip("=")


def _position(cursor: str) -> tuple[int, str]:
    with suppress(ValueError):
        moment, colon, job_id = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode().partition(":")
        if colon and moment.isdecimal():
            return int(moment), job_id
    raise wrong("cursor", "this is no `next_cursor` of a page")
