"""Celery's control commands as the drain answers them: `inspect active`, `reserved`, `scheduled` and `query_task`.

Celery's own look at requests that its consumer holds; ours are in the drain. They replace the commands of the same name
in this process' panel and answer in the same form.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from celery.worker.control import Panel

from broker import BadMessage, Broker, BrokerUnavailable, Delayed
from broker.message import decode
from workers.drain import Drain
from workers.lane import HeldJob

log = logging.getLogger(__name__)

#: Most delayed jobs of a queue in one answer, the soonest first; there may be a hundred thousand.
MAX_SCHEDULED = 100

#: Commands that Celery would acknowledge and that would change nothing here; and what to do instead.
UNSERVED = {
    "rate_limit": "bound the batches in the model's settings",
    "time_limit": "set models.<name>.step_timeout_s",
    "add_consumer": "add a model to the settings",
    "cancel_consumer": "stop the worker",
    "pool_grow": "start another worker",
    "pool_shrink": "stop a worker",
    "autoscale": "start or stop workers",
    "revoke_by_stamped_headers": "revoke by id",
}


def register(drain: Drain, broker: Broker, nodename: str, pid: int) -> None:
    """Answer for `drain` from now on."""

    def active(_state: object, **_: object) -> list[dict[str, Any]]:
        return [info(held) for held in drain.snapshot() if held.job.claimed]

    def reserved(_state: object, **_: object) -> list[dict[str, Any]]:
        return [info(held) for held in drain.snapshot() if not held.job.claimed]

    def scheduled(_state: object, **_: object) -> list[dict[str, Any]]:
        try:
            return [
                _scheduled(queue, delayed, nodename)
                for queue in drain.queues()
                for delayed in broker.delayed(queue, MAX_SCHEDULED)
            ]
        except BrokerUnavailable as error:
            log.warning("What is scheduled cannot be told.", extra={"cause": str(error)})
            return []

    def query_task(_state: object, ids: str | Sequence[str], **_: object) -> dict[str, tuple[str, dict[str, Any]]]:
        wanted = {ids} if isinstance(ids, str) else set(ids)
        return {
            held.job.id: ("active" if held.job.claimed else "reserved", info(held))
            for held in drain.snapshot()
            if held.job.id in wanted
        }

    def info(held: HeldJob) -> dict[str, Any]:
        job = held.job
        request = _request(job.id, job.message.task, job.message.headers, held.queue, job.lease.step, nodename)
        return request | {"time_start": job.started_at, "worker_pid": pid}

    for name, instead in UNSERVED.items():
        _replace(name, _refusal(instead))
    _replace("active", active)
    _replace("reserved", reserved)
    _replace("scheduled", scheduled)
    _replace("query_task", query_task)


def _refusal(instead: str) -> Callable[..., dict[str, str]]:
    def refuse(_state: object, **_: object) -> dict[str, str]:
        return {"error": f"not served by Sheaf: {instead}"}

    return refuse


def _scheduled(queue: str, delayed: Delayed, nodename: str) -> dict[str, Any]:
    try:
        message = decode(delayed.message)
        task_id, name, headers = message.id, message.task, message.headers
    except BadMessage as unreadable:
        task_id, name, headers = unreadable.job_id or "", "", {}
    return {
        "eta": datetime.fromtimestamp(delayed.due_at, UTC).isoformat(),
        "priority": delayed.step,
        "request": _request(task_id, name, headers, queue, delayed.step, nodename),
    }


def _request(
    task_id: str, name: str, headers: Mapping[str, object], queue: str, step: int, nodename: str
) -> dict[str, Any]:
    """A call as Celery's commands show it. Source: `celery.worker.request.Request.info`."""
    return {
        "id": task_id,
        "name": name,
        # As the producer wrote them down for monitors: the inputs themselves are large, and nobody else's.
        "args": headers.get("argsrepr", "()"),
        "kwargs": headers.get("kwargsrepr", "{}"),
        "type": name,
        "hostname": nodename,
        "time_start": None,
        "acknowledged": False,
        "delivery_info": {"exchange": "", "routing_key": queue, "priority": step},
        "worker_pid": None,
    }


def _replace(name: str, command: Callable[..., object]) -> None:
    panel: Mapping[str, Callable[..., object]] = Panel.data
    assert name in panel, f"Celery has no control command {name} any more"
    command.__name__ = name
    Panel.data[name] = command
