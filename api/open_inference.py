"""The Open Inference Protocol, version 2, over REST: models as tensors in and out.

An embedding model takes the tensor `text` and gives `embedding`. Other models declare no tensors: theirs are `input`
and `output`, whose elements are JSON documents, one a row.

Source: KServe, "Open Inference Protocol (V2)", REST part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.metadata import version as installed_version
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from api import health, intake, kinds, problems, state, views
from api.body import body_of
from api.dialects import OpenInferenceRoute
from api.openapi import request_body
from api.problems import MAX_NAME, Problem, described, shown, wrong
from api.schemas import MAX_ROWS, JobRequest, PriorityName
from broker import JobState, Scope
from configs import ModelSettings

router = APIRouter(tags=["open inference"], route_class=OpenInferenceRoute)


class Tensor(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    shape: list[Annotated[int, Field(strict=True, ge=0)]] = Field(min_length=1)
    datatype: str
    parameters: dict[str, Any] = Field(default_factory=dict)
    data: list[Any]


class WantedOutput(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    parameters: dict[str, Any] = Field(default_factory=dict)


class InferParameters(BaseModel):
    """As in a job."""

    model_config = ConfigDict(extra="forbid")

    priority: PriorityName | None = None
    timeout_s: float | None = Field(default=None, strict=True, gt=0, le=604_800)


class InferRequest(BaseModel):
    """One tensor of rows."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a text"]}]}]
        },
    )

    id: str | None = None
    parameters: InferParameters = InferParameters()
    inputs: list[Tensor] = Field(min_length=1, max_length=1)
    outputs: list[WantedOutput] = Field(default_factory=list, max_length=1)


class OutputTensor(BaseModel):
    name: str
    shape: list[int]
    datatype: str
    data: list[Any]


class InferAnswer(BaseModel):
    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[OutputTensor]


class ServerMetadata(BaseModel):
    name: Literal["sheaf"]
    version: str
    extensions: list[str]


class TensorMetadata(BaseModel):
    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(BaseModel):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class Live(BaseModel):
    live: bool


class Ready(BaseModel):
    ready: bool


class ModelReady(BaseModel):
    name: str
    ready: bool


_REQUESTS = TypeAdapter(InferRequest)
_UNKNOWN = described(kinds.UNKNOWN_MODEL)


@router.get("/v2", summary="The server", response_class=Response, responses={200: {"model": ServerMetadata}})
async def server(request: Request) -> Response:
    """Its name and version. It has no extensions."""
    await state.of(request).gate.caller(request, Scope.READ)
    return _json({"name": "sheaf", "version": installed_version("sheaf"), "extensions": []})


@router.get("/v2/health/live", summary="Is it alive?", response_class=Response, responses={200: {"model": Live}})
async def live() -> Response:
    """200 while the process answers at all."""
    return _json({"live": True})


@router.get(
    "/v2/health/ready",
    summary="Can it serve?",
    response_class=Response,
    responses={200: {"model": Ready}, **described(kinds.NOT_READY, kinds.BROKER_UNAVAILABLE)},
)
async def ready(request: Request) -> Response:
    """200 when `/readyz` is."""
    await health.readiness(request)
    return _json({"ready": True})


@router.get(
    "/v2/models/{name}",
    summary="A model's tensors",
    response_class=Response,
    responses={200: {"model": ModelMetadata}, **_UNKNOWN},
)
@router.get(
    "/v2/models/{name}/versions/{version}",
    summary="A model's tensors, by version",
    response_class=Response,
    responses={200: {"model": ModelMetadata}, **_UNKNOWN},
)
async def metadata(request: Request, name: str, version: str | None = None) -> Response:
    """What goes in and what comes out."""
    shared = state.of(request)
    await shared.gate.caller(request, Scope.READ)
    model = await _model(shared, name, version)
    text = model.task == "embedding"
    tensors = (("text", "BYTES", [-1]), ("embedding", "FP32", [-1, -1])) if text else _DOCUMENTS
    described_tensors = [{"name": tensor, "datatype": kind, "shape": shape} for tensor, kind, shape in tensors]
    return _json(
        {
            "name": name,
            "versions": [model.version],
            "platform": f"sheaf_{model.task or 'handler'}",
            "inputs": described_tensors[:1],
            "outputs": described_tensors[1:],
        }
    )


_DOCUMENTS = (("input", "BYTES", [-1]), ("output", "BYTES", [-1]))


@router.get(
    "/v2/models/{name}/ready",
    summary="Is a model served?",
    response_class=Response,
    responses={200: {"model": ModelReady}, **described(kinds.UNKNOWN_MODEL, kinds.NOT_READY)},
)
@router.get(
    "/v2/models/{name}/versions/{version}/ready",
    summary="Is a model served, by version?",
    response_class=Response,
    responses={200: {"model": ModelReady}, **described(kinds.UNKNOWN_MODEL, kinds.NOT_READY)},
)
async def model_ready(request: Request, name: str, version: str | None = None) -> Response:
    """200 when a worker serves it."""
    shared = state.of(request)
    await shared.gate.caller(request, Scope.READ)
    await _model(shared, name, version)
    found = state.model_state((await shared.announced()).get(name, []))
    if found != "ready":
        raise Problem(kinds.NOT_READY, f"{name} is {found}", {"name": name, "ready": False})
    return _json({"name": name, "ready": True})


