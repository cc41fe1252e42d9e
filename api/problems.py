"""Errors as HTTP tells them: RFC 9457 `application/problem+json`, each with a stable `type`.

The one place where an error becomes an answer. Handlers raise `Problem` or let a broker error through.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, TypeGuard, get_args

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from api.kinds import BROKER_PROBLEMS, BROKER_UNAVAILABLE, INTERNAL, INVALID_REQUEST, UNSUPPORTED_BROKER, Kind
from broker import Rate, RateState
from broker.errors import BrokerError, BrokerUnavailable, FileQuota, QueueFull, TooFast, TooManyOpen

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
#: Of a request with many errors so many are told, and of a name that the caller made up so many characters: an answer
#: that grew with the request would cost more than the request.
MAX_LISTED = 32
MAX_NAME = 128
#: Those that carry `Retry-After`.
_PASSING = (BrokerUnavailable, QueueFull, TooFast, TooManyOpen)
#: What callers are told instead of the cause: its words name addresses, and what runs there.
_UNTOLD: Mapping[Kind, str] = {
    BROKER_UNAVAILABLE: "the broker does not answer as it should",
    UNSUPPORTED_BROKER: "the broker's version is too old for this server",
    INTERNAL: "the server's log says why, under the request_id",
}


@dataclass(slots=True, eq=False)
class Problem(Exception):
    """Answer with this instead. `extra` adds members, `headers` adds headers; `cause` is for the log alone."""

    kind: Kind
    detail: str
    extra: Mapping[str, object] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    cause: str | None = None


def described(*kinds: Kind) -> dict[int | str, dict[str, Any]]:
    """How the OpenAPI document describes these: a response per status."""
    by_status: defaultdict[int, list[Kind]] = defaultdict(list)
    for kind in kinds:
        by_status[kind.status].append(kind)
    return {status: _described(of_status) for status, of_status in by_status.items()}


def _described(kinds: Sequence[Kind]) -> dict[str, Any]:
    examples = {
        kind.slug: {"summary": kind.title, "value": _body(Problem(kind, "What happened, with the values."), "8f1c…")}
        for kind in kinds
    }
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}, "examples": examples}}
    described: dict[str, Any] = {"description": "; ".join(f"{kind.title} (`{kind.slug}`)" for kind in kinds) + "."}
    return described | {"content": content}


def of(error: Problem | BrokerError) -> Problem:
    """What is to be answered for an error of ours."""
    return error if isinstance(error, Problem) else of_broker(error)


def of_broker(error: BrokerError) -> Problem:
    """What a broker's error is to a caller; with `Retry-After` where trying again makes sense."""
    kind = next(BROKER_PROBLEMS[cls] for cls in type(error).__mro__ if cls in BROKER_PROBLEMS)
    headers: dict[str, str] = {}
    if isinstance(error, _PASSING):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.standing is not None:
        headers |= rate_headers(*error.standing)
    extra: dict[str, object] = {}
    if isinstance(error, FileQuota):
        extra = {"used_bytes": error.used_bytes, "quota_bytes": error.quota_bytes}
    if kind in _UNTOLD:
        return Problem(kind, _UNTOLD[kind], extra, headers, cause=str(error))
    return Problem(kind, str(error), extra, headers)


def rate_headers(rate: Rate, rate_state: RateState) -> dict[str, str]:
    """How a caller's rate is told. Source: draft-ietf-httpapi-ratelimit-headers-10."""
    return {
        "ratelimit-policy": f'"submits";q={rate.count};w={math.ceil(rate.period_s)}',
        "ratelimit": f'"submits";r={rate_state.remaining};t={math.ceil(rate_state.reset_s)}',
    }


def shown(text: object) -> str:
    """What a caller sent, to be named in a `detail`: quoted, and no longer than a name may be."""
    told = str(text)
    return repr(told) if len(told) <= MAX_NAME else f"{told[:MAX_NAME]!r}… ({len(told)} characters)"


def response(problem: Problem, request_id: str) -> Response:
    """The answer; the problem's cause, if it has one, is logged under the request's id."""
    if problem.cause is not None:
        level = logging.ERROR if problem.kind is INTERNAL else logging.WARNING
        fields = {"request_id": request_id, "kind": problem.kind.slug, "cause": problem.cause}
        log.log(level, "A request could not be served.", extra=fields)
    return Response(
        orjson.dumps(_body(problem, request_id)),
        status_code=problem.kind.status,
        headers=dict(problem.headers),
        media_type=MEDIA_TYPE,
    )


def _body(problem: Problem, request_id: str) -> dict[str, object]:
    return {
        "type": problem.kind.type,
        "title": problem.kind.title,
        "status": problem.kind.status,
        "detail": problem.detail,
        "request_id": request_id,
        **problem.extra,
    }


def wrong(field: str, message: str) -> Problem:
    """A request of which this field, or header, is not as it should be."""
    return Problem(INVALID_REQUEST, f"{field}: {message}", {"errors": [{"field": field, "message": message}]})


def of_validation(error: ValidationError, model: type[BaseModel] | None, *above: str) -> Problem:
    """A body that failed validation by `model`, or by a schema that has no name; `above` is the path of it."""
    return invalid([{**detail, "loc": (*above, *detail["loc"])} for detail in error.errors(include_url=False)], model)


def invalid(errors: Sequence[Mapping[str, object]], model: type[BaseModel] | None = None) -> Problem:
    """A request that failed validation; `errors` as pydantic lists them, the values themselves left out.

    Of the fields of `model` the one is named that a caller may have meant.
    """
    listed = [
        {"field": ".".join(str(part)[:MAX_NAME] for part in _parts(error)), "message": _message(error, model)}
        for error in errors[:MAX_LISTED]
    ]
    told = [f"{error['field']}: {error['message']}" if error["field"] else error["message"] for error in listed]
    if len(errors) > MAX_LISTED:
        told.append(f"and {len(errors) - MAX_LISTED} more")
    detail = "; ".join(told)
    return Problem(INVALID_REQUEST, detail, {"errors": listed})


def _parts(error: Mapping[str, object]) -> Sequence[object]:
    location = error["loc"]
    assert isinstance(location, tuple)
    return location[1:] if location[:1] in (("query",), ("path",), ("header",)) else location


def _message(error: Mapping[str, object], model: type[BaseModel] | None) -> str:
    if error["type"] == "extra_forbidden":
        *above, name = _parts(error)
        near = get_close_matches(str(name)[:MAX_NAME], _fields(model, above), n=1)
        return f"there is no such field; did you mean `{near[0]}`?" if near else "there is no such field"
    if error["type"] == "model_type":
        # Its own words name a class of ours.
        return "a JSON object is expected"
    return str(error["msg"]).removeprefix("Value error, ")


def _fields(model: object, path: Sequence[object]) -> list[str]:
    """The fields of what stands at this path of a model."""
    for part in path:
        if isinstance(part, str):
            field = model.model_fields.get(part) if _is_model(model) else None
            model = None if field is None else _model_in(field.annotation)
    return list(model.model_fields) if _is_model(model) else []


def _model_in(annotation: object) -> object:
    """The model that a field holds: as it is, in a list, or beside None."""
    if _is_model(annotation):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part))), None)


def _is_model(annotation: object) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


async def on_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return response(error, request.state.request_id)


async def on_broker_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, BrokerError)
    return response(of_broker(error), request.state.request_id)
