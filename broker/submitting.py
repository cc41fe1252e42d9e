"""Submits that wait together travel together: one script call per queue and flush, each job answered on its own."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha1
from typing import Any, cast

import orjson
import redis.asyncio
from redis.exceptions import NoScriptError

from broker.draining import DrainRates
from broker.errors import BrokerError, IdempotencyConflict, IdTaken, QueueFull, TooFast, TooManyOpen
from broker.faults import translated_async, tried_twice
from broker.jobs import NewJob, RateState, Submitted
from broker.keys import PRIORITY_STEPS, Keys, QueueKeys
from broker.lua import script_text
from broker.message import encode
from broker.results import encode_record
from broker.together import Together, fail

#: Most jobs in one script call; it bounds how long the server is held.
MAX_TOGETHER = 256
#: Length of a Celery list from which on an owner's jobs go to a list of the owner's own. A flood is that far ahead of
#: jobs without an owner; below it no list but Celery's is used. Also how far an owner's own list may have to wait for
#: what the owner has in the Celery list, so it is about a large batch.
FAIR_FROM = 64
#: Records outlive a long wait in the queue; at settle they get the result's TTL.
RECORD_TTL_S = 7 * 86400
#: Jobs of one owner that can be listed, the newest.
MOST_LISTED = 10_000
#: How long an idempotency key is remembered.
IDEMPOTENCY_TTL_S = 86400

_Entry = tuple[NewJob, "asyncio.Future[Submitted]"]


class Submitter:
    """One process' submits."""

    def __init__(
        self, client: redis.asyncio.Redis, keys: Keys, *, max_queue_depth: int, drain_rates: DrainRates | None
    ) -> None:
        self._client = client
        self._keys = keys
        self._max_queue_depth = max_queue_depth
        self._drain_rates = drain_rates
        self._queues: dict[str, QueueKeys] = {}
        self._together: Together[NewJob, Submitted] = Together(MAX_TOGETHER, self._send_all)
        self._script = script_text("submit")
        self._sha = sha1(self._script.encode(), usedforsecurity=False).hexdigest()

    async def submit(self, job: NewJob) -> Submitted:
        """Return once the server has accepted the job, or with the job that it repeats.

        Raises `QueueFull`, `TooFast`, `TooManyOpen`, `IdempotencyConflict`, `IdTaken`, or `BrokerUnavailable`; after
        the last the job may have been accepted all the same, if only the answer was lost.
        """
        return await self._together.ask(job)

    async def _send_all(self, together: Sequence[_Entry]) -> None:
        by_queue: defaultdict[str, list[_Entry]] = defaultdict(list)
        for entry in together:
            by_queue[entry[0].queue].append(entry)
        await asyncio.gather(*(self._send(queue, entries) for queue, entries in by_queue.items()))

    async def _send(self, queue: str, entries: Sequence[_Entry]) -> None:
        try:
            async with translated_async(self._client):
                # A pooled connection may have been dead. If the server did carry it out, the jobs' records stop the
                # second run from queueing anything twice.
                answers = await tried_twice(lambda: self._evaluate(self._queue_keys(queue), entries))
        except Exception as error:
            fail(entries, error)
            return
        for (job, future), answer in zip(entries, answers, strict=True):
            if future.done():
                continue
            try:
                future.set_result(self._answered(job, answer))
            except Exception as error:
                future.set_exception(error)

    async def _evaluate(self, keys: QueueKeys, entries: Sequence[_Entry]) -> list[Any]:
        script_keys = (*keys.waiting, *keys.returned, keys.delayed, keys.owned_depths)
        script_keys += (*keys.rotations, *keys.places, keys.served, self._keys.expiring)
        arguments: list[str | bytes | int] = [*script_keys]
        arguments += (self._max_queue_depth, RECORD_TTL_S, IDEMPOTENCY_TTL_S, FAIR_FROM, MOST_LISTED)
        arguments += (self._keys.record(""), self._keys.result(""))
        for job, _ in entries:
            created_ms = int(job.created_at * 1000)
            arguments += (
                job.id,
                PRIORITY_STEPS.index(job.priority) + 1,
                encode_record(job),
                encode(job),
                created_ms,
                self._keys.idempotency(*job.idempotency_key) if job.idempotency_key else "",
                f"{job.fingerprint}:{created_ms}:{job.id}",
                job.owner,
                keys.owned(job.priority, job.owner),
                self._keys.listed(job.owner),
                *self._bounds(job),
                int(job.chosen_id),
                "" if job.expires_at is None else int(job.expires_at * 1000),
            )
        try:
            answer = await self._client.evalsha(self._sha, len(script_keys), *arguments)
        except NoScriptError:
            answer = await self._client.eval(self._script, len(script_keys), *arguments)
        return cast("list[Any]", answer)

    def _bounds(self, job: NewJob) -> tuple[str | int, ...]:
        """What the script checks of the caller's quota."""
        quota = job.quota
        if quota is None:
            return "", 0, "", 0, 0
        open_jobs = self._keys.open_jobs(quota.key_id) if quota.max_in_flight is not None else ""
        rate = quota.rate
        if rate is None:
            return open_jobs, quota.max_in_flight or 0, "", 0, 0
        interval_us = math.ceil(rate.period_s * 1e6 / rate.count)
        return open_jobs, quota.max_in_flight or 0, self._keys.rate(quota.key_id), interval_us, rate.count

    def _answered(self, job: NewJob, answer: Any) -> Submitted:
        """The script's answer, with where the caller stands. Raises what it refused with."""
        rate = None if job.quota is None else job.quota.rate
        if rate is None:
            return self._submitted(job, answer)
        answer, remaining, reset_us = answer
        state = RateState(remaining, reset_us / 1e6)
        try:
            return replace(self._submitted(job, answer), rate=state)
        except BrokerError as error:
            error.standing = error.standing or (rate, state)
            raise

    def _submitted(self, job: NewJob, answer: Any) -> Submitted:
        match answer:
            case 0:
                return Submitted(job.id, job.created_at)
            case bytes():
                return _first(job, answer)
            case [1, depth]:
                raise self._full(job.queue, depth)
            case [2, count]:
                assert job.quota is not None
                assert job.quota.max_in_flight is not None
                raise TooManyOpen(count, job.quota.max_in_flight)
            case [3, wait_us]:
                assert job.quota is not None
                assert job.quota.rate is not None
                raise TooFast(job.quota.rate, retry_after_s=wait_us / 1e6)
            case [4, record]:
                return _same(job, record)
        raise AssertionError(f"the script answered {answer!r}")

    def _full(self, queue: str, depth: int) -> QueueFull:
        limit = self._max_queue_depth
        if self._drain_rates is None:
            return QueueFull(queue, depth, limit)
        return QueueFull(queue, depth, limit, retry_after_s=self._drain_rates.retry_after_s(queue, depth, limit))

    def _queue_keys(self, queue: str) -> QueueKeys:
        keys = self._queues.get(queue)
        if keys is None:
            keys = self._queues[queue] = self._keys.queue(queue)
        return keys


def _first(job: NewJob, stored: bytes) -> Submitted:
    """The job that a repeated idempotency key stands for."""
    fingerprint, created_ms, first_id = stored.decode().split(":", 2)
    if fingerprint != job.fingerprint:
        raise IdempotencyConflict(job.idempotency_key[1] if job.idempotency_key else "", first_id)
    return Submitted(first_id, int(created_ms) / 1e3, repeated=True)


def _same(job: NewJob, record: bytes) -> Submitted:
    """The job that has the chosen id already, if it is the very same."""
    known = orjson.loads(record or b"{}")
    # A job of somebody else's is none that could be told of.
    if known.get("owner") != job.owner or known.get("fingerprint") != job.fingerprint:
        raise IdTaken(job.id)
    return Submitted(job.id, known["created_at"], repeated=True)
