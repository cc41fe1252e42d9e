"""Which models there are, and how they fare."""

from __future__ import annotations

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api import kinds, state
from api.dialects import OpenAIRoute
from api.problems import described
from api.schemas import ModelList, ModelView
from broker import ModelInfo, Scope, queue_name
from configs import ModelSettings
from schemas import rows

router = APIRouter(tags=["models"], route_class=OpenAIRoute)


@router.get("/v1/models", summary="List the models", response_class=Response, responses={200: {"model": ModelList}})
async def list_all(request: Request) -> Response:
    """Every model of this service, with its state over all workers."""
    shared = state.of(request)
    await shared.gate.caller(request, Scope.READ)
    announced = await shared.announced()
    models = [
        _view(name, model, announced.get(name, []), shared.started_at) for name, model in shared.settings.models.items()
    ]
    return _json({"object": "list", "data": models})


@router.get(
    "/v1/models/{name}",
    summary="Read a model",
    response_class=Response,
    responses={200: {"model": ModelView}, **described(kinds.UNKNOWN_MODEL)},
)
async def read(request: Request, name: str) -> Response:
    """One model, with its state over all workers."""
    shared = state.of(request)
    await shared.gate.caller(request, Scope.READ)
    return _json(_view(name, shared.model(name), (await shared.announced()).get(name, []), shared.started_at))


def _view(name: str, model: ModelSettings, infos: list[ModelInfo], created: int) -> dict[str, object]:
    overall = state.model_state(infos)
    told = next((info for info in infos if info.state == overall), None)
    return {
        "id": name,
        "name": name,
        "object": "model",
        "created": created,
        "owned_by": "sheaf",
        "version": told.version if told else model.version,
        "task": model.task,
        "queue": queue_name(name),
        "state": overall,
        "workers": sum(info.state == "ready" for info in infos),
        "precision": told.precision if told else model.precision,
        "error": next((info.error for info in infos if info.error), None),
        "max_batch_size": model.max_batch_size,
        "max_batch_tokens": model.max_batch_tokens,
        "max_wait_ms": model.max_wait_ms,
        "preferred_batch_sizes": model.preferred_batch_sizes,
        "adaptive_wait": model.adaptive_wait,
        "input_schema": rows.input_schema(model.task),
    }


def _json(content: object) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")
