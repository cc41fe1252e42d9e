"""One run from its start to its report."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from tests.chaos import evidence
from tests.chaos.accounting import account
from tests.chaos.cluster import Cluster
from tests.chaos.faults import Faults
from tests.chaos.ledger import Ledger, Producer
from tests.chaos.producers import CeleryProducer, ChaosProducer, HttpProducer
from tests.chaos.report import SHOWN, Report, Trail

#: Submits a second of each producer.
RATES = {Producer.HTTP_ONE: 15.0, Producer.HTTP_MANY: 5.0, Producer.HTTP_WAITING: 5.0, Producer.CELERY: 20.0}
CELERY_PRODUCERS = 2
#: Seconds in which everything must have ended once nothing is broken any more.
DRAIN_S = 60.0
#: Seconds between looks, and how many in a row must find nothing.
LOOK_S = 0.5
QUIET_LOOKS = 4


def run(folder: Path, minutes: float, seed: int, tell: Callable[[str], None]) -> Report:
    """Start a cluster under `folder`, break it for `minutes`, let it drain, and account for everything.

    Raises `ChaosError` when it does not start, and whatever a producer or a fault raised that it should not.
    """
    ledger = Ledger()
    stopping = threading.Event()
    with Cluster(folder, seed) as cluster:
        tell(f"Everything is up; files are in {folder}.")
        faults = Faults(cluster, seed, stopping)
        producers = _producers(cluster, seed, ledger, stopping)
        jobs = [producer.run for producer in producers] + [faults.kill_workers, faults.do_everything_else, faults.watch]
        _run_all(jobs, minutes * 60, stopping)
        tell(f"{len(ledger.sent):,} jobs and {len(faults.done)} faults later: waiting for the rest to end.")
        undrained = _drain(cluster, faults)
        complaints = [*faults.complaints, *undrained, *cluster.stop_workers()]
        found = evidence.gather(cluster, [sent.id for sent in ledger.sent])
        result = account(ledger, found, complaints)
        shown = result.problems[:SHOWN]
        trails = [Trail(one, evidence.trail(cluster, one.job_id) if one.job_id else ()) for one in shown]
        return Report(seed, minutes, faults.done, faults.counts, result, found.warnings, trails)


def _producers(cluster: Cluster, seed: int, ledger: Ledger, stopping: threading.Event) -> list[ChaosProducer]:
    http = [kind for kind in Producer if kind is not Producer.CELERY]
    return [
        *(HttpProducer(kind, cluster.api_url, seed, RATES[kind], ledger, stopping) for kind in http),
        *(
            CeleryProducer(number, cluster.proxy.url, seed, RATES[Producer.CELERY], ledger, stopping)
            for number in range(CELERY_PRODUCERS)
        ),
    ]


def _run_all(jobs: list[Callable[[], None]], duration_s: float, stopping: threading.Event) -> None:
    """Run each in a thread of its own until the time is up, or until one raises; then let all of them end."""
    with ThreadPoolExecutor(len(jobs), thread_name_prefix="chaos") as pool:
        try:
            running = [pool.submit(job) for job in jobs]
            wait(running, timeout=duration_s, return_when=FIRST_EXCEPTION)
        finally:
            stopping.set()
    for one in running:
        one.result()


def _drain(cluster: Cluster, faults: Faults) -> list[str]:
    """Wait until nothing is left in any queue; a line when something stays."""
    deadline = time.monotonic() + DRAIN_S
    quiet = 0
    with cluster.direct() as client:
        while quiet < QUIET_LOOKS and time.monotonic() < deadline:
            faults.revive()
            quiet = 0 if evidence.leftovers(client) else quiet + 1
            time.sleep(LOOK_S)
        if quiet < QUIET_LOOKS:
            return [f"not drained within {DRAIN_S:.0f} s: {evidence.leftovers(client)}"]
    return []
