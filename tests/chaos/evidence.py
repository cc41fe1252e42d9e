"""What the broker and the logs say when all is over."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import orjson
import redis

from broker.dead import DeadLetter, DeadLetters
from broker.jobs import queue_name
from broker.keys import Keys, QueueKeys
from tests.chaos.cluster import LEASE_S, SERVED, Cluster

#: Results read with one command.
RESULTS_TOGETHER = 500
#: A holder whose lease ended so long ago should have been reclaimed by a live worker, milliseconds.
OVERDUE_MS = (LEASE_S + 3.0) * 1000
#: Characters of a log message by which it is counted.
HEAD = 48
#: Lines of each log that are kept of one job.
TRAIL_LINES = 20

KEYS = Keys()
QUEUES: Mapping[str, QueueKeys] = {name: KEYS.queue(name) for name in map(queue_name, SERVED)}


@dataclass(frozen=True, slots=True)
class DoneLine:
    """A worker's log line of a job that the broker let it settle."""

    worker: str
    timestamp: str
    status: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that the accounting goes by, besides the ledger."""

    results: Mapping[str, Mapping[str, object]]
    letters: Mapping[str, Sequence[DeadLetter]]
    done_lines: Mapping[str, Sequence[DoneLine]]
    #: What is still in the queues' lists and hashes, by key: how many.
    leftovers: Mapping[str, int]
    #: Log messages of level warning and above: how often.
    warnings: Mapping[str, int]


def gather(cluster: Cluster, job_ids: Sequence[str]) -> Evidence:
    """Everything that broker and logs say. For when all is quiet."""
    letters: defaultdict[str, list[DeadLetter]] = defaultdict(list)
    with DeadLetters(cluster.broker.url) as dead:
        for name in QUEUES:
            for letter in dead.newest(name):
                letters[letter.job_id or f"no id, letter {letter.number} of {name}"].append(letter)
    done_lines: defaultdict[str, list[DoneLine]] = defaultdict(list)
    warnings: Counter[str] = Counter()
    for name, path in cluster.logs.items():
        for line in _json_lines(path):
            if line.get("message") == "Job done.":
                done = DoneLine(name, str(line["timestamp"]), str(line["status"]))
                done_lines[str(line["job_id"])].append(done)
            elif line.get("level") in ("WARNING", "ERROR", "CRITICAL"):
                # The rest of a message of many lines, and of Celery's long ones, says nothing that counts.
                warnings[f"{line['level'].lower()}: {line['message'].strip().splitlines()[0]:.{HEAD}}"] += 1
    with cluster.direct() as client:
        return Evidence(results_of(client, job_ids), letters, done_lines, leftovers(client), warnings)


def results_of(client: redis.Redis, job_ids: Sequence[str]) -> dict[str, Mapping[str, object]]:
    """The stored results of those jobs that have one."""
    found: dict[str, Mapping[str, object]] = {}
    for begin in range(0, len(job_ids), RESULTS_TOGETHER):
        some = job_ids[begin : begin + RESULTS_TOGETHER]
        texts = cast("list[bytes | None]", client.mget([KEYS.result(job_id) for job_id in some]))
        found.update((job_id, orjson.loads(text)) for job_id, text in zip(some, texts, strict=True) if text)
    return found


def leftovers(client: redis.Redis) -> dict[str, int]:
    """What has not ended: waiting, given back, delayed or held messages, and leases that nobody took back in time."""
    found: dict[str, int] = {}
    overdue = time.time() * 1000 - OVERDUE_MS
    for queue in QUEUES.values():
        found |= {key: client.llen(key) for key in (*queue.waiting, *queue.returned, *queue.rotations)}
        found |= {key: client.llen(key) for key in _owned(client, queue)}
        found |= {key: client.zcard(key) for key in queue.places}
        found[queue.owned_depths] = client.hlen(queue.owned_depths)
        found[queue.delayed] = client.zcard(queue.delayed)
        held = cast("list[bytes]", client.keys(f"{queue.held_prefix}*"))
        found |= {key: client.hlen(key) for key in (queue.delayed_messages, *(key.decode() for key in held))}
        found[f"{queue.holders} (overdue)"] = client.zcount(queue.holders, "-inf", overdue)
    return {key: count for key, count in found.items() if count}


def trail(cluster: Cluster, job_id: str) -> list[str]:
    """Where the broker still has the job's message, and what each log says of the job."""
    found: list[str] = []
    with cluster.direct() as client:
        for key, messages in _messages(client):
            count = sum(job_id.encode() in message for message in messages)
            found += [f"broker: {count} in {key}"] * bool(count)
        record = cast("bytes | None", client.get(KEYS.record(job_id)))
        started = cast("bytes | None", client.get(KEYS.started(job_id)))
        found.append(f"broker: record {record!r}, started {started!r}")
    for name, path in cluster.logs.items():
        lines = [line for line in path.read_text(errors="replace").splitlines() if job_id in line]
        found += [f"{name}: {line}" for line in lines[:TRAIL_LINES]]
    return found


def _messages(client: redis.Redis) -> Iterator[tuple[str, Collection[bytes]]]:
    for queue in QUEUES.values():
        for key in (*queue.waiting, *queue.returned, *_owned(client, queue)):
            yield key, cast("list[bytes]", client.lrange(key, 0, -1))
        held = cast("list[bytes]", client.keys(f"{queue.held_prefix}*"))
        for key in (queue.delayed_messages, *(name.decode() for name in held)):
            yield key, cast("list[bytes]", client.hvals(key))


def _owned(client: redis.Redis, queue: QueueKeys) -> list[str]:
    """The lists of all owners who have one."""
    found = (cast("list[bytes]", client.keys(f"{prefix}*")) for prefix in queue.owned_prefixes)
    return [key.decode() for keys in found for key in keys]


def _json_lines(path: Path) -> Iterator[dict[str, str]]:
    """The log's lines that are JSON objects; a process that was killed may have left half of one."""
    with path.open("rb") as log:
        for line in log:
            try:
                found = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            if isinstance(found, dict):
                yield found
