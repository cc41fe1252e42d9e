"""How the drain lives inside a Celery worker.

It is a step of the worker, not of its consumer: Celery stops and starts all consumer steps whenever it loses its broker
connection, and what runs on the device has nothing to do with that connection. Only the link to the event dispatcher,
which does change with the connection, is a consumer step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from celery import bootsteps, signals
from celery.worker import state
from celery.worker.consumer import Consumer
from celery.worker.worker import WorkController
from kombu import Connection

from broker import BrokerUnavailable
from broker.message import TASK_NAME

log = logging.getLogger(__name__)

#: Seconds between looks whether a broker that refuses writes takes them again.
LOOK_EVERY_S = 1.0


class EventsWanted:
    """Whether anybody asked this worker for task events: Celery's own switch, seen from any thread."""

    def __init__(self) -> None:
        self._consumer: Consumer | None = None

    def attach(self, consumer: Consumer) -> None:
        self._consumer = consumer

    def __call__(self) -> bool:
        dispatcher = getattr(self._consumer, "event_dispatcher", None)
        return dispatcher is not None and bool(dispatcher.enabled)


def count_ended(count: int) -> None:
    """Celery's counter behind `inspect stats` and the number that Flower shows as processed."""
    state.total_count[TASK_NAME] += count
    state.all_total_count[0] += count


def is_revoked(job_id: str) -> bool:
    """Celery's memory of `revoke`, kept by its main thread."""
    return job_id in state.revoked


def patient_consumer(check_server: Callable[[], None]) -> type[Consumer]:
    """Celery's consumer, but it connects only to a server that `check_server` finds to take writes.

    Its own connects to any server that answers. On one that is read-only or full it fails at its first write and starts
    again, six times a second, and leaves a connection open each time.
    """

    class PatientConsumer(Consumer):
        def connect(self) -> Connection:
            while True:
                try:
                    check_server()
                    return super().connect()
                except BrokerUnavailable as error:
                    log.warning("Control commands wait for the broker.", extra={"cause": str(error)})
                    time.sleep(LOOK_EVERY_S)
                    state.maybe_shutdown()

    return PatientConsumer


class Part(Protocol):
    """What a worker process runs besides Celery's own: the drain; the courier and the file sweeper in the io worker."""

    def start(self) -> None: ...

    def stop(self, grace_s: float) -> None:
        """Returns when it has stopped in order, within `grace_s`."""

    def hurry(self) -> None:
        """Called from a signal handler: whether it stops already or is about to, no time is left for it."""


def drain_step(parts: Sequence[Part], grace_s: float) -> type[bootsteps.StartStopStep]:
    """A worker step that starts and stops the drain, and what runs beside it, within one grace.

    A second signal to stop, or SIGQUIT, cuts the grace short.
    """
    told: list[str] = []

    def on_signal(how: str = "Warm", **_: object) -> None:
        told.append(how)
        if len(told) > 1 or how == "Cold":
            hurry()

    def hurry() -> None:
        for part in parts:
            part.hurry()

    signals.worker_shutting_down.connect(on_signal, weak=False)

    class DrainStep(bootsteps.StartStopStep):
        """Starts before the consumer, stops after it."""

        name = "sheaf.Drain"
        requires = ("celery.worker.components:Pool",)

        def start(self, parent: WorkController) -> None:
            for part in parts:
                part.start()

        def stop(self, parent: WorkController) -> None:
            _stop_together(parts, grace_s)

        def terminate(self, parent: WorkController) -> None:
            hurry()
            self.stop(parent)

    return DrainStep


def _stop_together(parts: Sequence[Part], grace_s: float) -> None:
    threads = [threading.Thread(target=part.stop, args=(grace_s,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def events_step(wanted: EventsWanted) -> type[bootsteps.StartStopStep]:
    """A consumer step that shows the event dispatcher of each new connection to `wanted`."""

    class EventsStep(bootsteps.StartStopStep):
        name = "sheaf.Events"
        requires = ("celery.worker.consumer.events:Events",)

        def start(self, parent: Consumer) -> None:
            wanted.attach(parent)

    return EventsStep
