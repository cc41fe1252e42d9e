"""The process of one device: a Celery worker whose model queues are served by the drain.

`CUDA_VISIBLE_DEVICES` must be set before this process starts; here the device is `cpu` or `cuda:0`.
"""

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

from celery import signals
from celery.exceptions import SecurityWarning
from kombu import Queue
from prometheus_client import CollectorRegistry

from broker import Broker, BrokerUnavailable
from configs import Settings
from telemetry.logs import LineWriter, configure
from telemetry.metrics import WorkerMetrics, serve
from workers.app import make_app
from workers.backoff import Backoff
from workers.bootsteps import EventsWanted, count_ended, drain_step, events_step, is_revoked
from workers.drain import Drain
from workers.events import TaskEvents
from workers.loading import ModelLoader

log = logging.getLogger(__name__)

#: The interpreter lets a busy thread run this long before another gets its turn. The default of 5 ms would add itself
#: to every hand-over between feeder, device and settler while one of them computes.
SWITCH_INTERVAL_S = 0.0005
#: Seconds for which a broker that is not there yet is waited for without a word.
QUIET_WAIT_S = 3.0
#: Thresholds of the cyclic garbage collector. Jobs come and go by the hundred and hold no cycles; looking for some at
#: Python's own thresholds (700, 10, 10) doubles what it costs to decode messages that are kept.
COLLECTOR_THRESHOLDS = (50_000, 20, 50)


def main(settings: Settings, device: str, index: int) -> int:
    """Serve all models of `settings` on `device` until told to stop. `index` counts this machine's worker processes."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.set_threshold(*COLLECTOR_THRESHOLDS)
    configure(settings.logging.level, settings.logging.format, service="worker")
    _limit_threads(settings, device)
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    serve(registry, settings.workers.metrics_host, settings.workers.metrics_port + index)
    nodename = f"sheaf-{device.partition(':')[0]}{index}@{socket.gethostname()}"
    app = make_app(settings)
    # Celery wants a queue to consume. This one is private to the process, so a shop's own queues are never touched.
    app.conf.task_queues = [Queue(f"sheaf.node.{nodename}", no_declare=True)]
    wanted = EventsWanted()
    broker = _open_broker(settings)
    drain = Drain(
        broker,
        {
            name: ModelLoader.of(name, model, device, tf32=settings.workers.tf32)
            for name, model in settings.models.items()
        },
        device=device,
        prefetch_batches=settings.workers.prefetch_batches,
        metrics=metrics,
        lines=LineWriter(settings.logging.format),
        events=TaskEvents(broker, app, nodename, wanted, metrics.events_dropped),
        is_revoked=is_revoked,
        on_ended=count_ended,
    )
    app.steps["worker"].add(drain_step(drain, settings.workers.shutdown_grace_s))
    app.steps["consumer"].add(events_step(wanted))
    # Celery warns of root because of pickle, which is refused here.
    warnings.simplefilter("ignore", SecurityWarning)
    signals.setup_logging.connect(_keep_our_logging, weak=False)
    worker = app.Worker(
        hostname=nodename, pool="solo", concurrency=1, quiet=True, loglevel=settings.logging.level.upper()
    )
    worker.start()
    return worker.exitcode or 0


def _limit_threads(settings: Settings, device: str) -> None:
    """Before torch is imported: its allocator reads the environment once."""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if settings.workers.cpu_threads is not None and device == "cpu":
        os.environ["OMP_NUM_THREADS"] = str(settings.workers.cpu_threads)


def _open_broker(settings: Settings) -> Broker:
    """A client for the drain, with a server that is known to be new enough; waits for a server that is not up yet."""
    broker = Broker(
        settings.broker.server_url,
        session=uuid.uuid4().hex,
        key_prefix=settings.broker.key_prefix,
        lease_s=settings.broker.lease_s,
        max_attempts=settings.broker.max_attempts,
        result_ttl_s=settings.api.result_ttl_s,
        read_timeout_s=settings.broker.read_timeout_s,
        max_message_bytes=settings.broker.max_message_bytes,
    )
    backoff = Backoff()
    begin = time.monotonic()
    while True:
        try:
            broker.check_server()
            return broker
        except BrokerUnavailable as error:
            # When all parts are started together it is a moment behind.
            if time.monotonic() - begin > QUIET_WAIT_S:
                log.warning("Waiting for the broker.", extra={"cause": str(error)})
            backoff.wait(threading.Event())


def _keep_our_logging(**_: object) -> None:
    """A receiver of `setup_logging` tells Celery to leave logging as it is."""
