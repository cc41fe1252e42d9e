"""From a request to a job on its queue, and to its result where the caller waits: shared by all that submit."""

from __future__ import annotations

import hashlib
import json
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from api import kinds, problems, state
from api.auth import Caller
from api.headers import header
from api.problems import Problem, rate_headers
from api.schemas import PRIORITIES, JobRequest
from broker import BrokerUnavailable, JobEnded, JobState, JobStatus, NewJob, Submitted, Waiter, Webhook, queue_name
from broker.jobs import Event
from schemas import rows
from webhooks import Refused

#: Seconds after which a model that could not be loaded may be worth another try.
RETRY_FAILED_MODEL_S = 60
#: How deep a row, or metadata, may be nested.
MAX_LEVELS = 250
#: What can be written. Source: orjson's README, "dumps".
WRITTEN_LEVELS = 254
#: Of a body; far more than there are.
MAX_FIELDS = 64

#: RFC 7240, with the one preference that is honoured here.
_WAIT = re.compile(r'(?:^|[,;])\s*wait\s*=\s*"?([0-9]{1,9}(?:\.[0-9]{1,9})?)"?\s*(?=$|[,;])', re.IGNORECASE)
_SECONDS = re.compile(r"[0-9]+(\.[0-9]+)?")
_IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")
#: How the OpenAPI document describes it.
IDEMPOTENCY_KEY_PARAMETER = {
    "name": "Idempotency-Key",
    "in": "header",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": r"^[\x21-\x7e]+$"},
    "description": "A repeated submit with the same key and payload gets the first one's answer, for a day, or as long "
    "as that job is kept.",
}

M = TypeVar("M", bound=BaseModel)


def parsed(body: bytes, model: type[BaseModel]) -> object:
    """A body that `model` describes. Raises `Problem` for what is no JSON, or names one of the model's fields twice."""
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Problem(kinds.NOT_JSON, f"the body is not JSON: {error}") from None
    # Whoever checks requests on their way here may look at the first of the two. Escapes may hide a name.
    if b"\\u" in body or any(body.count(name) > 1 for name in _quoted(model)):
        _refuse_repeated(body, model)
    return content


@cache
def _quoted(model: type[BaseModel]) -> tuple[bytes, ...]:
    return tuple(f'"{name}"'.encode() for name in model.model_fields)


def _refuse_repeated(body: bytes, model: type[BaseModel]) -> None:
    names: Counter[str] = Counter()

    def note(pairs: list[tuple[str, object]]) -> None:
        # The outermost object ends last.
        nonlocal names
        names = Counter(name for name, _ in pairs)

    try:
        json.loads(body, object_pairs_hook=note, parse_int=str, parse_float=str)
    except RecursionError:
        raise Problem(kinds.NOT_JSON, "the body is nested too deeply") from None
    for name, count in names.items():
        if count > 1 and name in model.model_fields:
            raise problems.wrong(name, f"it is there {count} times")


def request_of(body: bytes, model: type[M]) -> M:
    """A body as `model` has it. Raises `Problem` that names each field that is wrong."""
    return _checked(parsed(body, model), model)


def _checked(content: object, model: type[M]) -> M:
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise problems.of_validation(error, model) from None


def job_request(body: bytes) -> JobRequest:
    """Raises `Problem` that names each field that is wrong."""
    content = parsed(body, JobRequest)
    if isinstance(content, dict) and len(content) > MAX_FIELDS:
        # Each would become an error of its own before the first is told.
        raise Problem(kinds.INVALID_REQUEST, f"the body has {len(content)} fields, most of which are unknown")
    return _checked(content, JobRequest)


async def new_job(
    request: Request,
    shared: state.ApiState,
    caller: Caller,
    wanted: JobRequest,
    body: bytes,
    chosen_id: str | None = None,
) -> NewJob:
    """The job that is wanted, ready to be submitted. Raises `Problem` for what cannot be served."""
    model = shared.model(wanted.model)
    many = wanted.inputs is not None
    field = "inputs" if many else "input"
    try:
        if wanted.inputs is not None:
            rows.check_inputs(model.task, wanted.inputs)
        else:
            rows.check_input(model.task, wanted.input)
    except ValidationError as error:
        raise problems.of_validation(error, None, field) from None
    priority = caller.priority(wanted.priority)
    now = time.time()
    key = idempotency_key(request)
    told = await _told(request, shared, caller, wanted)
    await _refuse_failed(shared, wanted.model)
    return NewJob(
        id=chosen_id or str(uuid.uuid4()),
        model=wanted.model,
        queue=queue_name(wanted.model),
        payload=_written(field, {field: wanted.inputs if many else wanted.input}, 2 if many else 1),
        priority=PRIORITIES[priority],
        created_at=now,
        expires_at=None if wanted.timeout_s is None else now + wanted.timeout_s,
        metadata=_written("metadata", wanted.metadata, 0) if wanted.metadata else b"{}",
        many=many,
        request_id=request.state.request_id,
        owner=caller.owner,
        idempotency_key=None if key is None else (caller.owner, key),
        fingerprint=fingerprint(request, body) if key is not None or chosen_id else "",
        chosen_id=chosen_id is not None,
        quota=caller.quota,
        webhook=told,
    )


