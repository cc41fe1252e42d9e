"""A job's way as server-sent events: `queued`, `running`, `progress`, and how it ended.

Nothing is kept for it: each event is a state that the job is in, and its id says which. Whoever comes back with
`Last-Event-ID` is told what is later than that.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import orjson
from fastapi import APIRouter
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from starlette.requests import Request
from starlette.responses import Response

from api import kinds, state, views
from api.auth import Caller
from api.jobs import JobId, job_of
from api.problems import described
from broker import BrokerUnavailable, JobState, JobStatus, Scope

#: Seconds between signs of life, so that nothing on the way takes the connection for dead.
ALIVE_EVERY_S = 15.0
#: Seconds between looks for a broker that is away, for the first time and at most.
LOOK_AGAIN_S = 0.25
MAX_LOOK_AGAIN_S = 5.0
#: What clients are told to wait before they connect again, milliseconds.
RETRY_MS = 1000
#: The place of the last event; those before it are `(attempt, rows done)`.
_END = (1 << 31, 0)
_ID = re.compile(r"(\d{1,9})-(\d{1,9})")

router = APIRouter(tags=["jobs"])


@dataclass(frozen=True, slots=True)
class _Event:
    place: tuple[int, int]
    name: str
    data: bytes

    def encode(self) -> bytes:
        event_id = "end" if self.place == _END else f"{self.place[0]}-{self.place[1]}"
        return format_sse_event(data_str=self.data.decode(), event=self.name, id=event_id)


@router.get(
    "/v1/jobs/{job_id}/events",
    summary="Follow a job",
    response_class=Response,
    responses={
        200: {
            "description": "Events `queued`, `running`, `progress` (rows `{done, total}`) and the job's last status; "
            "the data of all others is the job.",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        },
        204: {"description": "`Last-Event-ID` was that of the last event: there is no more."},
        **described(kinds.UNKNOWN_JOB),
    },
    openapi_extra={
        "parameters": [
            {
                "name": "Last-Event-ID",
                "in": "header",
                "schema": {"type": "string"},
                "description": "Id of the last event that was seen; later ones follow.",
            }
        ]
    },
)
async def events(request: Request, job_id: JobId) -> Response:
    """The job's states as they come, as server-sent events (WHATWG HTML, section 9.2); ends with the job."""
    shared = state.of(request)
    caller = await shared.gate.caller(request, Scope.READ)
    await job_of(request, shared, caller, job_id)
    after = _place(request.headers.get("last-event-id", ""))
    if after == _END:
        return Response(status_code=204)
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    if "head" in request.scope["state"]:
        return Response(headers=headers, media_type=EventSourceResponse.media_type)
    return EventSourceResponse(_told(shared, caller, job_id, after), headers=headers)


async def _told(shared: state.ApiState, caller: Caller, job_id: str, after: tuple[int, int]) -> AsyncIterator[bytes]:
    yield format_sse_event(retry=RETRY_MS)
    away_since, pause_s = None, LOOK_AGAIN_S
    with shared.broker.waiter(job_id) as waiter:
        while not shared.envelope.stopping.is_set() and shared.gate.admits(caller):
            try:
                await shared.broker.watch(job_id)
                found = await shared.broker.fetch(job_id)
            except BrokerUnavailable:
                away_since = away_since or time.monotonic()
                if time.monotonic() - away_since >= shared.settings.api.max_wait_s:
                    # The client comes back, to whoever has a broker then.
                    return
                # Woken when its connection stands again; what it says before it serves is no word of that.
                await waiter.wait(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, MAX_LOOK_AGAIN_S)
                yield KEEPALIVE_COMMENT
                continue
            away_since, pause_s = None, LOOK_AGAIN_S
            if found is None:
                return
            for event in _events(found):
                if event.place > after:
                    after = event.place
                    yield event.encode()
            if found.ended:
                return
            if not await waiter.wait(ALIVE_EVERY_S):
                yield KEEPALIVE_COMMENT


def _events(found: JobState) -> list[_Event]:
    """What there is to tell of a job in this state, in order."""
    job = views.job(found)
    if found.ended:
        return [_Event(_END, found.status.value, job)]
    if found.status is JobStatus.QUEUED:
        return [_Event((0, 0), "queued", job)]
    told = [_Event((found.attempt, 0), "running", job)]
    if found.progress is not None:
        told.append(_Event((found.attempt, found.progress[0]), "progress", orjson.dumps(views.progress(found))))
    return told


def _place(event_id: str) -> tuple[int, int]:
    """What an id stands for; before all events for one that is none of ours."""
    if event_id == "end":
        return _END
    found = _ID.fullmatch(event_id)
    return (int(found[1]), int(found[2])) if found else (-1, 0)
