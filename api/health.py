"""For probes and scrapes: is the process alive, can it serve, and what does it count."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

import orjson
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from api import kinds, state
from api.problems import Problem, described
from api.schemas import Readiness
from broker import BrokerError, BrokerUnavailable, Scope, queue_name
from broker.message import CALLBACKS, WEBHOOKS

log = logging.getLogger(__name__)

#: Seconds after which a broker that does not answer makes the service unready; whoever probes waits little longer.
READY_WITHIN_S = 2.0

router = APIRouter(tags=["health"])
#: Apart, for it has a switch of its own.
metrics_router = APIRouter(tags=["health"])


@router.get("/livez", summary="Is the process alive?", response_class=PlainTextResponse)
async def livez() -> Response:
    """200 while the process answers at all; it looks at nothing else."""
    return PlainTextResponse("ok\n")


@router.get(
    "/readyz",
    summary="Can jobs be served?",
    response_class=Response,
    responses={200: {"model": Readiness}, **described(kinds.NOT_READY, kinds.BROKER_UNAVAILABLE)},
)
async def readyz(request: Request) -> Response:
    """200 when the broker takes jobs and every model is served by a worker.

    A model that could not be loaded anywhere does not hold the others back: it is listed as `failed`. Models are named
    to nobody without a key, where keys are in force.
    """
    return Response(orjson.dumps(await readiness(request)), media_type="application/json")


async def readiness(request: Request) -> dict[str, object]:
    """What `/readyz` answers. Raises `Problem` or `BrokerUnavailable` while jobs cannot be served."""
    shared = state.of(request)
    if shared.envelope.stopping.is_set():
        raise Problem(kinds.NOT_READY, "the server is stopping")
    try:
        async with asyncio.timeout(READY_WITHIN_S):
            await shared.broker.probe()
            announced = await shared.announced()
    except TimeoutError:
        raise BrokerUnavailable(f"no answer within {READY_WITHIN_S:g} s") from None
    models = {name: state.model_state(announced.get(name, [])) for name in shared.settings.models}
    ready = "ready" in models.values() and {"ready", "failed"}.issuperset(models.values())
    if not await _may_know(request, shared):
        if not ready:
            raise Problem(kinds.NOT_READY, "not all models are served")
        return {"status": "ready", "models": {}}
    if not ready:
        waiting = ", ".join(f"{name} is {found}" for name, found in models.items() if found != "ready")
        raise Problem(kinds.NOT_READY, f"not all models are served: {waiting}", {"models": models})
    return {"status": "ready", "models": models}


async def _may_know(request: Request, shared: state.ApiState) -> bool:
    with suppress(Problem):
        await shared.gate.caller(request, Scope.READ)
        return True
    return False


@metrics_router.get("/metrics", summary="Metrics for Prometheus", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Of all processes of the API; queue depths are asked of the broker for each scrape."""
    shared = state.of(request)
    if shared.settings.api.metrics == "keys":
        await shared.gate.caller(request, Scope.METRICS)
    queues = [*(queue_name(name) for name in shared.settings.models), CALLBACKS, WEBHOOKS]
    try:
        for depth in await shared.broker.overview.queue_depths(queues):
            shared.metrics.set_queue_depth(depth.queue, depth.priority, depth.depth)
        for queue, count in (await shared.broker.overview.dead_letters(queues)).items():
            shared.metrics.set_dead_letters(queue, count)
    except BrokerError as error:
        shared.metrics.forget_queues()
        log.warning("Queue depths are not known.", extra={"cause": str(error)})
    shared.envelope.flush()
    return Response(shared.page.text(), media_type=CONTENT_TYPE_LATEST)
