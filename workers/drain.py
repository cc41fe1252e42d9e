"""The drain of one worker process: feeders, device loop, settler, events and keeper, started and stopped in order.

Threads of a worker, and what each may touch:
- Celery's main thread: control commands, heartbeats, signals. Starts and stops the drain, reads snapshots of it.
- loader: loads models, then opens their lanes.
- feeder, one a lane: leases, decodes, encodes. Waiters, four a lane: block on the broker's lists.
- device: runs batches. settler: postprocess, settle. renewer: renew.
- keeper: reclaim, drop, announce; ends the process when a step is frozen. events: publishes task events.
They meet in the lanes (under one lock) and in the bounded queue before the settler.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from broker import Broker, BrokerUnavailable, WorkerInfo
from telemetry.logs import LineWriter
from telemetry.metrics import WorkerMetrics
from workers.device_loop import DeviceLoop
from workers.events import TaskEvents
from workers.executor import Executor
from workers.feeder import Feeder, FeederPorts
from workers.handover import Burials, Endings, Handover
from workers.jobs import Ending
from workers.keeper import Keeper
from workers.lane import HeldJob, Lane
from workers.loading import Loader
from workers.settling import Settler
from workers.staging import Stager
from workers.threads import Grace, core_thread
from workers.watch import StepWatch

log = logging.getLogger(__name__)

#: Batches that may wait for the settler; then the device waits. Two hide a settle behind a run.
SETTLING_DEPTH = 2


class Drain:
    """Serves the queues of `loaders`, each from the moment its loader has returned."""

    def __init__(
        self,
        broker: Broker,
        loaders: Mapping[str, Loader],
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
        self._is_revoked = is_revoked
        self._on_ended = on_ended
        self._lock = threading.Condition()
        self._watch = StepWatch()
        self._work = Handover(SETTLING_DEPTH)
        self._feeder_ports = FeederPorts(
            received=events.received,
            endings=lambda lane, endings: self._work.put(Endings(lane, endings)),
            burials=lambda lane, burials: self._work.put(Burials(lane, burials)),
        )
        keeper_ports = replace(
            self._feeder_ports,
            endings=lambda lane, endings: self._work.put_at_once(Endings(lane, endings)),
            burials=lambda lane, burials: self._work.put_at_once(Burials(lane, burials)),
        )
        self._feeders: list[Feeder] = []
        self._models = {name: loader.info for name, loader in loaders.items()}
        stager = Stager(broker, self._lock, self._work, events.started, metrics.lost_leases, self._watch)
        self._device_loop = DeviceLoop(stager, self._lock, self._work, self._watch)
        self._settler = Settler(broker, self._work, metrics, lines, self._ended, events.buried, self._watch)
        self._keeper = Keeper(broker, lambda: list(self._feeders), self._info, metrics, keeper_ports, self._watch)
        self._stopping = threading.Event()
        self._opening = threading.Lock()
        self._grace = Grace()
        self._loader = core_thread("loader", self._load_models)

    def start(self) -> None:
        self._events.start()
        self._settler.start()
        self._device_loop.start()
        self._keeper.start()
        self._loader.start()

    def stop(self, grace_s: float) -> None:
        """Stop leasing, finish the running batch, settle it, give the rest back; within `grace_s`."""
        self._grace.begin(grace_s)
        with self._opening:
            self._stopping.set()
        for feeder in self._feeders:
            feeder.stop(self._grace)
        idle = self._device_loop.stop(self._grace)
        settled = self._settler.stop(self._grace) if idle else False
        self._release(finished=idle and settled)
        self._keeper.stop(5.0)
        self._events.stop(2.0)
        self._broker.close()

    def hurry(self) -> None:
        """Called from a signal handler: whether it stops already or is about to, no time is left for it."""
        self._grace.cut()

    def snapshot(self) -> list[HeldJob]:
        """The jobs that are held now."""
        return [held for feeder in list(self._feeders) for held in feeder.lane.snapshot()]

    def queues(self) -> list[str]:
        """The queues that are served now."""
        return [feeder.lane.queue for feeder in list(self._feeders)]

    def _release(self, *, finished: bool) -> None:
        """Give back what is still held. A batch that did not end in time keeps its leases until they run out, which
        counts its attempts, unless people want the worker gone at once.
        """
        if not finished and any(held.job.begun for held in self.snapshot()):
            log.error("The running batch did not end in time.", extra={"given_back": self._grace.is_cut})
        for lane in [feeder.lane for feeder in self._feeders]:
            try:
                released = lane.release_all() if finished or self._grace.is_cut else lane.release_waiting()
            except BrokerUnavailable as error:
                log.warning("Jobs could not be given back; their leases run out.", extra={"cause": str(error)})
                return
            if released:
                log.info("Gave jobs back to the queue.", extra={"queue": lane.queue, "count": released})

    def _load_models(self) -> None:
        for name, loader in self._loaders.items():
            if self._stopping.is_set():
                return
            begin = time.monotonic()
            try:
                executor, info = loader.load()
            except BaseException as error:
                # A model that does not load must not take the others down; readiness tells.
                log.exception("A model did not load.", extra={"model": name})
                self._models[name] = replace(loader.info, state="failed", error=str(error))
            else:
                log.info("Model ready.", extra={"model": name, "load_s": round(time.monotonic() - begin, 3)})
                if not self._open_lane(loader, executor):
                    return
                self._models[name] = info
                self._metrics.model_ready(name, info.version, self._device, True)
            self._keeper.announce_soon()
        # Libraries and models are there to stay: the garbage collector need not walk through them again and again.
        gc.collect()
        gc.freeze()

    def _open_lane(self, loader: Loader, executor: Executor) -> bool:
        """Serve one more queue; False when the drain stops, and takes nothing any more."""
        lane = Lane(loader.kind, executor, self._broker, self._lock, self._is_revoked)
        feeder = Feeder(lane, self._prefetch_batches, self._broker, self._feeder_ports, self._watch)
        with self._opening:
            if self._stopping.is_set():
                return False
            self._feeders.append(feeder)
        self._device_loop.serve(lane)
        feeder.start()
        return True

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
