"""Batches as OpenAI's API has them: a file of requests, run at the lowest priority, and a file of answers.

Source: OpenAI API reference, "Batch".
"""

from __future__ import annotations

import time
import uuid
from dataclasses import replace
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, ConfigDict, Field, field_validator
from starlette.requests import Request
from starlette.responses import Response

from api import intake, kinds, state, views
from api.body import body_of
from api.dialects import OpenAIRoute
from api.files import file_of
from api.openapi import request_body
from api.problems import Problem, described, shown, wrong
from api.schemas import WebhookAddress
from api.uploads import MAX_TTL_S, MIN_TTL_S, PURPOSE
from broker import BatchEvent, BatchFault, BatchRecord, BatchStatus, Scope, UnknownBatch

#: Batches of one page of a list, at most, and without a word.
MAX_PAGE, DEFAULT_PAGE = 100, 20
#: OpenAI's bounds of `metadata`.
MAX_PAIRS, MAX_KEY, MAX_VALUE = 16, 64, 512

#: An input file is kept for so long after its batch's time at least, seconds: the end may have to wait for the storage.
FILE_KEPT_S = 3600

router = APIRouter(tags=["openai"], route_class=OpenAIRoute)

BatchId = Annotated[str, Path(description="A batch's id.", min_length=1, max_length=256)]

_NAMESPACE = uuid.UUID("b2b4c6a8-0f0e-5b7c-9a55-7d6b0e3f1c21")
_UNITS = {"m": 60, "h": 3600, "d": 86_400}


class ExpiresAfter(BaseModel):
    """How long the output files are kept."""

    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"]
    seconds: int = Field(strict=True, ge=MIN_TTL_S, le=MAX_TTL_S)


class BatchWebhook(WebhookAddress):
    """Whom to tell of the batch's end."""

    events: list[BatchEvent] = Field(
        default_factory=lambda: list(BatchEvent), min_length=1, description="The ends to tell of; all without it."
    )


class BatchRequest(BaseModel):
    """A file of requests to one endpoint."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"input_file_id": "file-0123…", "endpoint": "/v1/embeddings", "completion_window": "24h"},
            ]
        },
    )

    input_file_id: str = Field(max_length=256, description="A file of purpose `batch`, a request a line.")
    endpoint: Literal["/v1/embeddings", "/v1/jobs"]
    completion_window: str = Field(
        pattern=r"^[1-9]\d{0,4}[mhd]$",
        description="`24h`, or any other number of minutes, hours or days: what is not done by then is not run.",
    )
    metadata: dict[str, str] | None = Field(default=None, max_length=MAX_PAIRS, description="Told back with the batch.")
    output_expires_after: ExpiresAfter | None = None
    webhook: BatchWebhook | None = Field(
        default=None, description="Called when it has ended; without it the key's own, and nobody with null."
    )

    @field_validator("metadata")
    @classmethod
    def _short(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        for name, text in (value or {}).items():
            if len(name) > MAX_KEY or len(text) > MAX_VALUE:
                raise ValueError(f"names have {MAX_KEY} characters at most, and values {MAX_VALUE}")
        return value


class RequestCounts(BaseModel):
    """Lines of the input file."""

    total: int
    completed: int
    failed: int


class BatchError(BaseModel):
    code: str
    message: str
    line: int | None = Field(description="Of the input file, from 1.")
    param: str | None


class BatchErrors(BaseModel):
    object: Literal["list"]
    data: list[BatchError]


class Batch(BaseModel):
    """Times are Unix seconds."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None = Field(description="The one that all lines name; known once they were looked at.")
    errors: BatchErrors | None = Field(description="Why it failed: the first hundred faults of its lines.")
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None = Field(description="Answers; null while there are none, or when all lines failed.")
    error_file_id: str | None = Field(description="What lines failed with; null where none did.")
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(BaseModel):
    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


