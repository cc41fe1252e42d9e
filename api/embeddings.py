"""Embeddings as OpenAI's API has them, for clients that speak that.

Source: OpenAI API reference, "Create embeddings".
"""

from __future__ import annotations

import base64
import math
import struct
from typing import Any, Literal

import orjson
from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator
from starlette.requests import Request
from starlette.responses import Response

from api import intake, kinds, problems, state, views
from api.body import body_of
from api.dialects import OpenAIRoute
from api.openapi import request_body
from api.problems import described, wrong
from api.schemas import JobRequest
from broker import JobState, Scope
from configs import ModelSettings

#: Most texts of one request.
MAX_TEXTS = 2048

router = APIRouter(tags=["openai"], route_class=OpenAIRoute)


class EmbeddingsRequest(BaseModel):
    """One text, or up to 2048."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"model": "minilm", "input": ["a text", "another one"]}]},
    )

    model: str
    input: str | list[str] = Field(min_length=1, max_length=None, description="A text, or a list of 1 to 2048 texts.")
    encoding_format: Literal["float", "base64"] = Field(
        default="float", description="base64: little-endian 32-bit floats."
    )
    dimensions: int | None = Field(
        default=None,
        strict=True,
        ge=1,
        description="Cut vectors to this length, where `matryoshka_dimensions` allows it.",
    )
    user: str | None = Field(default=None, description="Taken, and not looked at.")

    @field_validator("input", mode="before")
    @classmethod
    def _texts(cls, value: object) -> object:
        rows = value if isinstance(value, list) else [value]
        if any(isinstance(row, int | list) and not isinstance(row, bool) for row in rows):
            raise ValueError("lists of tokens are not taken, for only the model knows its tokens: send texts")
        if not rows or any(row == "" for row in rows):
            raise ValueError("there must be at least one text, and none may be empty")
        if len(rows) > MAX_TEXTS:
            raise ValueError(f"there may be {MAX_TEXTS} texts in a request, not {len(rows)}")
        if not all(isinstance(row, str) for row in rows):
            raise ValueError("send a text, or a list of texts")
        return value


class EmbeddingView(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class UsageView(BaseModel):
    prompt_tokens: int
    total_tokens: int


class Embeddings(BaseModel):
    object: Literal["list"]
    data: list[EmbeddingView]
    model: str
    usage: UsageView


_REQUESTS = TypeAdapter(EmbeddingsRequest)


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
    try:
        wanted = _REQUESTS.validate_python(intake.parsed(body, EmbeddingsRequest))
    except ValidationError as error:
        raise problems.of_validation(error, EmbeddingsRequest) from None
    _check_model(shared, wanted)
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
    tokens = ended.input_tokens or 0
    answer = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _encoded(vector, wanted)}
            for index, vector in enumerate(_vectors(ended))
        ],
        "model": wanted.model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return views.response(orjson.dumps(answer), 200, headers, ended)


def _check_model(shared: state.ApiState, wanted: EmbeddingsRequest) -> None:
    model = shared.model(wanted.model)
    if model.task != "embedding":
        fit = ", ".join(name for name, other in shared.settings.models.items() if other.task == "embedding")
        raise wrong("model", f"{wanted.model} makes no embeddings; those that do: {fit or 'none'}")
    if wanted.dimensions is not None and wanted.dimensions not in model.matryoshka_dimensions:
        raise wrong("dimensions", _not_allowed(wanted.model, model))


def _not_allowed(name: str, model: ModelSettings) -> str:
    allowed = model.matryoshka_dimensions
    if not allowed:
        return f"vectors of {name} cannot be cut: leave it out"
    return f"vectors of {name} can be cut to {', '.join(map(str, allowed))}"


def _vectors(ended: JobState) -> list[list[float]]:
    """The rows' vectors. Raises `Problem` when one failed."""
    assert ended.result is not None
    result: Any = orjson.loads(ended.result)
    if not ended.many:
        return [result]
    for index, row in enumerate(result):
        if "error" in row:
            raise intake.failed(row["error"]["type"], row["error"]["message"], f"input.{index}")
    return [row["output"] for row in result]


def _encoded(vector: list[float], wanted: EmbeddingsRequest) -> list[float] | str:
    if wanted.dimensions is not None:
        vector = vector[: wanted.dimensions]
        # Of unit length again, as Kusupati et al., "Matryoshka Representation Learning", 2022, use them.
        length = math.hypot(*vector) or 1.0
        vector = [value / length for value in vector]
    if wanted.encoding_format == "float":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
