"""Errors as HTTP tells them: RFC 9457 `application/problem+json`, each with a stable `type`.

The one place where an error gets its status. Handlers raise `Problem` or let a broker error through.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from api.schemas import ProblemBody
from broker.errors import (
    BadMessage,
    BrokerError,
    BrokerUnavailable,
    EmbeddedServerError,
    IdempotencyConflict,
    JobEnded,
    QueueFull,
    UnsupportedServer,
)

#: How /docs describes any of them.
PROBLEM: dict[str, Any] = {"content": {"application/problem+json": {"schema": ProblemBody.model_json_schema()}}}
TYPE_PREFIX = "urn:sheaf:error:"
MEDIA_TYPE = "application/problem+json"


@dataclass(frozen=True, slots=True)
class Kind:
    """One sort of problem: its HTTP status, the end of its `type`, and its title."""

    status: int
    slug: str
    title: str


INVALID_REQUEST = Kind(422, "invalid-request", "The request is not as it should be")
NOT_JSON = Kind(400, "not-json", "The body is not JSON")
MEDIA_TYPE_REFUSED = Kind(415, "unsupported-media-type", "Only JSON is taken")
UNKNOWN_MODEL = Kind(404, "unknown-model", "There is no such model")
MODEL_FAILED = Kind(503, "model-failed", "The model could not be loaded")
UNKNOWN_JOB = Kind(404, "unknown-job", "There is no such job")
NOT_FOUND = Kind(404, "not-found", "There is no such page")
METHOD_NOT_ALLOWED = Kind(405, "method-not-allowed", "The page does not take this method")
PAYLOAD_TOO_LARGE = Kind(413, "payload-too-large", "The body is too large")
BAD_REQUEST = Kind(400, "bad-request", "The request cannot be understood")
REQUEST_TIMEOUT = Kind(408, "request-timeout", "The request did not come in time")
TARGET_TOO_LONG = Kind(414, "target-too-long", "The request's target is too long")
HEAD_TOO_LARGE = Kind(431, "head-too-large", "The request's head is too large")
TOO_MANY_CONNECTIONS = Kind(503, "too-many-connections", "The server has too many connections")
NOT_READY = Kind(503, "not-ready", "The service is not ready")
INTERNAL = Kind(500, "internal", "The server failed")

#: What each error of the broker is to a caller.
BROKER_PROBLEMS: Mapping[type[BrokerError], Kind] = {
    BrokerUnavailable: Kind(503, "broker-unavailable", "The broker cannot take or give jobs now"),
    QueueFull: Kind(503, "queue-full", "The model's queue is full"),
    UnsupportedServer: Kind(503, "unsupported-broker", "The broker's version is too old"),
    IdempotencyConflict: Kind(422, "idempotency-conflict", "The idempotency key belongs to another payload"),
    JobEnded: Kind(409, "job-ended", "The job has ended"),
    EmbeddedServerError: INTERNAL,
    BadMessage: INTERNAL,
    BrokerError: INTERNAL,
}


@dataclass(slots=True, eq=False)
class Problem(Exception):
    """Answer with this instead. `extra` adds members, `headers` adds headers."""

    kind: Kind
    detail: str
    extra: Mapping[str, object] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


def of_broker(error: BrokerError) -> Problem:
    """What a broker's error is to a caller; with `Retry-After` where trying again makes sense."""
    kind = next(BROKER_PROBLEMS[cls] for cls in type(error).__mro__ if cls in BROKER_PROBLEMS)
    headers: dict[str, str] = {}
    if isinstance(error, (BrokerUnavailable, QueueFull)):
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    return Problem(kind, str(error), headers=headers)


def response(problem: Problem, request_id: str) -> Response:
    body = {
        "type": TYPE_PREFIX + problem.kind.slug,
        "title": problem.kind.title,
        "status": problem.kind.status,
        "detail": problem.detail,
        "request_id": request_id,
        **problem.extra,
    }
    return Response(
        orjson.dumps(body), status_code=problem.kind.status, headers=dict(problem.headers), media_type=MEDIA_TYPE
    )


def invalid(errors: Sequence[Mapping[str, object]]) -> Problem:
    """A request that failed validation; `errors` as pydantic lists them, the values themselves left out."""
    listed = [{"field": ".".join(str(part) for part in _parts(error)), "message": _message(error)} for error in errors]
    detail = "; ".join(
        f"{error['field']}: {error['message']}" if error["field"] else error["message"] for error in listed
    )
    return Problem(INVALID_REQUEST, detail, {"errors": listed})


def _parts(error: Mapping[str, object]) -> Sequence[object]:
    location = error["loc"]
    assert isinstance(location, tuple)
    return location[1:] if location[:1] in (("query",), ("path",), ("header",)) else location


def _message(error: Mapping[str, object]) -> str:
    return str(error["msg"]).removeprefix("Value error, ")


async def on_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return response(error, request.state.request_id)


async def on_broker_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, BrokerError)
    return response(of_broker(error), request.state.request_id)
