"""The queue's verbs for workers: blocking, for threads.

Each verb is one script, so one atomic step on the server. No verb repeats itself after a connection error, since the
server may have carried it out; `held_tags` tells a worker afterwards what it really holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, cast

import orjson
import redis
from redis.commands.core import Script

from broker import events
from broker.connect import CONNECT_TIMEOUT_S, check_server_info, connect
from broker.faults import translated
from broker.jobs import WorkerInfo
from broker.keys import PRIORITY_STEPS, PROBE_TTL_S, Keys, QueueKeys
from broker.leases import Delayed, Lease, Leased, Progress, Reclaimed, SettleAnswer, Settlement, Start, StartAnswer
from broker.lua import script_text
from broker.message import WEBHOOKS
from broker.traffic import MAX_NOTED, MAX_ROWS, TTL_S, TrafficRow

#: Most messages one reclaim or due call moves: a script must not hold the server for long.
MAX_MOVED = 1000
#: How often a renewal may go unanswered within one lease.
RENEWAL_TRIES = 4
#: Seconds after which an announcement that was not repeated is forgotten.
ANNOUNCEMENT_TTL_S = 10

# By the scripts' numbers; calling an enum takes longer than all else that is done with an answer.
_START_ANSWERS = tuple(StartAnswer)
_SETTLE_ANSWERS = tuple(SettleAnswer)
assert all(answer == index for answers in (_START_ANSWERS, _SETTLE_ANSWERS) for index, answer in enumerate(answers))


class Broker:
    """One worker's way to its queues. `session` names it as a lease holder and must be new for each process."""

    def __init__(
        self,
        url: str,
        session: str,
        *,
        key_prefix: str = "",
        lease_s: float = 30.0,
        max_attempts: int = 3,
        result_ttl_s: int = 86400,
        read_timeout_s: float = 10.0,
        max_message_bytes: int | None = None,
    ) -> None:
        self.session = session
        self.lease_s = lease_s
        self.max_attempts = max_attempts
        #: What whoever reads a leased message does not read beyond; None for no limit.
        self.max_message_bytes = max_message_bytes
        self.read_timeout_s = read_timeout_s
        self.keys = Keys(key_prefix)
        self._result_ttl_s = result_ttl_s
        self._client = connect(url, read_timeout_s)
        # Renewals wait for nothing else, and a connection that went silent must not cost what is held: a second try
        # still has to come in time.
        timeout_s = min(read_timeout_s, lease_s / RENEWAL_TRIES)
        self._renewing = connect(url, timeout_s, min(CONNECT_TIMEOUT_S, timeout_s))
        db = self._client.connection_pool.connection_kwargs.get("db") or 0
        self._events_channel = events.channel(key_prefix, db)
        self._queues: dict[str, QueueKeys] = {}
        self._highest_tag: dict[str, int] = {}
        self._lease = self._script("lease")
        self._renew = self._script("renew", self._renewing)
        self._start = self._script("start")
        self._progress = self._script("progress")
        self._settle = self._script("settle")
        self._release = self._script("release")
        self._reclaim = self._script("reclaim")
        self._schedule = self._script("schedule")
        self._due = self._script("due")

    def check_server(self) -> None:
        """Raises `UnsupportedServer` when the server is too old, `BrokerUnavailable` when it takes no writes now."""
        with translated(self._client):
            self._client.set(self.keys.probe, b"", ex=PROBE_TTL_S)
            check_server_info(cast("dict[str, object]", self._client.info("server")))

    def lease(self, queue: str, rooms: Sequence[int], *, together: bool = False) -> Leased:
        """Take messages, the highest priority first; they are held until settled, released or expired.

        `rooms`: how many may be taken of each priority, over `PRIORITY_STEPS`. Within one, owners get equal shares. A
        message whose worker was lost (its attempt is above 1) comes alone, unless `together`.
        """
        keys = self._keys(queue)
        with translated(self._client):
            answer = self._lease(
                keys=[
                    *(*keys.returned, *keys.waiting),
                    *(keys.holders, keys.held(self.session), keys.lease_sequence),
                    *(keys.owned_depths, *keys.rotations, *keys.places, keys.served),
                ],
                args=[
                    *(self.session, int(self.lease_s * 1000), self._highest_tag.get(queue, 0)),
                    *(*rooms, *keys.owned_prefixes, int(together)),
                ],
            )
        levels = len(PRIORITY_STEPS)
        leases = _leases(answer[levels:])
        if leases:
            self._highest_tag[queue] = int(leases[-1].tag)
        return Leased(leases=leases, waiting=tuple(answer[:levels]))

    def wait(self, queue: str, step: int, timeout_s: float) -> bool:
        """Block until the list of this priority step holds a message; takes nothing. False after the timeout."""
        keys = self._keys(queue)
        name = keys.waiting[PRIORITY_STEPS.index(step)]
        with translated(self._client):
            return self._client.blmove(name, name, timeout=timeout_s, src="RIGHT", dest="RIGHT") is not None  # type: ignore[arg-type]  # redis-py types whole seconds only; the server takes fractions

    def renew(self, queues: Sequence[str]) -> list[bool]:
        """Extend the lease of all that is held in `queues`; False where nothing is held, or it was reclaimed.

        Gives up after a fraction of the lease.
        """
        with translated(self._renewing):
            answer = self._renew(
                keys=[self._keys(queue).holders for queue in queues], args=[self.session, int(self.lease_s * 1000)]
            )
        return [bool(renewed) for renewed in answer]

    def start(self, queue: str, jobs: Sequence[Start]) -> list[StartAnswer]:
        """The last look before a batch runs, and the note of its start for pollers."""
        note_time = f"{time.time():.6f}"
        args: list[object] = [self._result_ttl_s, self.keys.news]
        for job in jobs:
            note_key = self.keys.started(job.job_id) if job.recorded else ""
            args += (job.tag, job.job_id, self.keys.result(job.job_id), note_key, f"{job.attempt}:{note_time}")
        keys = [self._held(queue), self.keys.revoked, self.keys.watched]
        with translated(self._client):
            return [_START_ANSWERS[answer] for answer in self._start(keys=keys, args=args)]

    def settle(self, queue: str, settlements: Sequence[Settlement]) -> list[SettleAnswer]:
        """End jobs: store and publish each result, queue what follows it, drop its lease; only where still held."""
        args: list[object] = [self._result_ttl_s, self.keys.news]
        for job in settlements:
            record_key = self.keys.record(job.job_id) if job.recorded else ""
            args += (job.tag, job.job_id, self.keys.result(job.job_id), job.result or b"", record_key)
            args += (self.keys.open_jobs(job.counted_by) if job.counted_by else "",)
            args += (len(job.follow_ups), len(job.if_revoked))
            for follow_up in (*job.follow_ups, *job.if_revoked):
                args += (follow_up.list_key, follow_up.message)
        keys = [self._held(queue), self._keys(WEBHOOKS).waiting[0], self.keys.expiring]
        with translated(self._client):
            return [_SETTLE_ANSWERS[answer] for answer in self._settle(keys=keys, args=args)]

    def progress(self, queue: str, jobs: Sequence[Progress]) -> None:
        """Tell readers how far jobs of many rows are; only of what is still held."""
        args: list[object] = [self._result_ttl_s, self.keys.news]
        for job in jobs:
            note = f"{job.attempt}:{job.started_at:.6f}:{job.done}:{job.total}"
            args += (job.tag, self.keys.started(job.job_id), note, self.keys.result(job.job_id))
        with translated(self._client):
            self._progress(keys=[self._held(queue)], args=args)

    def release(self, queue: str, tags: Sequence[bytes]) -> int:
        """Give unstarted messages back to the front of their lists. `tags` oldest first. Returns how many were held."""
        if not tags:
            return 0
        keys = self._keys(queue)
        with translated(self._client):
            answer = self._release(keys=[keys.held(self.session), *keys.returned], args=list(reversed(tags)))
        return int(answer)

    def held_tags(self, queue: str) -> list[bytes]:
        """Tags of everything this session holds, oldest first; what an answer lost on the way may have left behind."""
        with translated(self._client):
            tags = cast("list[bytes]", self._client.hkeys(self._held(queue)))
        return sorted(tags, key=int)

    def reclaim(self, queue: str) -> Reclaimed:
        """Take back what other workers' expired leases held."""
        keys = self._keys(queue)
        with translated(self._client):
            answer = self._reclaim(
                keys=[keys.holders, *keys.returned, keys.held(self.session)],
                args=[keys.held_prefix, self.session, int(self.lease_s * 1000), self.max_attempts, MAX_MOVED],
            )
        return Reclaimed(returned=answer[0], exhausted=_leases(answer[1:]))

    def schedule(self, queue: str, due_times: Sequence[tuple[bytes, float]]) -> int:
        """Put held messages aside until their time: pairs of tag and Unix seconds. Returns how many were held."""
        keys = self._keys(queue)
        args: list[object] = []
        for tag, due_at in due_times:
            args += (tag, int(due_at * 1000))
        with translated(self._client):
            return int(self._schedule(keys=[keys.held(self.session), keys.delayed, keys.delayed_messages], args=args))

    def due(self, queue: str) -> int:
        """Bring delayed messages whose time has come back into the queue; returns how many."""
        keys = self._keys(queue)
        with translated(self._client):
            return int(self._due(keys=[keys.delayed, keys.delayed_messages, *keys.returned], args=[MAX_MOVED]))

    def delayed(self, queue: str, limit: int) -> list[Delayed]:
        """At most `limit` delayed messages, the soonest first."""
        keys = self._keys(queue)
        with translated(self._client):
            found = cast("list[tuple[bytes, float]]", self._client.zrange(keys.delayed, 0, limit - 1, withscores=True))
            if not found:
                return []
            entries = cast(
                "list[bytes | None]", self._client.hmget(keys.delayed_messages, [cast("str", tag) for tag, _ in found])
            )
        return [
            _delayed(entry, due_ms / 1e3)
            for (_, due_ms), entry in zip(found, entries, strict=True)
            if entry is not None
        ]

    def announce(self, info: WorkerInfo) -> None:
        """Tell readers that this worker lives and what it serves; forgotten after `ANNOUNCEMENT_TTL_S`."""
        with translated(self._client), self._client.pipeline(transaction=True) as pipe:
            pipe.set(self.keys.worker(info.session), orjson.dumps(asdict(info)), ex=ANNOUNCEMENT_TTL_S)
            pipe.zadd(self.keys.workers, {info.session: time.time()})
            pipe.zremrangebyscore(self.keys.workers, "-inf", time.time() - 10 * ANNOUNCEMENT_TTL_S)
            pipe.execute()

    def publish_events(self, task_events: Sequence[dict[str, object]], hostname: str) -> None:
        """Broadcast Celery task events to whoever listens now: Flower, `celery events`."""
        with translated(self._client):
            self._client.publish(self._events_channel, events.encode(task_events, hostname))

    def note_traffic(self, queue: str, rows: Sequence[TrafficRow]) -> None:
        """Remember rows that came, at most `MAX_NOTED`, the oldest first; of all, the last `MAX_ROWS` are kept."""
        assert 0 < len(rows) <= MAX_NOTED
        key = self._keys(queue).traffic
        with translated(self._client), self._client.pipeline(transaction=True) as pipe:
            pipe.lpush(key, *[row.encode() for row in rows])
            pipe.ltrim(key, 0, MAX_ROWS - 1)
            pipe.expire(key, TTL_S)
            pipe.execute()

    def traffic(self, queue: str) -> list[TrafficRow]:
        """The rows that are remembered of a queue, in the order in which they were enqueued."""
        with translated(self._client):
            texts = cast("list[bytes]", self._client.lrange(self._keys(queue).traffic, 0, -1))
        return sorted((TrafficRow.decode(text) for text in texts), key=lambda row: row.enqueued_ms)

    def withdraw(self) -> None:
        """Take the announcement back: this worker serves no more."""
        with translated(self._client), self._client.pipeline(transaction=True) as pipe:
            pipe.delete(self.keys.worker(self.session))
            pipe.zrem(self.keys.workers, self.session)
            pipe.execute()

    def close(self) -> None:
        self._client.close()
        self._renewing.close()

    def _script(self, verb: str, client: redis.Redis | None = None) -> Callable[..., Any]:
        script: Script = (client or self._client).register_script(script_text(verb))
        return script

    def _keys(self, queue: str) -> QueueKeys:
        keys = self._queues.get(queue)
        if keys is None:
            keys = self._queues[queue] = self.keys.queue(queue)
        return keys

    def _held(self, queue: str) -> str:
        return self._keys(queue).held(self.session)


def _delayed(entry: bytes, due_at: float) -> Delayed:
    level, _, message = entry.split(b":", 2)
    return Delayed(due_at, PRIORITY_STEPS[int(level) - 1], message)


def _leases(answer: Sequence[Any]) -> list[Lease]:
    """The scripts answer flat: tag, attempt, level and message of each lease."""
    return [
        Lease(tag, attempt, PRIORITY_STEPS[level - 1], message)
        for tag, attempt, level, message in zip(answer[::4], answer[1::4], answer[2::4], answer[3::4], strict=True)
    ]
