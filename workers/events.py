"""Celery's task events, so that Flower and `celery events` see each job as a task.

Three events a job would cost as much as everything else of a job together, so a thread of its own publishes whatever
has come together as one `task.multi`, which is the form that Celery's own dispatcher gives to buffered events.
Events are news, not state: when the broker is away or they come too fast, they are dropped and counted.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from celery import Celery
from celery.utils.time import utcoffset

from broker import Broker, BrokerUnavailable, JobStatus
from workers.jobs import Burial, Ending, Job
from workers.threads import core_thread

log = logging.getLogger(__name__)

#: Seconds for which events are gathered before they are published: a publish costs as much as a hundred events.
GATHER_S = 0.05
#: Most events in one message, so that no consumer gets more than some hundred kilobytes at once.
MAX_TOGETHER = 1000
#: Batches of events that may wait; more are dropped.
MAX_WAITING = 512

_Event = dict[str, object]
#: Makes events; takes the fields that all of them share.
_Maker = Callable[[_Event], list[_Event]]


class TaskEvents:
    """Collects events from any thread and publishes them from its own, while `enabled()` says that they are wanted."""

    def __init__(
        self,
        broker: Broker,
        app: Celery,
        hostname: str,
        enabled: Callable[[], bool],
        dropped: Callable[[int], None],
    ) -> None:
        self._broker = broker
        self._clock = app.clock  # type: ignore[attr-defined]  # missing from the stubs
        self._hostname = hostname
        self._enabled = enabled
        self._dropped = dropped
        self._pid = os.getpid()
        self._waiting: deque[tuple[float, int, _Maker]] = deque()
        self._something = threading.Event()
        self._stopping = threading.Event()
        self._thread = core_thread("events", self._run)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Publish what waits, then end."""
        self._stopping.set()
        self._something.set()
        self._thread.join(timeout_s)

    def received(self, jobs: Sequence[Job]) -> None:
        """Jobs that were leased; one whose worker was lost is told of as retried before that."""
        again = [job for job in jobs if job.lease.attempt > 1]
        self._note(lambda stamp: [_retried(job, stamp) for job in again], len(again))
        self._note(lambda stamp: [_received(job, stamp) for job in jobs], len(jobs))

    def started(self, jobs: Sequence[Job]) -> None:
        self._note(lambda stamp: [{**stamp, "type": "task-started", "uuid": job.id} for job in jobs], len(jobs))

    def ended(self, endings: Sequence[Ending]) -> None:
        self._note(lambda stamp: [_ended(ending, stamp) for ending in endings], len(endings))

    def buried(self, burials: Sequence[Burial]) -> None:
        known = [burial for burial in burials if burial.settlement.job_id]
        self._note(lambda stamp: [_buried(burial, stamp) for burial in known], len(known))

    def told(self, task_id: str, *events: tuple[str, Mapping[str, object]]) -> None:
        """Of a task that is no job of a lane: types of events, in order, with the fields of each."""
        self._note(
            lambda stamp: [{**stamp, "type": kind, "uuid": task_id, **fields} for kind, fields in events], len(events)
        )

    def _note(self, events: _Maker, count: int) -> None:
        """Remember the moment; the events themselves are built on the publishing thread."""
        if not count or not self._enabled():
            return
        if len(self._waiting) >= MAX_WAITING:
            self._dropped(count)
            return
        self._waiting.append((time.time(), self._clock.forward(), events))
        self._something.set()

    def _run(self) -> None:
        while not (self._stopping.is_set() and not self._waiting):
            self._something.wait()
            self._stopping.wait(GATHER_S)
            self._something.clear()
            while events := self._next_events():
                self._publish(events)

    def _publish(self, events: list[_Event]) -> None:
        try:
            self._broker.publish_events(events, self._hostname)
        except BrokerUnavailable as error:
            log.warning("Task events cannot be published now.", extra={"cause": str(error), "count": len(events)})
            self._dropped(len(events))
        except Exception:
            log.exception("Publishing task events failed.")
            self._dropped(len(events))

    def _next_events(self) -> list[_Event]:
        events: list[_Event] = []
        while self._waiting and len(events) < MAX_TOGETHER:
            moment, clock, make = self._waiting.popleft()
            events += make(
                {
                    "timestamp": moment,
                    "clock": clock,
                    "hostname": self._hostname,
                    "pid": self._pid,
                    "utcoffset": utcoffset(),
                }
            )
        return events


def _received(job: Job, stamp: _Event) -> _Event:
    headers = job.message.headers
    return {
        **stamp,
        "type": "task-received",
        "uuid": job.id,
        "name": job.message.task,
        "args": headers.get("argsrepr", ""),
        "kwargs": headers.get("kwargsrepr", ""),
        "root_id": headers.get("root_id"),
        "parent_id": headers.get("parent_id"),
        "retries": job.lease.attempt - 1,
        "eta": headers.get("eta"),
        "expires": headers.get("expires"),
    }


def _retried(job: Job, stamp: _Event) -> _Event:
    return {**stamp, "type": "task-retried", "uuid": job.id, **lost_before(job.lease.attempt)}


def lost_before(attempt: int) -> dict[str, object]:
    """What `task-retried` tells of the attempt before this one."""
    exception = f"worker_lost('attempt {attempt - 1} ended with its worker')"
    return {"exception": exception, "traceback": exception}


def _buried(burial: Burial, stamp: _Event) -> _Event:
    exception = f"{burial.kind}({burial.error.reason!r})"
    failed: _Event = {"type": "task-failed", "uuid": burial.settlement.job_id, "exception": exception}
    if burial.task is not None:
        failed["name"] = burial.task
    return {**stamp, **failed, "traceback": exception}


def _ended(ending: Ending, stamp: _Event) -> _Event:
    job, error = ending.job, ending.error
    event: _Event = {**stamp, "uuid": job.id}
    if ending.status is JobStatus.SUCCEEDED:
        # The runtime is the job's share of the device's time: from the start of its batch to the end of it.
        event |= {"type": "task-succeeded", "result": ending.summary, "runtime": job.infer_s + job.postprocess_s}
    elif error is not None:
        exception = f"{error.type}({error.message!r})"
        event |= {"type": "task-failed", "exception": exception, "traceback": error.traceback or exception}
    else:
        expired = ending.status is JobStatus.EXPIRED
        event |= {"type": "task-revoked", "terminated": False, "signum": None, "expired": expired}
    return event
