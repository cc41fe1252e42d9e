"""Embeddings as OpenAI's API has them, for clients that speak that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api import intake, kinds, state, views
from api.body import body_of
from api.dialects import OpenAIRoute
from api.openapi import request_body
from api.problems import described, wrong
from api.schemas import JobRequest
from broker import JobState, Scope
from schemas.embeddings import Embeddings, EmbeddingsRequest

router = APIRouter(tags=["openai"], route_class=OpenAIRoute)


@router.post(
    "/v1/embeddings",
    summary="Embed texts (OpenAI)",
    response_class=Response,
    responses={
        200: {"model": Embeddings},
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
            kinds.JOB_FAILED,
            kinds.QUEUE_FULL,
            kinds.MODEL_FAILED,
            kinds.NOT_IN_TIME,
        ),
    },
    openapi_extra={"requestBody": request_body(EmbeddingsRequest)},
)
async def embed(request: Request) -> Response:
    """One vector a text, in their order; waits for them. A text that cannot be embedded fails the whole request."""
    shared = state.of(request)
    caller = await shared.gate.caller(request, Scope.SUBMIT)
    body = await body_of(request, shared.settings.api.max_payload_bytes)
    wanted = intake.request_of(body, EmbeddingsRequest)
    shared.model(wanted.model)
    if misfit := wanted.misfit(shared.settings.models):
        raise wrong(*misfit)
    many = isinstance(wanted.input, list)
    # The caller waits for the answer: nobody else has to be told.
    job_request = JobRequest.model_validate(
        {"model": wanted.model, "inputs" if many else "input": wanted.input, "webhook": None}
    )
    job = await intake.new_job(request, shared, caller, job_request, body)
    # The broker will hold the job, and thousands may wait.
    del body, job_request
    wanted.input = []
    ended, headers = await intake.answered(request, shared, caller, job)
    answer = wanted.answer(_vectors(ended, headers), ended.input_tokens or 0)
    return views.response(orjson.dumps(answer), 200, headers, ended)


def _vectors(ended: JobState, headers: Mapping[str, str]) -> list[list[float]]:
    """The rows' vectors. Raises `Problem` when one failed."""
    assert ended.result is not None
    result: Any = orjson.loads(ended.result)
    if not ended.many:
        return [result]
    for index, row in enumerate(result):
        if "error" in row:
            raise intake.failed(row["error"]["type"], row["error"]["message"], f"input.{index}", headers)
    return [row["output"] for row in result]
