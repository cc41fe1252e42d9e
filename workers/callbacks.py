"""Carries canvases on: what `link`, `link_error`, `chain` and `chord` ask for once a job of ours has ended.

It runs in the io worker, as an executor like any model, so its messages are leased, retried after a crash and buried
like all others. The calls themselves are made by Celery's own code. They are made at least once: a worker that dies
between a call and its settlement makes it again, with the same task id.

Source: `celery.app.trace.build_tracer` (what follows a success), `celery.backends.base.Backend.mark_as_*`.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Sequence
from typing import Any

import kombu.exceptions
import redis
from celery import Celery, group, signature, states
from celery.app.task import Context

from broker import BrokerUnavailable
from broker.faults import is_passing, translated
from inference import Encoded, RowError
from workers.backoff import Backoff

log = logging.getLogger(__name__)

_STATES = (states.SUCCESS, states.FAILURE, states.REVOKED)


class CallbackCaller:
    """An executor whose rows are ended jobs, as `workers.outbox` describes them. `app` knows where calls are sent."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._backend: Any = app.backend

    def encode(self, rows: Sequence[object]) -> list[Encoded | RowError]:
        return [_checked(row) for row in rows]

    def collate(self, batch: Sequence[Encoded]) -> None:
        """There is nothing to make ready."""

    def infer(self, batch: Sequence[Encoded], collated: None) -> list[object]:
        return [self._carry_on(row.data) for row in batch]

    def finish(self, inferred: list[object]) -> list[object]:
        return inferred

    def _carry_on(self, ended: Any) -> object:
        backoff = Backoff()
        while True:
            try:
                with translated():
                    self._call(ended)
                return None
            except Exception as error:
                if not _passes(error):
                    return RowError.of(error)
                log.warning("The broker is away; callbacks wait for it.", extra={"cause": str(error)})
                backoff.wait(threading.Event())

    def _call(self, ended: dict[str, Any]) -> None:
        request = Context(ended["request"], delivery_info={})
        match ended["state"]:
            case states.SUCCESS:
                self._succeeded(request, ended["result"])
            case state:
                self._failed(request, state, ended["result"], ended["traceback"])

    def _succeeded(self, request: Context, result: object) -> None:
        callbacks: list[Any] = list(request.callbacks or ())
        calls = [signature(call, app=self._app) for call in callbacks]
        family: dict[str, Any] = {"parent_id": request.id, "root_id": request.root_id or request.id}
        if len(calls) > 1:
            # Groups keep their own results together; the others travel as one.
            for call in calls:
                if isinstance(call, group):
                    call.apply_async((result,), **family)
            calls = [group([call for call in calls if not isinstance(call, group)], app=self._app)]
        for call in calls:
            call.apply_async((result,), **family)
        chain: list[Any] = list(request.chain or ())
        if chain:
            *rest, following = chain
            signature(following, app=self._app).apply_async((result,), chain=rest, **family)
        self._backend.mark_as_done(request.id, result, request=request, store_result=False)

    def _failed(self, request: Context, state: str, failure: object, traceback: str | None) -> None:
        """Tell the chord, fail the rest of the chain, call the errbacks; of a job that was dropped, no errbacks."""
        self._backend.mark_as_failure(
            # The result of the job itself is ours and stored already. Celery stores those of the chain only together
            # with it, so it gets an id that nobody asks for.
            str(uuid.uuid5(uuid.NAMESPACE_OID, f"chain of {request.id}")),
            self._backend.exception_to_python(failure),
            traceback=traceback,
            request=request,
            call_errbacks=state == states.FAILURE,
            state=state,
        )


def _passes(error: Exception) -> bool:
    """Whether the same call may succeed later. Kombu's OperationalError wraps what never will, too."""
    cause = error.__cause__ if isinstance(error, kombu.exceptions.OperationalError) else error
    if isinstance(cause, redis.ResponseError):
        return is_passing(cause)
    return isinstance(cause, (BrokerUnavailable, redis.ConnectionError, redis.TimeoutError, OSError))


def _checked(row: object) -> Encoded | RowError:
    match row:
        case {"request": {"id": str()}, "state": state, "result": _, "traceback": str() | None} if state in _STATES:
            return Encoded(row)
    return RowError("BadMessage", "this is no ended job")
