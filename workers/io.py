"""The io worker, on no device: callbacks by a drain, webhooks by the courier, batches, the ends of files."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

from celery import Celery
from prometheus_client import CollectorRegistry

from batching import Limits
from broker import ModelInfo
from broker.deliveries import Deliveries
from broker.message import BATCHES, CALLBACKS
from configs import Settings
from telemetry.metrics import CourierMetrics
from webhooks import new_secret
from workers import process
from workers.app import make_app
from workers.batches import MAX_ATTEMPTS, BatchWorker
from workers.bootsteps import Part, is_revoked
from workers.callbacks import CallbackCaller
from workers.courier import NO_LIMIT, Courier
from workers.events import TaskEvents
from workers.executor import Executor
from workers.files import FileSweeper
from workers.jobs import Served
from workers.lane import LaneKind
from workers.outbox import Outbox

#: Ended jobs that are taken together. Each is a call or two: enough to hide the round trips of leasing and settling.
_TOGETHER = 32


def main(settings: Settings) -> int:
    """Serve callbacks, webhooks and batches, and remove files whose time is over, until told to stop."""
    process.prepare(settings, "io")
    # Not the models' task: an errback that is known here would be called in this process instead of being sent.
    app = make_app(settings, tasks=[CALLBACKS, BATCHES])
    # Where calls go that name no queue, as in the shop's own Celery settings.
    app.conf.task_default_queue = settings.io.default_queue
    app.conf.task_routes = {pattern: {"queue": queue} for pattern, queue in settings.io.task_routes.items()}
    loaders = {CALLBACKS: CallbackLoader.of(app, Outbox.of(settings.broker.key_prefix))}
    return process.run(
        settings,
        app,
        loaders,
        service="io",
        name="sheaf-io",
        device="none",
        metrics_port=settings.io.metrics_port,
        beside=partial(_beside, settings),
    )


def _beside(settings: Settings, registry: CollectorRegistry, events: TaskEvents) -> tuple[Part, ...]:
    batches = BatchWorker(process.make_broker(settings, max_attempts=MAX_ATTEMPTS), settings, events, is_revoked)
    return make_courier(settings, registry), batches, FileSweeper(settings)


def make_courier(settings: Settings, registry: CollectorRegistry) -> Courier:
    """The courier with clients of its own."""
    broker = settings.broker
    deliveries = Deliveries(
        broker.server_url, new_secret=new_secret, key_prefix=broker.key_prefix, read_timeout_s=broker.read_timeout_s
    )
    return Courier(
        process.make_broker(settings, max_attempts=NO_LIMIT),
        deliveries,
        settings.webhooks,
        CourierMetrics(registry),
        public_url=settings.api.public_url,
    )


@dataclass(frozen=True, slots=True)
class CallbackLoader:
    """The lane of what follows results."""

    app: Celery
    kind: LaneKind
    info: ModelInfo

    @classmethod
    def of(cls, app: Celery, outbox: Outbox) -> CallbackLoader:
        kind = LaneKind(
            queue=CALLBACKS,
            task=CALLBACKS,
            served=Served(CALLBACKS, "1", outbox),
            limits=Limits(max_batch_size=_TOGETHER, max_batch_tokens=_TOGETHER, max_wait_s=0.0),
            # It waits for the broker for as long as that is away; each call is bounded by its socket's timeout.
            step_timeout_s=math.inf,
            buries_failures=True,
            notes_traffic=False,
        )
        return cls(app, kind, ModelInfo(CALLBACKS, "1", None, "none", "loading"))

    def load(self) -> tuple[Executor, ModelInfo]:
        return CallbackCaller(self.app), replace(self.info, state="ready")
