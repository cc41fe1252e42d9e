"""Tries settings for real: a server and a worker of its own, the traffic in real time, and the results' own times."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
import yaml

from batching import Limits
from batching.simulation import Arrival
from broker import AsyncBroker, JobState, JobStatus, NewJob, Priority, queue_name
from broker.embedded import EmbeddedServer
from broker.keys import PRIORITY_STEPS
from configs import ModelSettings, Settings, load_settings
from tuning.errors import TuningError
from tuning.search import quantile

#: Seconds that a worker may take to load its model.
START_TIMEOUT_S = 300.0
#: Seconds that a worker may take to stop.
STOP_TIMEOUT_S = 20.0
#: Seconds after which results that are missing are given up.
LONGEST_WAIT_S = 60.0
#: Seconds between looks for results; their own times tell when they were made.
LOOK_EVERY_S = 0.05
#: Results before this share of a full queue's do not count.
WARM_SHARE = 0.1
#: Results that are read together.
TOGETHER = 200

#: A row of a length in tokens, as a producer sends it.
MakeRow = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Seen:
    """What the worker did. Latencies are from enqueued to finished; the capacity is that of a full queue, in rows/s."""

    latencies_s: Sequence[float]
    failed: int
    rows_per_s: float
    capacity: float

    @property
    def rows(self) -> int:
        return len(self.latencies_s)

    @property
    def p50_s(self) -> float:
        return quantile(self.latencies_s, 0.5)

    @property
    def p99_s(self) -> float:
        return quantile(self.latencies_s, 0.99)


@dataclass(frozen=True, slots=True)
class Worker:
    """How a worker is started: `command` takes `--config FILE` and what follows before it takes its own arguments."""

    command: Sequence[str]
    arguments: Sequence[str]
    environment: Mapping[str, str]


def replay(
    settings: Settings,
    model: str,
    own: ModelSettings,
    worker: Worker,
    full_queue: Sequence[Arrival],
    arrivals: Sequence[Arrival],
    make_row: MakeRow,
) -> Seen:
    """Serve `full_queue` from a queue that holds all of it, then `arrivals` (from second 0 on) at their times, with the
    model as its `own` settings say. Raises `TuningError`.
    """
    with TemporaryDirectory(prefix="sheaf-tune-") as name:
        folder = Path(name)
        with EmbeddedServer(_free_port(), folder / "valkey") as server:
            config = _config(settings, model, own, server.url, _free_port())
            return asyncio.run(_replay(server.url, model, config, worker, folder, full_queue, arrivals, make_row))


def limits_as_settings(limits: Limits) -> dict[str, Any]:
    """The settings of a model that make these limits."""
    wait_ms = limits.max_wait_s * 1e3
    return {
        "max_batch_size": limits.max_batch_size,
        "max_batch_tokens": limits.max_batch_tokens,
        "max_wait_ms": int(wait_ms) if wait_ms == int(wait_ms) else round(wait_ms, 3),
        "preferred_batch_sizes": list(limits.preferred_sizes),
        "adaptive_wait": limits.adaptive_wait,
    }


def _config(settings: Settings, model: str, own: ModelSettings, url: str, metrics_port: int) -> dict[str, Any]:
    """The settings, but for one model, on a server of its own, and with no port of the service's."""
    config = settings.model_dump(mode="json", exclude={"flower"})
    others = [*load_settings(None, {}).settings.models, *config["models"]]
    config["models"] = dict.fromkeys(others) | {model: own.model_dump(mode="json")}
    config["broker"] |= {"url": url, "key_prefix": ""}
    config["workers"] |= {"metrics_host": "127.0.0.1", "metrics_port": metrics_port}
    config["flower"] = {"enabled": False}
    config["logging"] = {"level": "warning", "format": "text"}
    return config


async def _replay(
    url: str,
    model: str,
    config: Mapping[str, object],
    worker: Worker,
    folder: Path,
    full_queue: Sequence[Arrival],
    arrivals: Sequence[Arrival],
    make_row: MakeRow,
) -> Seen:
    broker = await AsyncBroker.open(url, max_queue_depth=0)
    try:
        producer = _Producer(broker, model, make_row)
        ids = await asyncio.gather(*(producer.send(arrival) for arrival in full_queue))
        with _running(worker, config, folder) as alive:
            await _until_ready(broker, model, alive)
            capacity = _rate([state.finished_at or 0.0 for state in await _ended(broker, ids, alive)])
            states = await _ended(broker, await producer.send_at_their_times(arrivals), alive)
        return _seen(states, capacity)
    finally:
        await broker.close()