async def _told(request: Request, shared: state.ApiState, caller: Caller, wanted: JobRequest) -> Webhook | None:
    if "webhook" not in wanted.model_fields_set:
        # Looked at when the key was made: what its name leads to by now is the courier's to see.
        return caller.webhook and replace(caller.webhook, request_id=request.state.request_id)
    if wanted.webhook is None:
        return None
    return await webhook(request, shared, caller, wanted.webhook.url, wanted.webhook.events)


async def webhook(
    request: Request, shared: state.ApiState, caller: Caller, url: str, events: Sequence[Event]
) -> Webhook:
    """The webhook that a request names. Raises `Problem` for an address that is refused."""
    try:
        await shared.targets.check(url)
    except Refused as error:
        raise problems.wrong("webhook.url", str(error)) from None
    return Webhook(url, tuple(dict.fromkeys(events)), caller.owner, request.state.request_id)


async def submit(
    request: Request, shared: state.ApiState, caller: Caller, job: NewJob, wait_s: float | None
) -> tuple[Submitted, JobState | None]:
    """Submit a job and wait for its end for so long, or not at all. Its state after that, as far as it is known.

    Raises `Problem` when the caller's key opens nothing any more while it waits.
    """
    if wait_s is None:
        submitted = await shared.broker.submit(job)
        request.state.job_id = submitted.id
        return submitted, None
    with shared.broker.waiter(job.id) as waiter:
        submitted = await shared.broker.submit(job)
        request.state.job_id = submitted.id
        # The server holds it now, and thousands may wait.
        job.payload, job.metadata = b"", b"{}"
        try:
            if not submitted.repeated:
                found = await _wait(request, shared, caller, job.id, wait_s, waiter, job.expires_at)
            else:
                found = await shared.broker.fetch(submitted.id)
                if found is not None and not found.ended:
                    found = await wait_for(request, shared, caller, found, wait_s)
        except BrokerUnavailable:
            # The broker went away after it had accepted the job.
            found = None
    return submitted, found


async def wait_for(
    request: Request, shared: state.ApiState, caller: Caller, known: JobState, wait_s: float
) -> JobState:
    """The job's state when it has ended, or as it is after so long; `known` is its state a moment ago.

    Raises `Problem` when the caller's key opens nothing any more while it waits.
    """
    with shared.broker.waiter(known.id) as waiter:
        # It may have ended since.
        waiter.wake()
        return await _wait(request, shared, caller, known.id, wait_s, waiter, known.expires_at) or known


async def answered(
    request: Request, shared: state.ApiState, caller: Caller, job: NewJob
) -> tuple[JobState, dict[str, str]]:
    """Submit a job and wait for its result, for callers who get no other look at it. Raises `Problem` for all else.

    A job whose caller has gone or is shut out, or that takes longer than `api.max_wait_s`, is cancelled: nobody would
    read its result. Whoever sends the request again with its idempotency key gets a job that runs. Also returns headers
    to answer with.
    """
    wait_s = shared.settings.api.max_wait_s
    until = time.monotonic() + wait_s
    payload = b"" if job.idempotency_key is None else job.payload
    try:
        submitted, found = await submit(request, shared, caller, job, wait_s)
        if submitted.repeated and job.idempotency_key and found is not None and found.status is JobStatus.CANCELLED:
            await shared.broker.forget_repeat(job.idempotency_key, submitted.id)
            job = _again(job, payload)
            submitted, found = await submit(request, shared, caller, job, max(0.0, until - time.monotonic()))
    except Problem:
        # Shut out. A job that this one repeats has another id, and may be waited for by others.
        await _cancel(shared, job.id)
        raise
    if found is None or not found.ended:
        if not submitted.repeated:
            await _cancel(shared, submitted.id)
        found = await shared.broker.fetch(submitted.id)
    headers = told(job, submitted)
    if found is None or found.status is JobStatus.CANCELLED or not found.ended:
        if shared.envelope.stopping.is_set():
            raise Problem(kinds.NOT_READY, "the server is stopping: send it again", headers=headers)
        said = f"job {submitted.id} was not done within {wait_s:g} s, and was cancelled"
        raise Problem(kinds.NOT_IN_TIME, said, headers=headers)
    if found.error is not None:
        raise failed(found.error.type, found.error.message, "input", headers)
    return found, headers


async def _cancel(shared: state.ApiState, job_id: str) -> None:
    """Nobody would read its result, if it has none yet."""
    with suppress(JobEnded):
        await shared.broker.cancel(job_id)