@router.post(
    "/v1/batches",
    summary="Have a file of requests run (OpenAI)",
    response_class=Response,
    responses={
        200: {"model": Batch, "description": "The broker holds the batch."},
        **described(
            kinds.NOT_JSON,
            kinds.PAYLOAD_TOO_LARGE,
            kinds.MEDIA_TYPE_REFUSED,
            kinds.INVALID_REQUEST,
            kinds.IDEMPOTENCY_CONFLICT,
            kinds.PRIORITY_FORBIDDEN,
            kinds.TOO_MANY_BATCHES,
        ),
    },
    openapi_extra={
        "parameters": [intake.IDEMPOTENCY_KEY_PARAMETER],
        "requestBody": request_body(BatchRequest),
    },
)
async def create(request: Request) -> Response:
    """Its lines are checked first; then all of them run, at the lowest priority, and none is kept in the queue for
    long. A line is `{custom_id, method, url, body}`; `url` is the endpoint, and all bodies name the same model.
    """
    shared = state.of(request)
    caller = await shared.gate.caller(request, Scope.SUBMIT)
    body = await body_of(request, shared.settings.api.max_payload_bytes)
    wanted = intake.request_of(body, BatchRequest)
    # Its rows travel with the lowest priority.
    caller.priority("low")
    key = intake.idempotency_key(request)
    window_s = _seconds(wanted.completion_window, shared.settings.batches.max_window_s)
    file = await file_of(shared, caller, wanted.input_file_id)
    if file is None:
        raise wrong("input_file_id", f"there is no file {shown(wanted.input_file_id)}")
    if file.purpose != PURPOSE:
        raise wrong("input_file_id", f"its purpose is {file.purpose!r}: upload a file with the purpose {PURPOSE!r}")
    webhook = caller.webhook
    if "webhook" in wanted.model_fields_set:
        own = wanted.webhook
        webhook = None if own is None else await intake.webhook(request, shared, caller, own.url, own.events)
    now = time.time()
    batch = BatchRecord(
        id=f"batch_{(uuid.uuid4() if key is None else uuid.uuid5(_NAMESPACE, f'{caller.owner}/{key}')).hex}",
        owner=caller.owner,
        endpoint=wanted.endpoint,
        input_file_id=file.id,
        completion_window=wanted.completion_window,
        created_at=now,
        expires_at=now + window_s,
        metadata=wanted.metadata or {},
        request_id=request.state.request_id,
        webhook=webhook,
        output_ttl_s=None if wanted.output_expires_after is None else wanted.output_expires_after.seconds,
    )
    if file.expires_at is not None and file.expires_at < batch.expires_at + FILE_KEPT_S:
        # Its input is there for as long as it may run.
        await shared.broker.files.add(replace(file, expires_at=batch.expires_at + FILE_KEPT_S))
    made = await shared.broker.batches.submit(
        batch,
        max_open=shared.settings.batches.max_open,
        fingerprint=intake.fingerprint(request, body),
        idempotency_key=key or "",
    )
    repeated = {} if made is batch else {"idempotency-replayed": "true"}
    return views.response(orjson.dumps(_view(made)), 200, repeated)


@router.get(
    "/v1/batches",
    summary="List batches (OpenAI)",
    response_class=Response,
    responses={200: {"model": BatchList}, **described(kinds.INVALID_REQUEST)},
)
async def list_batches(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = DEFAULT_PAGE,
    after: Annotated[str | None, Query(description="`last_id` of the page before.", max_length=256)] = None,
) -> Response:
    """The caller's own batches, the newest first."""
    shared = state.of(request)
    caller = await shared.gate.caller(request, Scope.READ)
    try:
        found = await shared.broker.batches.listed(caller.owner, after, limit + 1)
    except UnknownBatch as error:
        raise wrong("after", str(error)) from None
    return views.response(orjson.dumps(views.page([_view(batch) for batch in found], limit)), 200)


@router.get(
    "/v1/batches/{batch_id}",
    summary="Read a batch (OpenAI)",
    response_class=Response,
    responses={200: {"model": Batch}, **described(kinds.UNKNOWN_BATCH)},
)
async def retrieve(request: Request, batch_id: BatchId) -> Response:
    """How far it is: `request_counts` are a second old at most while it runs."""
    batch = await own_batch(request, batch_id, Scope.READ)
    return views.response(orjson.dumps(_view(batch)), 200)


@router.post(
    "/v1/batches/{batch_id}/cancel",
    summary="Cancel a batch (OpenAI)",
    response_class=Response,
    responses={200: {"model": Batch}, **described(kinds.UNKNOWN_BATCH, kinds.BATCH_ENDED)},
)
async def cancel(request: Request, batch_id: BatchId) -> Response:
    """It is `cancelling` until what has run is in its files, a few seconds later, and `cancelled` then."""
    await own_batch(request, batch_id, Scope.SUBMIT)
    batch = await state.of(request).broker.batches.cancel(batch_id)
    if batch is None:
        raise _unknown(batch_id)
    return views.response(orjson.dumps(_view(batch)), 200)


async def own_batch(request: Request, batch_id: str, scope: Scope) -> BatchRecord:
    """A batch that the caller may know of. Raises `Problem` for any other."""
    shared = state.of(request)
    caller = await shared.gate.caller(request, scope)
    batch = await shared.broker.batches.get(batch_id)
    if batch is None or not caller.may_see(batch.owner):
        raise _unknown(batch_id)
    return batch


def _unknown(batch_id: str) -> Problem:
    return Problem(kinds.UNKNOWN_BATCH, f"no batch {shown(batch_id)}: its id is wrong, or it is no longer kept")


def _seconds(window: str, most: int) -> int:
    seconds = int(window[:-1]) * _UNITS[window[-1]]
    if seconds > most:
        raise wrong("completion_window", f"it may be {most // 3600}h at most (batches.max_window_s)")
    return seconds


def _view(batch: BatchRecord) -> dict[str, Any]:
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": _errors(batch.errors) if batch.errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.shown.value,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": int(batch.created_at),
        "in_progress_at": _whole(batch.in_progress_at),
        "expires_at": int(batch.expires_at),
        "finalizing_at": _whole(batch.finalizing_at),
        "completed_at": _whole(batch.completed_at),
        "failed_at": _whole(batch.failed_at),
        "expired_at": _whole(batch.expired_at),
        "cancelling_at": _whole(batch.cancelling_at),
        "cancelled_at": _whole(batch.cancelled_at),
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": batch.metadata or None,
    }


def _errors(faults: tuple[BatchFault, ...]) -> dict[str, object]:
    data = [{"code": it.code, "message": it.message, "line": it.line, "param": it.param} for it in faults]
    return {"object": "list", "data": data}


def _whole(moment: float | None) -> int | None:
    return None if moment is None else int(moment)
