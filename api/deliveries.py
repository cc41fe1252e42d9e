"""How the calls of a job's or batch's webhook went."""

from __future__ import annotations

from collections.abc import Sequence

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api import kinds, state, views
from api.batches import BatchId, own_batch
from api.jobs import JobId, own_job
from api.problems import described
from api.schemas import DeliveryList
from broker import BatchEvent, JobEvent, Scope, told_of_end
from broker.deliveries import Delivery
from broker.webhooks import Notification

router = APIRouter(tags=["jobs"])


@router.get(
    "/v1/jobs/{job_id}/deliveries",
    summary="Read how a job's webhook was called",
    response_class=Response,
    responses={200: {"model": DeliveryList}, **described(kinds.UNKNOWN_JOB)},
)
async def list_deliveries(request: Request, job_id: JobId) -> Response:
    """One entry for each end of the job that its webhook is told of, with every attempt. None for a job that has not
    ended, or has no webhook.
    """
    shared = state.of(request)
    job = await own_job(request, shared, job_id)
    to_come = Notification.of(job.webhook, job.status, job.id, job.model, job.finished_at or 0.0) if job.ended else None
    return _listed(await shared.broker.deliveries.of(job_id, JobEvent, to_come))


@router.get(
    "/v1/batches/{batch_id}/deliveries",
    summary="Read how a batch's webhook was called",
    response_class=Response,
    responses={200: {"model": DeliveryList}, **described(kinds.UNKNOWN_BATCH)},
)
async def list_batch_deliveries(request: Request, batch_id: BatchId) -> Response:
    """As for a job."""
    batch = await own_batch(request, batch_id, Scope.READ)
    to_come = told_of_end(batch) if batch.ended else None
    return _listed(await state.of(request).broker.deliveries.of(batch_id, BatchEvent, to_come))


def _listed(deliveries: Sequence[Delivery]) -> Response:
    return views.response(orjson.dumps({"object": "list", "data": [_view(one) for one in deliveries]}), 200)


def _view(delivery: Delivery) -> dict[str, object]:
    told = delivery.notification
    return {
        "id": told.id,
        "object": "delivery",
        "event": told.event.value,
        "url": told.url,
        "state": delivery.state.value,
        "created_at": views.timestamp(told.at),
        "next_attempt_at": views.timestamp(delivery.next_attempt_at),
        "put_off": None if delivery.put_off is None else delivery.put_off.reason,
        "attempts": [
            {
                "at": views.timestamp(attempt.at),
                "duration_ms": attempt.duration_ms,
                "status": attempt.status,
                "error": attempt.error,
            }
            for attempt in delivery.attempts
        ],
    }
