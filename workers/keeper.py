"""The threads that keep a worker's promises: renew, reclaim, drop what is over, bring what is due, note what came,
announce.

Renewals have a thread of their own: no other duty may hold them up while the broker is silent.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from broker import Broker, BrokerUnavailable, WorkerInfo
from broker.sync import MAX_MOVED
from telemetry.metrics import WorkerMetrics
from workers.duty import Duty
from workers.feeder import Feeder, FeederPorts
from workers.lane import Lane
from workers.threads import core_thread, end_process
from workers.watch import StepWatch

log = logging.getLogger(__name__)

#: Seconds between announcements; well below their TTL.
ANNOUNCE_EVERY_S = 2.0
#: Seconds between looks for jobs that were revoked or have expired while they wait for the device.
DROP_EVERY_S = 0.05
#: Seconds between looks for expired leases and frozen steps.
SWEEP_EVERY_S = 1.0
#: Seconds between notes of the rows that came.
NOTE_EVERY_S = 5.0
#: Seconds between looks for delayed messages whose time has come.
DUE_EVERY_S = 0.25


class Keeper:
    """Does each duty when its time comes; a broker that is away is tried again at the next."""

    def __init__(
        self,
        broker: Broker,
        feeders: Callable[[], Sequence[Feeder]],
        info: Callable[[], WorkerInfo],
        metrics: WorkerMetrics,
        ports: FeederPorts,
        watch: StepWatch,
    ) -> None:
        self._broker = broker
        self._feeders = feeders
        self._info = info
        self._metrics = metrics
        self._ports = ports
        self._watch = watch
        self._changed = threading.Event()
        self._stopping = threading.Event()
        self._threads = (core_thread("renewer", self._keep_renewing), core_thread("keeper", self._run))
        self._renewal = Duty("renew", broker.lease_s / 3, self._renew)
        self._duties = (
            Duty("drop", DROP_EVERY_S, self._drop),
            Duty("look for frozen steps", SWEEP_EVERY_S, self._look_for_frozen_steps),
            Duty("sweep", SWEEP_EVERY_S, self._sweep),
            Duty("bring what is due", DUE_EVERY_S, self._bring_due),
            # Longer than an answer may be on its way, so that what is unknown at two looks is not about to come in.
            Duty("look for forgotten leases", 2 * broker.read_timeout_s, self._release_forgotten),
            Duty("note the traffic", NOTE_EVERY_S, self._note_traffic),
            Duty("announce", ANNOUNCE_EVERY_S, self._announce),
        )

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def announce_soon(self) -> None:
        """What this worker serves has changed."""
        self._duties[-1].next_at = 0.0
        self._changed.set()

    def stop(self, timeout_s: float) -> None:
        self._stopping.set()
        self._changed.set()
        for thread in self._threads:
            thread.join(timeout_s)
        try:
            self._broker.withdraw()
        except BrokerUnavailable as error:
            log.warning("The worker could not take its announcement back; it expires.", extra={"cause": str(error)})

    def _keep_renewing(self) -> None:
        while not self._stopping.wait(self._renewal.due_in()):
            self._renewal.perform_when_due()

    def _run(self) -> None:
        while not self._stopping.is_set():
            for duty in self._duties:
                duty.perform_when_due()
            self._changed.wait(min(duty.due_in() for duty in self._duties))
            self._changed.clear()

    def _renew(self) -> None:
        lanes = self._lanes()
        if not lanes:
            return
        for lane, renewed in zip(lanes, self._broker.renew([lane.queue for lane in lanes]), strict=True):
            self._metrics.set_leases(lane.served.model, len(lane.held))
            if not renewed and lane.held:
                lost = lane.drop_lost()
                if lost:
                    log.warning("Leases had run out before they were renewed.", extra={"count": lost})
                    self._metrics.lost_leases(lane.served.model, lost)

    def _drop(self) -> None:
        now = time.time()
        for feeder in self._feeders():
            # A worker that stops gives back what waits, and its settler takes nothing more.
            if not feeder.stopping and (endings := feeder.lane.drop_unstarted(now)):
                self._ports.endings(feeder.lane, endings)

    def _look_for_frozen_steps(self) -> None:
        step = self._watch.frozen()
        if step is None:
            return
        log.critical(
            "A step is frozen, so the worker ends.",
            extra={"step": step.name, "queue": step.lane.queue, "limit_s": step.lane.kind.step_timeout_s},
        )
        try:
            for lane in self._lanes():
                lane.release_waiting()
        except BrokerUnavailable as error:
            log.warning("What waited could not be given back; its leases run out.", extra={"cause": str(error)})
        finally:
            end_process()

    def _sweep(self) -> None:
        for feeder in self._feeders():
            lane = feeder.lane
            reclaimed = self._broker.reclaim(lane.queue)
            if reclaimed.returned:
                log.warning(
                    "Took back jobs whose worker was lost.", extra={"queue": lane.queue, "count": reclaimed.returned}
                )
                self._metrics.reclaimed(lane.served.model, reclaimed.returned)
                feeder.look()
            self._ports.burials(lane, lane.bury_exhausted(reclaimed.exhausted))

    def _bring_due(self) -> bool:
        """True when one call did not bring all that is due."""
        more = False
        for feeder in self._feeders():
            moved = self._broker.due(feeder.lane.queue)
            if moved:
                feeder.look()
            more |= moved >= MAX_MOVED
        return more

    def _release_forgotten(self) -> None:
        for feeder in self._feeders():
            if count := feeder.lane.release_forgotten():
                log.warning("Gave back messages whose lease was lost on the way.", extra={"count": count})
                feeder.look()

    def _note_traffic(self) -> None:
        for lane in self._lanes():
            lane.note_traffic()

    def _lanes(self) -> list[Lane]:
        return [feeder.lane for feeder in self._feeders()]

    def _announce(self) -> None:
        self._broker.announce(self._info())
