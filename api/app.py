"""The app: routes, error answers, and what lives from start to stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from api import (
    binding,
    deliveries,
    embeddings,
    events,
    health,
    jobs,
    kinds,
    models,
    open_inference,
    openapi,
    problems,
)
from api.auth import Gate
from api.envelope import Envelope
from api.problems import Problem
from api.state import ApiState
from broker import AsyncBroker, BrokerError, queue_name
from configs import Settings
from telemetry.logs import LineWriter
from telemetry.metrics import ApiMetrics
from telemetry.page import WRITE_EVERY_S, MetricsPage, Place

DESCRIPTION = """
Submit a job, then poll it, or wait for it with `Prefer: wait=N`. Each model has a queue on Redis; workers drain it in
batches. Errors are `application/problem+json` with a stable `type`.
"""

#: FastAPI's own pages, when they are switched off.
NO_PAGES: dict[str, Any] = {"docs_url": None, "openapi_url": None}


def create_app(settings: Settings, place: Place | None = None) -> Envelope:
    """The ASGI application. It needs no broker until the first request. `place` is for one of several processes."""
    registry = CollectorRegistry()
    metrics = ApiMetrics(registry)
    page = MetricsPage(registry, place)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        broker = await AsyncBroker.open(
            settings.broker.server_url,
            key_prefix=settings.broker.key_prefix,
            max_queue_depth=settings.broker.max_queue_depth,
            result_ttl_s=settings.api.result_ttl_s,
            read_timeout_s=settings.broker.read_timeout_s,
            queues=[queue_name(name) for name in settings.models],
        )
        broker.listen()
        envelope.on_stop = broker.wake_waiters
        gate = Gate(
            broker, required=settings.auth.mode == "keys", open_without_keys=binding.is_loopback(settings.api.host)
        )
        metrics.count_waiters(lambda: broker.waiters)
        tasks = [asyncio.create_task(gate.keep_fresh()), asyncio.create_task(_keep_written(page, envelope))]
        app.state.sheaf = ApiState(settings, broker, gate, page, metrics, envelope)
        yield
        for task in tasks:
            task.cancel()
        envelope.flush()
        page.write()
        await broker.close()

    pages = {"docs_url": "/docs", "openapi_url": "/openapi.json"} if settings.api.docs else NO_PAGES
    app = _App(
        title="Sheaf", version=version("sheaf"), description=DESCRIPTION, lifespan=lifespan, redoc_url=None, **pages
    )
    # A page has one address: few clients follow a redirect with their body.
    app.router.redirect_slashes = False
    for part in (jobs, events, deliveries, models, embeddings, open_inference, health):
        app.include_router(part.router)
    if settings.api.docs:
        app.add_route("/", _to_docs, include_in_schema=False)
    if settings.api.metrics != "off":
        app.include_router(health.metrics_router)
    app.add_exception_handler(Problem, problems.on_problem)
    app.add_exception_handler(BrokerError, problems.on_broker_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    envelope = Envelope(
        app, metrics, LineWriter(settings.logging.format, service="api"), {("POST", "/v1/jobs"): jobs.submit}
    )
    return envelope


def document(settings: Settings) -> dict[str, Any]:
    """The OpenAPI document of the API with these settings."""
    app = create_app(settings).app
    assert isinstance(app, FastAPI)
    return app.openapi()


async def _keep_written(page: MetricsPage, envelope: Envelope) -> None:
    while True:
        await asyncio.sleep(WRITE_EVERY_S)
        envelope.flush()
        page.write()


class _App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        return openapi.document(self)


async def _to_docs(_: Request) -> Response:
    return RedirectResponse("/docs")


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return problems.response(problems.invalid(error.errors()), request.state.request_id)


async def _on_http(request: Request, error: Exception) -> Response:
    """What the router itself refuses."""
    assert isinstance(error, HTTPException)
    kind = {404: kinds.NOT_FOUND, 405: kinds.METHOD_NOT_ALLOWED}.get(error.status_code, kinds.BAD_REQUEST)
    headers = {name.lower(): value for name, value in (error.headers or {}).items()}
    if kind is kinds.METHOD_NOT_ALLOWED:
        # The router knows the methods of one route; a page may have several.
        headers["allow"] = ", ".join(openapi.methods(request.app, request.url.path)) or headers.get("allow", "GET")
    problem = Problem(kind, f"{request.method} {request.url.path}: see /docs", headers=headers)
    return problems.response(problem, request.state.request_id)