def _again(job: NewJob, payload: bytes) -> NewJob:
    """The same job as a new one, from now on."""
    now = time.time()
    expires_at = None if job.expires_at is None else job.expires_at - job.created_at + now
    return replace(job, id=str(uuid.uuid4()), payload=payload, created_at=now, expires_at=expires_at)


def told(job: NewJob, submitted: Submitted) -> dict[str, str]:
    """What the headers say of a submit."""
    headers: dict[str, str] = {}
    if submitted.repeated:
        headers["idempotency-replayed"] = "true"
    if submitted.rate is not None and job.quota is not None and job.quota.rate is not None:
        headers |= rate_headers(job.quota.rate, submitted.rate)
    return headers


def failed(error_type: str, message: str, path: str, headers: Mapping[str, str]) -> Problem:
    """What the failure of a row, or of a whole job, is to a caller who waits for nothing but its result."""
    if error_type == rows.INVALID_INPUT:
        return replace(problems.wrong(path, message), headers=headers)
    return Problem(kinds.JOB_FAILED, f"{path}: {error_type}: {message}", headers=headers)


@dataclass(frozen=True, slots=True)
class Wait:
    """How long the caller wants to wait at most, seconds, and what a header says of that."""

    seconds: float | None
    headers: Mapping[str, str]


_NO_WAIT = Wait(None, {})


def wanted_wait(request: Request, limit_s: float) -> Wait:
    """As `?wait=N` says it, or `Prefer: wait=N`, which is left alone when it cannot be read (RFC 7240).

    Raises `Problem` for a `wait` in the query that is no time.
    """
    if request.scope["query_string"] and (given := request.query_params.get("wait")) is not None:
        return Wait(min(_seconds(given), limit_s) or None, {})
    for name, value in request.scope["headers"]:
        if name == b"prefer" and (found := _WAIT.search(value.decode("latin-1"))):
            seconds = min(float(found[1]), limit_s)
            return Wait(seconds or None, {"preference-applied": f"wait={seconds:g}"})
    return _NO_WAIT


def _seconds(given: str) -> float:
    if _SECONDS.fullmatch(given):
        return float(given)
    raise problems.wrong("wait", "it must be a number of seconds, 0 or more, such as 5 or 0.5")


async def _wait(
    request: Request,
    shared: state.ApiState,
    caller: Caller,
    job_id: str,
    wait_s: float,
    waiter: Waiter,
    expires_at: float | None = None,
) -> JobState | None:
    """The job's state at its end or after so long; None when the caller goes, or the server stops, before that.

    Raises `Problem` when the caller's key was revoked, or has expired: that ends the wait too.
    """
    # The server's own connections (`api.connection`) put it there.
    when_gone: Callable[[Callable[[], None] | None], None] = request.state.when_gone
    when_gone(waiter.abandon)
    try:
        # A lambda would keep a cell for each of its names, for each of thousands who wait.
        found = await shared.broker.wait(job_id, wait_s, waiter, expires_at, partial(_over, shared, caller, waiter))
    finally:
        when_gone(None)
    shared.gate.check(caller)
    return found


def _over(shared: state.ApiState, caller: Caller, waiter: Waiter) -> bool:
    """Whether nobody is to be told of a job's end any more."""
    return waiter.abandoned or shared.envelope.stopping.is_set() or not shared.gate.admits(caller)


async def _refuse_failed(shared: state.ApiState, model: str) -> None:
    infos = (await shared.announced()).get(model, [])
    if state.model_state(infos) == "failed":
        raise Problem(
            kinds.MODEL_FAILED,
            f"no worker could load {model}: {infos[0].error}",
            headers={"retry-after": str(RETRY_FAILED_MODEL_S)},
        )


def idempotency_key(request: Request) -> str | None:
    key = header(request, b"idempotency-key")
    if key is not None and not _IDEMPOTENCY_KEY.fullmatch(key):
        raise problems.wrong("Idempotency-Key", "it must be 1 to 255 visible ASCII characters")
    return key


def fingerprint(request: Request, body: bytes) -> str:
    """What a repeated request has to repeat: method, path and body."""
    return hashlib.sha256(b"%s %s\n%s" % (request.method.encode(), request.url.path.encode(), body)).hexdigest()


def _written(field: str, value: object, above: int) -> bytes:
    """As JSON. Raises `Problem` when what is `above` levels within it is nested too deeply."""
    # Whoever writes it counts its levels: within so many more it finds the one that is too many, at no cost.
    spare = WRITTEN_LEVELS - MAX_LEVELS - above
    for _ in range(spare):
        value = [value]
    try:
        written = orjson.dumps(value)
    except TypeError:
        # The only thing that can be read and not written again.
        raise problems.wrong(field, f"it is nested too deeply: {MAX_LEVELS} levels at most") from None
    return written[spare : len(written) - spare]