_INFER: dict[str, Any] = {
    "response_class": Response,
    "responses": {
        200: {"model": InferAnswer},
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
    "openapi_extra": {"requestBody": request_body(InferRequest)},
}


@router.post("/v2/models/{name}/infer", summary="Infer (Open Inference)", **_INFER)
@router.post("/v2/models/{name}/versions/{version}/infer", summary="Infer (Open Inference), by version", **_INFER)
async def infer(request: Request, name: str, version: str | None = None) -> Response:
    """Rows in, rows out, in one request that waits. A row that cannot be served fails it whole."""
    shared = state.of(request)
    caller = await shared.gate.caller(request, Scope.SUBMIT)
    if "inference-header-content-length" in request.headers:
        raise Problem(kinds.MEDIA_TYPE_REFUSED, "binary tensors are not taken: send `data` as JSON")
    body = await body_of(request, shared.settings.api.max_payload_bytes)
    model = await _model(shared, name, version)
    try:
        wanted = _REQUESTS.validate_python(intake.parsed(body, InferRequest))
        rows = _rows(wanted.inputs[0], model)
        given = wanted.parameters
        job_request = JobRequest(
            model=name, inputs=rows, priority=given.priority, timeout_s=given.timeout_s, webhook=None
        )
    except ValidationError as error:
        raise problems.of_validation(error, InferRequest) from None
    embeds = model.task == "embedding"
    output = "embedding" if embeds else "output"
    if wanted.outputs and wanted.outputs[0].name != output:
        raise wrong("outputs.0.name", f"{name} gives {output!r}")
    job = await intake.new_job(request, shared, caller, job_request, body)
    # The broker will hold the job, and thousands may wait.
    del body, rows, job_request
    wanted.inputs = []
    ended, headers = await intake.answered(request, shared, caller, job)
    answer: dict[str, object] = {"model_name": name, "model_version": ended.version or model.version}
    if wanted.id is not None:
        answer["id"] = wanted.id
    answer["outputs"] = [{"name": output, **_tensor(_outputs(ended, headers), embeds)}]
    return views.response(orjson.dumps(answer), 200, headers, ended)


async def _model(shared: state.ApiState, name: str, version: str | None) -> ModelSettings:
    model = shared.model(name)
    if version is not None and version != model.version:
        raise Problem(kinds.UNKNOWN_MODEL, f"{name} is served in version {model.version}, not {shown(version)}")
    return model


def _rows(tensor: Tensor, model: ModelSettings) -> list[object]:
    """The rows of a request's tensor. Raises `Problem` for one that is not as the model's metadata says."""
    name = "text" if model.task == "embedding" else "input"
    path = "inputs.0"
    if tensor.name != name:
        raise wrong(f"{path}.name", f"the model takes {name!r}")
    if tensor.datatype != "BYTES":
        raise wrong(f"{path}.datatype", "it is BYTES: texts as JSON strings")
    if tensor.parameters.keys() & {"binary_data_size", "shared_memory_region"}:
        raise wrong(f"{path}.parameters", "binary tensors and shared memory are not taken: send `data` as JSON")
    rows = tensor.data
    if not 1 <= len(rows) <= MAX_ROWS or math.prod(tensor.shape) != len(rows):
        said = f"{str(tensor.shape)[:MAX_NAME]} does not fit {len(rows)} elements; there may be 1 to {MAX_ROWS}"
        raise wrong(f"{path}.shape", said)
    for index, row in enumerate(rows):
        if not isinstance(row, str):
            raise wrong(f"{path}.data.{index}", "it must be a string")
    return rows if model.task == "embedding" else [_document(row, f"{path}.data.{i}") for i, row in enumerate(rows)]


def _document(row: str, path: str) -> object:
    try:
        return orjson.loads(row)
    except orjson.JSONDecodeError as error:
        raise wrong(path, f"the model takes JSON documents, and this is none: {error}") from None


def _outputs(ended: JobState, headers: Mapping[str, str]) -> list[Any]:
    assert ended.result is not None
    rows: list[dict[str, Any]] = orjson.loads(ended.result)
    for index, row in enumerate(rows):
        if "error" in row:
            raise intake.failed(row["error"]["type"], row["error"]["message"], f"inputs.0.data.{index}", headers)
    return [row["output"] for row in rows]


def _tensor(rows: list[Any], embeds: bool) -> dict[str, object]:
    if embeds:
        flat = [value for row in rows for value in row]
        return {"datatype": "FP32", "shape": [len(rows), len(rows[0])], "data": flat}
    return {"datatype": "BYTES", "shape": [len(rows)], "data": [orjson.dumps(row).decode() for row in rows]}


def _json(content: object) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")
