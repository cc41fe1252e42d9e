"""What is broken, and when: two schedules, each drawn from the seed. One kills workers, one does everything else."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tests.chaos.cluster import LEASE_S, READ_TIMEOUT_S, Cluster, Worker

#: Seconds between a worker's restart and the next kill. A start takes seconds too, and only one that serves is killed.
BETWEEN_KILLS_S = (5.0, 8.0)
#: Seconds between the end of one other fault and the next.
BETWEEN_FAULTS_S = (2.0, 5.0)
#: Seconds that a worker or the broker stays away.
WORKER_AWAY_S = (0.0, 1.0)
BROKER_AWAY_S = (0.2, 3.0)
#: A worker that is stopped for so long has lost its leases, seconds.
WORKER_STOPPED_S = (1.25 * LEASE_S, 2.5 * LEASE_S)
#: Some freezes are shorter than the clients' patience, some longer, seconds.
FROZEN_S = (0.5 * READ_TIMEOUT_S, 2.0 * READ_TIMEOUT_S)
#: Seconds between the cuts of one burst, and how many these are.
BETWEEN_CUTS_S = (0.1, 1.5)
CUTS = 3
#: Seconds after which the killer looks again for a worker that serves.
LOOK_S = 0.25


class FaultKind(StrEnum):
    WORKER_KILL = "worker kill -9"
    ROW = "worker killed by a row"
    WORKER_STOP = "worker SIGSTOP past its lease"
    BROKER_KILL = "broker kill -9"
    BROKER_RESTART = "broker clean restart"
    CUT = "all broker connections cut, three times"
    FREEZE = "broker connections frozen"


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that was brought about. Unix seconds."""

    kind: FaultKind
    begun_at: float
    ended_at: float
    detail: str


class Faults:
    """Breaks `cluster` until told to stop; each fault is over, and what it took away is back, before the next."""

    def __init__(self, cluster: Cluster, seed: int, stopping: threading.Event) -> None:
        self._cluster = cluster
        self._seed = seed
        self._stopping = stopping
        self._done: list[Fault] = []
        self._complaints: list[str] = []
        self._perform: dict[FaultKind, Callable[[random.Random], str | None]] = {
            FaultKind.WORKER_STOP: self._stop_worker,
            FaultKind.BROKER_KILL: self._kill_broker,
            FaultKind.BROKER_RESTART: self._restart_broker,
            FaultKind.CUT: self._cut,
            FaultKind.FREEZE: self._freeze,
        }

    @property
    def done(self) -> Sequence[Fault]:
        return sorted(self._done, key=lambda fault: fault.begun_at)

    @property
    def counts(self) -> dict[FaultKind, int]:
        happened = Counter(fault.kind for fault in self._done)
        return {kind: happened[kind] for kind in FaultKind}

    @property
    def complaints(self) -> Sequence[str]:
        """Workers that ended as nothing here makes them end."""
        return list(self._complaints)

    def watch(self) -> None:
        """Beside the schedules: start workers again that a row has killed."""
        while not self._stopping.wait(LOOK_S):
            self.revive()

    def revive(self) -> None:
        """Start every worker again that has ended by itself, and note why it had."""
        for name, status in self._cluster.revive():
            if status == -signal.SIGKILL:
                self._done.append(Fault(FaultKind.ROW, time.time(), time.time(), name))
            else:
                self._complaints.append(f"{name} ended by itself with status {status}")

    def kill_workers(self) -> None:
        """One schedule: kill -9 of a worker that serves, over and over."""
        choice = random.Random(f"{self._seed} kills")
        while not self._stopping.wait(choice.uniform(*BETWEEN_KILLS_S)):
            while not self._try(FaultKind.WORKER_KILL, self._kill_worker, choice):
                if self._stopping.wait(LOOK_S):
                    return

    def do_everything_else(self) -> None:
        """The other schedule: all other kinds, each as often as any; then one last freeze.

        What a freeze leaves behind has to heal without the help of the next fault.
        """
        choice = random.Random(f"{self._seed} others")
        for kind in _decks(choice, list(self._perform)):
            if self._stopping.wait(choice.uniform(*BETWEEN_FAULTS_S)):
                break
            while not self._try(kind, self._perform[kind], choice) and not self._stopping.wait(LOOK_S):
                pass
        self._try(FaultKind.FREEZE, self._freeze, choice)

    def _try(self, kind: FaultKind, perform: Callable[[random.Random], str | None], choice: random.Random) -> bool:
        """False when there was nothing to do it to."""
        begun_at = time.time()
        detail = perform(choice)
        if detail is not None:
            self._done.append(Fault(kind, begun_at, time.time(), detail))
        return detail is not None

    def _kill_worker(self, choice: random.Random) -> str | None:
        worker = self._taken(choice)
        if worker is None:
            return None
        try:
            worker.service.kill()
            time.sleep(choice.uniform(*WORKER_AWAY_S))
            worker.service.start()
        finally:
            worker.lock.release()
        return worker.name

    def _stop_worker(self, choice: random.Random) -> str | None:
        worker = self._taken(choice)
        if worker is None:
            return None
        try:
            worker.service.send(signal.SIGSTOP)
            time.sleep(choice.uniform(*WORKER_STOPPED_S))
        finally:
            worker.service.send(signal.SIGCONT)
            worker.lock.release()
        return worker.name

    def _kill_broker(self, choice: random.Random) -> str:
        self._cluster.broker.kill()
        return self._start_broker(choice)

    def _restart_broker(self, choice: random.Random) -> str:
        self._cluster.broker.stop()
        return self._start_broker(choice)

    def _start_broker(self, choice: random.Random) -> str:
        away_s = choice.uniform(*BROKER_AWAY_S)
        time.sleep(away_s)
        self._cluster.broker.start()
        return f"away for {away_s:.1f} s"

    def _cut(self, choice: random.Random) -> str:
        cut = [self._cluster.proxy.reset()]
        for _ in range(CUTS - 1):
            time.sleep(choice.uniform(*BETWEEN_CUTS_S))
            cut.append(self._cluster.proxy.reset())
        return f"{' + '.join(map(str, cut))} connections"

    def _freeze(self, choice: random.Random) -> str:
        frozen_s = choice.uniform(*FROZEN_S)
        self._cluster.proxy.freeze()
        time.sleep(frozen_s)
        self._cluster.proxy.thaw()
        return f"{frozen_s:.1f} s"

    def _taken(self, choice: random.Random) -> Worker | None:
        """A worker that serves and that nothing else is being done to, with its lock held; None when there is none."""
        workers = self._cluster.workers
        for worker in choice.sample(workers, len(workers)):
            if worker.lock.acquire(blocking=False):
                if worker.serving():
                    return worker
                worker.lock.release()
        return None


def _decks(choice: random.Random, kinds: Sequence[FaultKind]) -> Iterator[FaultKind]:
    """All kinds in some order, then all in another: a short run has every kind too."""
    while True:
        yield from choice.sample(kinds, len(kinds))
