"""The app: routes, error answers, and what lives from start to stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from api import (
    batches,
    binding,
    deliveries,
    embeddings,
    events,
    files,
    health,
    jobs,
    kinds,
    models,
    open_inference,
    openapi,
    problems,
    state,
)
from api.auth import Gate
from api.dialects import DialectRoute, OpenAIRoute
from api.envelope import Endpoint, Envelope
from api.problems import Problem, shown
from broker import AsyncBroker, BrokerError, Scope, queue_name
from bulk.client import open_broker
from configs import Settings
from telemetry.logs import LineWriter
from telemetry.metrics import ApiMetrics
from telemetry.page import WRITE_EVERY_S, MetricsPage, Place

log = logging.getLogger(__name__)

DESCRIPTION = """
Submit a job, then poll it, or wait for it with `Prefer: wait=N`. Each model has a queue on Redis; workers drain it in
batches. Errors are `application/problem+json` with a stable `type`.
"""

#: Seconds between looks for jobs whose time is over.
EXPIRE_EVERY_S = 1.0
#: FastAPI's own pages, when they are switched off.
NO_PAGES: dict[str, Any] = {"docs_url": None, "openapi_url": None}


def create_app(settings: Settings, place: Place | None = None) -> Envelope:
    """The ASGI application. It needs no broker until the first request. `place` is for one of several processes."""
    registry = CollectorRegistry()
    metrics = ApiMetrics(registry)
    page = MetricsPage(registry, place)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with open_broker(settings, [queue_name(name) for name in settings.models]) as broker:
            broker.listen()
            envelope.on_stop = broker.wake_waiters
            gate = Gate(
                broker, required=settings.auth.mode == "keys", open_without_keys=binding.is_loopback(settings.api.host)
            )
            metrics.count_waiters(lambda: broker.waiters)
            duties = (gate.keep_fresh(), _keep_written(page, envelope), _keep_expiring(broker))
            tasks = [asyncio.create_task(duty) for duty in duties]
            app.state.sheaf = state.ApiState(settings, broker, gate, page, metrics, envelope)
            yield
            for task in tasks:
                task.cancel()
            envelope.flush()
            page.write()

    pages = {"docs_url": "/docs", "openapi_url": "/openapi.json"} if settings.api.docs else NO_PAGES
    app = _App(
        title="Sheaf", version=version("sheaf"), description=DESCRIPTION, lifespan=lifespan, redoc_url=None, **pages
    )
    # A page has one address: few clients follow a redirect with their body.
    app.router.redirect_slashes = False
    for part in (jobs, events, deliveries, models, embeddings, files, batches, open_inference, health):
        app.include_router(part.router)
    if settings.api.docs:
        app.add_route("/", _to_docs, include_in_schema=False)
    if settings.api.metrics != "off":
        app.include_router(health.metrics_router)
    app.add_exception_handler(Problem, problems.on_problem)
    app.add_exception_handler(BrokerError, problems.on_broker_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    envelope = Envelope(app, metrics, LineWriter(settings.logging.format, service="api"), _direct)
    return envelope


def document(settings: Settings) -> dict[str, Any]:
    """The OpenAPI document of the API with these settings."""
    app = create_app(settings).app
    assert isinstance(app, FastAPI)
    return app.openapi()


def _direct(method: str, path: str) -> tuple[str, Endpoint] | None:
    """What most requests are for: submits, polls and waits."""
    if method == "POST" and path == "/v1/jobs":
        return path, jobs.submit
    if method == "GET" and path.startswith("/v1/jobs/"):
        job_id = path.removeprefix("/v1/jobs/")
        if job_id and "/" not in job_id:
            return "/v1/jobs/{job_id}", partial(jobs.read, job_id=job_id)
    return None


async def _keep_written(page: MetricsPage, envelope: Envelope) -> None:
    while True:
        await asyncio.sleep(WRITE_EVERY_S)
        envelope.flush()
        page.write()


async def _keep_expiring(broker: AsyncBroker) -> None:
    """Jobs end when their time is over, also those that nobody reads and no worker takes."""
    while True:
        await asyncio.sleep(EXPIRE_EVERY_S)
        try:
            await broker.expire_due()
        except BrokerError as error:
            log.debug("Jobs whose time is over cannot be ended now.", extra={"cause": str(error)})
        except Exception:
            log.exception("Ending the jobs whose time is over failed; it is tried again.")


class _App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        return openapi.document(self)


async def _to_docs(_: Request) -> Response:
    return RedirectResponse("/docs")


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problem = problems.invalid(error.errors())
    try:
        # The framework looks at the query before anything of ours; strangers learn nothing of what it may hold.
        await state.of(request).gate.caller(request, Scope.READ)
    except (Problem, BrokerError) as stranger:
        problem = problems.of(stranger)
    if isinstance(route := request.scope["route"], DialectRoute):
        problem = route.in_its_words(problem)
    return problems.response(problem, request.state.request_id)


async def _on_http(request: Request, error: Exception) -> Response:
    """What the router itself refuses."""
    assert isinstance(error, HTTPException)
    kind = {404: kinds.NOT_FOUND, 405: kinds.METHOD_NOT_ALLOWED}.get(error.status_code, kinds.BAD_REQUEST)
    headers = {name.lower(): value for name, value in (error.headers or {}).items()}
    if kind is kinds.METHOD_NOT_ALLOWED:
        # The router knows the methods of one route; a page may have several.
        headers["allow"] = ", ".join(openapi.methods(request.app, request.url.path)) or headers.get("allow", "GET")
    told = f"{request.method} {shown(request.url.path)}"
    where = ": see /docs" if request.app.docs_url else ""
    problem = Problem(kind, told + where, headers=headers)
    if request.url.path.startswith("/v1/"):
        # A client of OpenAI's may look for what is not here.
        problem.extra = {"error": OpenAIRoute.error(problem)}
    return problems.response(problem, request.state.request_id)
