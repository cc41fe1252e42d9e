"""What every process of ours that serves queues is: a Celery worker with a drain."""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence

from celery import Celery, signals
from celery.exceptions import SecurityWarning
from kombu import Queue
from prometheus_client import CollectorRegistry

from broker import Broker, BrokerUnavailable
from configs import Settings
from configs.settings import MIN_READ_TIMEOUT_S
from telemetry.logs import LineWriter, configure
from telemetry.metrics import WorkerMetrics, serve
from workers import control
from workers.backoff import Backoff
from workers.bootsteps import EventsWanted, Part, count_ended, drain_step, events_step, is_revoked, patient_consumer
from workers.drain import Drain
from workers.events import TaskEvents
from workers.feeder import WAIT_S
from workers.loading import Loader

log = logging.getLogger(__name__)

#: The interpreter lets a busy thread run this long before another gets its turn. The default of 5 ms would add itself
#: to every hand-over between feeder, device and settler while one of them computes.
SWITCH_INTERVAL_S = 0.0005
#: Seconds for which a broker that is not there yet is waited for without a word.
QUIET_WAIT_S = 3.0
#: Thresholds of the cyclic garbage collector. Jobs come and go by the hundred and hold no cycles; looking for some at
#: Python's own thresholds (700, 10, 10) doubles what it costs to decode messages that are kept.
COLLECTOR_THRESHOLDS = (50_000, 20, 50)

assert WAIT_S < MIN_READ_TIMEOUT_S


def prepare(settings: Settings, service: str) -> None:
    """Before anything else in the process: how it logs and takes turns."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.set_threshold(*COLLECTOR_THRESHOLDS)
    configure(settings.logging.level, settings.logging.format, service=service)


def run(
    settings: Settings,
    app: Celery,
    loaders: Mapping[str, Loader],
    *,
    service: str,
    name: str,
    device: str,
    metrics_port: int,
    beside: Callable[[CollectorRegistry, TaskEvents], Sequence[Part]] = lambda *_: (),
) -> int:
    """Serve the queues of `loaders` until told to stop; returns the exit status. `name` is the node's, without host.

    `beside` makes what else the process runs, each from the drain's start to its stop; task events are the process's.
    """
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    serve(registry, settings.workers.metrics_host, metrics_port)
    nodename = f"{name}@{socket.gethostname()}"
    # Celery wants a queue to consume. This one is private to the process, so a shop's own queues are never touched.
    app.conf.task_queues = [Queue(f"sheaf.node.{nodename}", no_declare=True)]
    wanted = EventsWanted()
    broker = make_broker(settings)
    _wait_for(broker)
    events = TaskEvents(broker, app, nodename, wanted, metrics.events_dropped)
    drain = Drain(
        broker,
        loaders,
        device=device,
        prefetch_batches=settings.workers.prefetch_batches,
        metrics=metrics,
        lines=LineWriter(settings.logging.format, service=service),
        events=events,
        is_revoked=is_revoked,
        on_ended=count_ended,
    )
    control.register(drain, broker, nodename, os.getpid())
    parts = (drain, *beside(registry, events))
    app.steps["worker"].add(drain_step(parts, settings.workers.shutdown_grace_s))
    app.steps["consumer"].add(events_step(wanted))
    # Celery warns of root because of pickle, which is refused here.
    warnings.simplefilter("ignore", SecurityWarning)
    signals.setup_logging.connect(_keep_our_logging, weak=False)
    worker = app.Worker(
        hostname=nodename,
        pool="solo",
        concurrency=1,
        quiet=True,
        loglevel=settings.logging.level.upper(),
        consumer_cls=patient_consumer(broker.check_server),
        # Its elections and clocks serve nothing here, and it fails each time that the broker is lost.
        without_gossip=True,
    )
    worker.start()
    return worker.exitcode or 0


def make_broker(settings: Settings, *, max_attempts: int | None = None) -> Broker:
    """A client with a session of its own; `max_attempts` where other than the settings' holds."""
    return Broker(
        settings.broker.server_url,
        session=uuid.uuid4().hex,
        key_prefix=settings.broker.key_prefix,
        lease_s=settings.broker.lease_s,
        max_attempts=settings.broker.max_attempts if max_attempts is None else max_attempts,
        result_ttl_s=settings.api.result_ttl_s,
        read_timeout_s=settings.broker.read_timeout_s,
        max_message_bytes=settings.broker.max_message_bytes,
    )


def _wait_for(broker: Broker) -> None:
    """Until its server is up, and known to be new enough."""
    backoff = Backoff()
    begin = time.monotonic()
    while True:
        try:
            broker.check_server()
            return
        except BrokerUnavailable as error:
            # When all parts are started together it is a moment behind.
            if time.monotonic() - begin > QUIET_WAIT_S:
                log.warning("Waiting for the broker.", extra={"cause": str(error)})
            backoff.wait(threading.Event())


def _keep_our_logging(**_: object) -> None:
    """A receiver of `setup_logging` tells Celery to leave logging as it is."""
