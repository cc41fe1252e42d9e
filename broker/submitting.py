"""Submits that wait together travel together: one script call per queue and flush, each job answered on its own."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from hashlib import sha1
from typing import cast

import redis.asyncio
from redis.exceptions import NoScriptError

from broker.errors import IdempotencyConflict, QueueFull
from broker.faults import translated_async, tried_twice
from broker.jobs import NewJob
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
#: How long an idempotency key is remembered.
IDEMPOTENCY_TTL_S = 86400

_Entry = tuple[NewJob, "asyncio.Future[str]"]


class Submitter:
    """One process' submits."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: Keys,
        *,
        max_queue_depth: int,
    ) -> None:
        self._client = client
        self._keys = keys
        self._max_queue_depth = max_queue_depth
        self._queues: dict[str, QueueKeys] = {}
        self._together: Together[NewJob, str] = Together(MAX_TOGETHER, self._send_all)
        self._script = script_text("submit")
        self._sha = sha1(self._script.encode(), usedforsecurity=False).hexdigest()

    async def submit(self, job: NewJob) -> str:
        """Return the job's id once the server has accepted it; the first job's id for a repeated idempotency key.

        Raises `QueueFull`, `IdempotencyConflict`, or `BrokerUnavailable`; after the last the job may have been
        accepted all the same, if only the answer was lost.
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
            if not future.done():
                _resolve(future, job, answer, self._max_queue_depth)

    async def _evaluate(self, keys: QueueKeys, entries: Sequence[_Entry]) -> list[int | bytes]:
        script_keys = (*keys.waiting, *keys.returned, keys.delayed, keys.owned_depths, *keys.rotations, *keys.places)
        arguments: list[str | bytes | int] = [*script_keys]
        arguments += (self._max_queue_depth, RECORD_TTL_S, IDEMPOTENCY_TTL_S, FAIR_FROM)
        for job, _ in entries:
            arguments += (
                PRIORITY_STEPS.index(job.priority) + 1,
                self._keys.record(job.id),
                encode_record(job),
                encode(job),
                self._keys.idempotency(*job.idempotency_key) if job.idempotency_key else "",
                f"{job.fingerprint}:{job.id}",
                job.owner,
                keys.owned(job.priority, job.owner),
            )
        try:
            answer = await self._client.evalsha(self._sha, len(script_keys), *arguments)
        except NoScriptError:
            answer = await self._client.eval(self._script, len(script_keys), *arguments)
        return cast("list[int | bytes]", answer)

    def _queue_keys(self, queue: str) -> QueueKeys:
        keys = self._queues.get(queue)
        if keys is None:
            keys = self._queues[queue] = self._keys.queue(queue)
        return keys


def _resolve(future: asyncio.Future[str], job: NewJob, answer: int | bytes, limit: int) -> None:
    if answer == 0:
        future.set_result(job.id)
    elif isinstance(answer, int):
        future.set_exception(QueueFull(job.queue, answer, limit))
    else:
        fingerprint, _, first_id = answer.decode().partition(":")
        if fingerprint == job.fingerprint:
            future.set_result(first_id)
        else:
            key = job.idempotency_key[1] if job.idempotency_key else ""
            future.set_exception(IdempotencyConflict(key, first_id))
