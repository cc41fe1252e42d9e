"""The drain of one worker process: lanes, device loop, settler, events and keeper, started and stopped in order.

Threads of a worker, and what each may touch:
- Celery's main thread: control commands, heartbeats, signals. Starts and stops the drain, nothing else.
- loader: loads models, then opens their lanes.
- feeder, one a lane: leases, decodes, encodes. Waiters, four a lane: block on the broker's lists.
- device: runs batches. settler: postprocess, settle. renewer: renew. keeper: reclaim, announce.
- events: publishes task events.
They meet in the lanes' batchers (under one lock) and in the bounded queue before the settler.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from broker import Broker, WorkerInfo
from telemetry.logs import LineWriter
from telemetry.metrics import WorkerMetrics
from workers.device_loop import DeviceLoop
from workers.events import TaskEvents
from workers.executor import Executor
from workers.handover import Burials, Endings, Handover
from workers.jobs import Burial, Ending, Served
from workers.keeper import Keeper
from workers.lane import Lane, LanePorts
from workers.loading import ModelLoader
from workers.settling import Settler
from workers.threads import core_thread

log = logging.getLogger(__name__)

#: Batches that may wait for the settler; then the device waits. Two hide a settle behind a run.
SETTLING_DEPTH = 2


class Drain:
    """Serves the queues of the models in `loaders`, each from the moment its loader has returned."""

    def __init__(
        self,
        broker: Broker,
        loaders: Mapping[str, ModelLoader],
        *,
        device: str,
        prefetch_batches: int,
        metrics: WorkerMetrics,
        lines: LineWriter,
        events: TaskEvents,
        is_revoked: Callable[[str], bool],
        on_ended: Callable[[int], None],
    ) -> None:
        self._broker = broker
        self._loaders = loaders
        self._device = device
        self._prefetch_batches = prefetch_batches
        self._metrics = metrics
        self._events = events
        self._on_ended = on_ended
        self._lock = threading.Condition()
        self._work: Handover = queue.Queue(SETTLING_DEPTH)
        self._ports = LanePorts(
            rows_ready=self._rows_ready,
            received=events.received,
            endings=lambda lane, endings: self._work.put(Endings(lane, endings)),
            burials=self._bury,
            is_revoked=is_revoked,
        )
        self._lanes: list[Lane] = []
        self._models = {name: loader.info for name, loader in loaders.items()}
        self._device_loop = DeviceLoop(broker, self._lock, self._work, events.started, metrics.lost_leases)
        self._settler = Settler(broker, self._work, metrics, lines, self._ended, events.buried)
        self._keeper = Keeper(broker, lambda: list(self._lanes), self._info, metrics)
        self._stopping = threading.Event()
        self._loader = core_thread("loader", self._load_models)

    def start(self) -> None:
        self._events.start()
        self._settler.start()
        self._device_loop.start()
        self._keeper.start()
        self._loader.start()

    def stop(self, grace_s: float) -> None:
        """Stop leasing, finish the running batch, settle it, give the rest back; within `grace_s`."""
        deadline = time.monotonic() + grace_s
        self._stopping.set()
        for lane in self._lanes:
            lane.stop_leasing(deadline - time.monotonic())
        idle = self._device_loop.stop(deadline - time.monotonic())
        settled = self._settler.stop(max(1.0, deadline - time.monotonic()))
        if idle and settled:
            self._release()
        else:
            log.error("The running batch did not end in time; its jobs come back when their lease has run out.")
        self._keeper.stop(5.0)
        self._events.stop(2.0)
        self._broker.close()

    def _release(self) -> None:
        for lane in self._lanes:
            released = lane.release_unstarted()
            if released:
                log.info("Gave jobs back to the queue.", extra={"queue": lane.queue, "count": released})

    def _load_models(self) -> None:
        for name, loader in self._loaders.items():
            if self._stopping.is_set():
                return
            begin = time.monotonic()
            try:
                executor, info = loader.load()
            except Exception as error:
                # A model that does not load must not take the others down; readiness tells.
                log.exception("A model did not load.", extra={"model": name})
                self._models[name] = replace(loader.info, state="failed", error=str(error))
            else:
                log.info("Model ready.", extra={"model": name, "load_s": round(time.monotonic() - begin, 3)})
                self._open_lane(loader, executor)
                self._models[name] = info
                self._metrics.model_ready(name, info.version, self._device, True)
            self._keeper.announce_soon()
        # Libraries and models are there to stay: the garbage collector need not walk through them again and again.
        gc.collect()
        gc.freeze()

    def _open_lane(self, loader: ModelLoader, executor: Executor) -> None:
        served = Served(loader.info.name, loader.info.version)
        lane = Lane(
            loader.queue, served, executor, loader.limits, self._prefetch_batches, self._broker, self._lock, self._ports
        )
        self._lanes.append(lane)
        self._device_loop.serve(lane)
        lane.start()

    def _bury(self, lane: Lane, burials: Sequence[Burial]) -> None:
        if burials:
            self._work.put(Burials(lane, burials))

    def _rows_ready(self) -> None:
        with self._lock:
            self._lock.notify_all()

    def _ended(self, endings: Sequence[Ending]) -> None:
        self._events.ended(endings)
        self._on_ended(len(endings))

    def _info(self) -> WorkerInfo:
        return WorkerInfo(
            session=self._broker.session,
            hostname=socket.gethostname(),
            device=self._device,
            pid=os.getpid(),
            models=tuple(self._models.values()),
        )