class _Producer:
    """Submits rows of the right lengths, as the API does."""

    def __init__(self, broker: AsyncBroker, model: str, make_row: MakeRow) -> None:
        self._broker = broker
        self._model = model
        self._make_row = make_row
        self._payloads: dict[int, bytes] = {}

    async def send_at_their_times(self, arrivals: Sequence[Arrival]) -> list[str]:
        """Returns the jobs' ids."""
        sending: list[asyncio.Task[str]] = []
        begin = time.monotonic()
        for arrival in arrivals:
            await asyncio.sleep(max(0.0, begin + arrival.at - time.monotonic()))
            sending.append(asyncio.create_task(self.send(arrival)))
        return await asyncio.gather(*sending)

    async def send(self, arrival: Arrival) -> str:
        payload = self._payloads.get(arrival.tokens)
        if payload is None:
            payload = self._payloads[arrival.tokens] = orjson.dumps({"input": self._make_row(arrival.tokens)})
        submitted = await self._broker.submit(
            NewJob(
                id=str(uuid.uuid4()),
                model=self._model,
                queue=queue_name(self._model),
                payload=payload,
                priority=Priority.of_list(PRIORITY_STEPS[arrival.level]),
                created_at=time.time(),
            )
        )
        return submitted.id


@contextmanager
def _running(worker: Worker, config: Mapping[str, object], folder: Path) -> Iterator[Callable[[], None]]:
    """Run the worker; yields a check that raises `TuningError` with its last words when it has ended."""
    file, log_path = folder / "sheaf.yaml", folder / "worker.log"
    file.write_text(yaml.safe_dump(dict(config)))
    command = [*worker.command, "--config", str(file), *worker.arguments]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(worker.environment)
        )

    def alive() -> None:
        if process.poll() is not None:
            tail = log_path.read_text(errors="replace").strip()[-1000:]
            raise TuningError(f"the worker that was to try the settings ended with {process.returncode}: {tail}")

    try:
        yield alive
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        process.kill()
        process.wait()


async def _until_ready(broker: AsyncBroker, model: str, alive: Callable[[], None]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        alive()
        for info in (
            info for worker in await broker.overview.workers() for info in worker.models if info.name == model
        ):
            if info.state == "failed":
                raise TuningError(
                    f"model {model} did not load in the worker that was to try the settings: {info.error}"
                )
            if info.state == "ready":
                return
        await asyncio.sleep(LOOK_EVERY_S)
    raise TuningError(f"the worker that was to try the settings was not ready after {START_TIMEOUT_S:g} s")


async def _ended(broker: AsyncBroker, ids: Sequence[str], alive: Callable[[], None]) -> list[JobState]:
    """The states of all these jobs, once all have ended."""
    if not ids:
        return []
    deadline = time.monotonic() + LONGEST_WAIT_S
    states: list[JobState] = []
    # The last one first, and by itself: it is about the last to end, and looking costs the worker time.
    await _end(broker, ids[-1], deadline, alive)
    for begin in range(0, len(ids), TOGETHER):
        ends = (_end(broker, job_id, deadline, alive) for job_id in ids[begin : begin + TOGETHER])
        states += await asyncio.gather(*ends)
    return states


async def _end(broker: AsyncBroker, job_id: str, deadline: float, alive: Callable[[], None]) -> JobState:
    while True:
        state = await broker.fetch(job_id)
        if state is not None and state.ended:
            return state
        alive()
        if time.monotonic() > deadline:
            raise TuningError(f"not all rows had a result {LONGEST_WAIT_S:g} s after the last one was sent")
        await asyncio.sleep(LOOK_EVERY_S)


def _rate(moments: Sequence[float]) -> float:
    """Rows/s after the first batch, or the first rows, had ended: before that caches and pools are still filled."""
    ordered = sorted(moments)
    first, last = ordered[int(WARM_SHARE * len(ordered))], ordered[-1]
    later = sum(moment > first for moment in ordered)
    return later / (last - first) if later else 0.0


def _seen(states: Sequence[JobState], capacity: float) -> Seen:
    ended = [state for state in states if state.created_at is not None and state.finished_at is not None]
    begin = min((state.created_at or 0.0 for state in ended), default=0.0)
    end = max((state.finished_at or 0.0 for state in ended), default=0.0)
    return Seen(
        latencies_s=sorted((state.finished_at or 0.0) - (state.created_at or 0.0) for state in ended),
        failed=sum(state.status is not JobStatus.SUCCEEDED for state in states),
        rows_per_s=len(states) / (end - begin) if states else 0.0,
        capacity=capacity,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
