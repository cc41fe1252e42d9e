"""The thread that keeps a worker's promises to the broker: renew, reclaim, give back, bring what is due, announce."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from broker import Broker, BrokerUnavailable, WorkerInfo
from telemetry.metrics import WorkerMetrics
from workers.lane import Lane
from workers.threads import core_thread

log = logging.getLogger(__name__)

#: Seconds between announcements; well below their TTL.
ANNOUNCE_EVERY_S = 2.0
#: Seconds between looks for expired leases.
SWEEP_EVERY_S = 1.0
#: Seconds between looks for delayed messages whose time has come.
DUE_EVERY_S = 0.25


class Keeper:
    """Does each duty when its time comes; a broker that is away is tried again at the next."""

    def __init__(
        self,
        broker: Broker,
        lanes: Callable[[], Sequence[Lane]],
        info: Callable[[], WorkerInfo],
        metrics: WorkerMetrics,
    ) -> None:
        self._broker = broker
        self._lanes = lanes
        self._info = info
        self._metrics = metrics
        self._changed = threading.Event()
        self._stopping = threading.Event()
        self._thread = core_thread("keeper", self._run)
        self._duties = (
            _Duty("renew", broker.lease_s / 3, self._renew),
            _Duty("sweep", SWEEP_EVERY_S, self._sweep),
            _Duty("bring what is due", DUE_EVERY_S, self._bring_due),
            # Longer than an answer may be on its way, so that what is unknown at two looks is not about to come in.
            _Duty("look for forgotten leases", 2 * broker.read_timeout_s, self._release_forgotten),
            _Duty("announce", ANNOUNCE_EVERY_S, self._announce),
        )

    def start(self) -> None:
        self._thread.start()

    def announce_soon(self) -> None:
        """What this worker serves has changed."""
        self._duties[-1].next_at = 0.0
        self._changed.set()

    def stop(self, timeout_s: float) -> None:
        self._stopping.set()
        self._changed.set()
        self._thread.join(timeout_s)
        try:
            self._broker.withdraw()
        except BrokerUnavailable as error:
            log.warning("The worker could not take its announcement back; it expires.", extra={"cause": str(error)})

    def _run(self) -> None:
        while not self._stopping.is_set():
            for duty in self._duties:
                duty.perform_when_due()
            pause = min(duty.next_at for duty in self._duties) - time.monotonic()
            self._changed.wait(max(0.0, pause))
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

    def _sweep(self) -> None:
        for lane in self._lanes():
            reclaimed = self._broker.reclaim(lane.queue)
            if reclaimed.returned:
                log.warning(
                    "Took back jobs whose worker was lost.", extra={"queue": lane.queue, "count": reclaimed.returned}
                )
                self._metrics.reclaimed(lane.served.model, reclaimed.returned)
                lane.look()
            lane.bury_exhausted(reclaimed.exhausted)

    def _bring_due(self) -> None:
        for lane in self._lanes():
            if self._broker.due(lane.queue):
                lane.look()

    def _release_forgotten(self) -> None:
        for lane in self._lanes():
            lane.release_forgotten()

    def _announce(self) -> None:
        self._broker.announce(self._info())


class _Duty:
    """Something to do every so often."""

    def __init__(self, name: str, every_s: float, perform: Callable[[], None]) -> None:
        self.name = name
        self.next_at = 0.0
        self._every_s = every_s
        self._perform = perform

    def perform_when_due(self) -> None:
        now = time.monotonic()
        if now < self.next_at:
            return
        self.next_at = now + self._every_s
        try:
            self._perform()
        except BrokerUnavailable as error:
            self.next_at = now + min(self._every_s, 1.0)
            log.warning("The broker is away; trying again.", extra={"duty": self.name, "cause": str(error)})
        except Exception:
            log.exception("A duty failed; it is tried again.", extra={"duty": self.name})
