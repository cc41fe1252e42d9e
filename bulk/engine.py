"""Rows through a model's queue, a window of them at a time: lowest priority, results in the order of the rows.

Only rows of the window are ever in the broker: what has been read from it is forgotten there. The engine waits for a
broker that is away or full, sends again what a broker has lost, and cuts up a message that fails as a whole until the
rows that are the cause stand alone. Paused, it takes no more, lets what has begun end, and takes the rest back from the
broker until it goes on. Invariant: each item leaves exactly once, with an output or a failure.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import orjson

from broker import (
    AsyncBroker,
    BrokerUnavailable,
    JobEnded,
    JobFailure,
    JobState,
    JobStatus,
    NewJob,
    Priority,
    queue_name,
)
from bulk.chunks import Item, Outcome, chunks, payload
from bulk.patience import patiently
from bulk.steering import Steering

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Rows that are read and not yet written, unless told otherwise.
WINDOW = 2000
#: Seconds after which a job is looked at though nobody said that it has ended.
LOOK_AGAIN_S = 30.0
#: A message that fails as a whole is cut into so many. If one row is the cause and kills its worker each time, each cut
#: costs as many workers as a message has attempts, so few cuts are better than few messages.
PARTS = 8
#: Seconds for which a pause lets messages end that have begun; after that they are taken back too.
PAUSE_GRACE_S = 5.0
#: Seconds between looks at what is to be taken back: a submit may be under way.
TAKE_BACK_EVERY_S = 0.1

#: Jobs of an earlier process that are looked up together.
CLEARED_TOGETHER = 500

#: Takes the most that are wanted; gives the next items, and none at the end.
Take = Callable[[int], Awaitable[Sequence[Item]]]


class Engine:
    """One run's way through the queue. `owner` is whom its jobs belong to: owners share a priority fairly."""

    def __init__(
        self,
        broker: AsyncBroker,
        model: str,
        *,
        owner: str,
        window: int = WINDOW,
        steering: Steering | None = None,
    ) -> None:
        if window < 1:
            raise ValueError("a window holds at least one row")
        self._broker = broker
        self._model = model
        self._owner = owner
        self._window = window
        self._steering = steering or Steering()
        #: Jobs that have not ended, to be cancelled when the run ends early.
        self._open: set[str] = set()
        #: Those of them that were cancelled by a pause, and are sent again after it.
        self._taken_back: set[str] = set()

    async def outcomes(self, take: Take) -> AsyncGenerator[list[Outcome]]:
        """What became of the items that `take` gives, in their order; no more of them are taken than the window holds.

        A second half of the window is on its way while the first is waited for, so no worker has to wait for us. An
        empty list says that the run is paused, nothing of it is at the broker, and all that could be given was.
        """
        running: set[asyncio.Task[list[Outcome]]] = set()
        taking: asyncio.Task[Sequence[Item]] | None = None
        resting = asyncio.create_task(self._rest())
        #: Numbers of what was taken, in order, and what became of some of it.
        order: list[int] = []
        ready: dict[int, Outcome] = {}
        ended = False
        try:
            while True:
                half = max(1, self._window // 2)
                if taking is None and not ended and self._window - len(order) >= half:
                    taking = asyncio.create_task(self._taken(take, min(half, self._window - len(order))))
                waiting: set[asyncio.Future[Any]] = {*running, *([taking] if taking else [])}
                if not waiting:
                    return
                done, _ = await asyncio.wait({*waiting, resting}, return_when=asyncio.FIRST_COMPLETED)
                if taking in done:
                    assert taking is not None
                    items, taking = taking.result(), None
                    ended = not items
                    order += [item.number for item in items]
                    ready |= {item.number: Outcome(item.number, failure=item.failure) for item in items if item.failure}
                    good = [item for item in items if item.failure is None]
                    running |= {asyncio.create_task(self._serve(chunk)) for chunk in chunks(good)}
                for task in done & running:
                    running.discard(task)
                    ready |= {outcome.number: outcome for outcome in task.result()}
                if first := _first_ready(order, ready):
                    del order[: len(first)]
                    yield first
                if resting in done:
                    yield []
                    resting = asyncio.create_task(self._rest_again())
        finally:
            left: list[asyncio.Future[Any]] = [*running, resting, *([taking] if taking else [])]
            for future in left:
                future.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def clear(self) -> None:
        """Take back, and forget, what an earlier process of the run has left at the broker: nobody would read it."""
        left: list[tuple[int, str]] = []
        while page := await patiently(
            partial(self._broker.overview.listed, self._owner, left[-1] if left else None, CLEARED_TOGETHER)
        ):
            left += page
        for _, job_id in left:
            try:
                cancelled = await patiently(partial(self._broker.cancel, job_id)) is not None
            except JobEnded:
                cancelled = False
            # That it was cancelled stays there for a while: a worker that has begun it would else store its result.
            if not cancelled:
                await patiently(partial(self._broker.forget, self._owner, job_id))

    async def abandon(self) -> None:
        """Cancel what has not ended; for a run that ends before its rows do."""
        for job_id in list(self._open):
            with suppress(BrokerUnavailable, JobEnded):
                # That it was cancelled stays there for a while: a worker that has begun it would else store its result.
                await self._broker.cancel(job_id)
        self._open.clear()

    async def _taken(self, take: Take, most: int) -> Sequence[Item]:
        await self._steering.going()
        return await take(most)

    async def _rest(self) -> None:
        """Returns when a pause, this one or the next, has left nothing at the broker."""
        while True:
            await self._steering.pausing()
            if not self._open:
                return
            await self._take_back(begun_too=self._steering.pause_s > PAUSE_GRACE_S)
            await asyncio.sleep(TAKE_BACK_EVERY_S)

    async def _rest_again(self) -> None:
        """As `_rest`, of a later pause than this one."""
        await self._steering.going()
        await self._rest()

    async def _take_back(self, *, begun_too: bool) -> None:
        for job_id in list(self._open):
            with suppress(BrokerUnavailable, JobEnded):
                state = await self._broker.fetch(job_id)
                if state is not None and (begun_too or state.status is JobStatus.QUEUED):
                    # First, and for good: the cancel is heard of before it returns, and may be done without an answer.
                    self._taken_back.add(job_id)
                    await self._broker.cancel(job_id)

    async def _serve(self, chunk: Sequence[Item]) -> list[Outcome]:
        state = await self._ended(chunk)
        if state.status is JobStatus.SUCCEEDED and state.result is not None:
            rows: list[dict[str, Any]] = orjson.loads(state.result)
            tokens = state.row_tokens or (0,) * len(rows)
            return [_outcome(item, row, counted) for item, row, counted in zip(chunk, rows, tokens, strict=True)]
        if len(chunk) > 1 and state.status is JobStatus.FAILED:
            log.warning(
                "Rows that failed together are tried apart.",
                extra={"count": len(chunk), "cause": state.error and state.error.type},
            )
            size = -(-len(chunk) // PARTS)
            parts = (chunk[begin : begin + size] for begin in range(0, len(chunk), size))
            return list(chain.from_iterable(await asyncio.gather(*map(self._serve, parts))))
        failure = state.error or JobFailure(state.status.value, "the job was ended by somebody")
        return [Outcome(item.number, failure=failure) for item in chunk]

    async def _ended(self, chunk: Sequence[Item]) -> JobState:
        """Have a chunk served by a job of its own, or by another when that was taken back or the broker has lost it."""
        while True:
            await self._steering.going()
            job = self._job(chunk)
            self._open.add(job.id)
            await patiently(partial(self._broker.submit, job))
            state = await self._end_of(job.id)
            taken_back = state is not None and self._was_taken_back(state)
            self._open.discard(job.id)
            self._taken_back.discard(job.id)
            if state is None:
                log.warning("The broker has lost rows; they are sent again.", extra={"count": len(chunk)})
            elif not taken_back:
                return state

    async def _end_of(self, job_id: str) -> JobState | None:
        """How the job ended, which is kept here alone from then on; None when the broker knows nothing of it."""
        while (state := await patiently(partial(self._broker.wait, job_id, LOOK_AGAIN_S))) is not None:
            if state.ended:
                # What was taken back stays cancelled there: a worker that has begun it would else store its result.
                if not self._was_taken_back(state):
                    await patiently(partial(self._broker.forget, self._owner, job_id))
                return state
        return None

    def _was_taken_back(self, state: JobState) -> bool:
        return state.status is JobStatus.CANCELLED and state.id in self._taken_back

    def _job(self, chunk: Sequence[Item]) -> NewJob:
        return NewJob(
            id=str(uuid.uuid4()),
            model=self._model,
            queue=queue_name(self._model),
            payload=payload(chunk),
            priority=Priority.LOW,
            created_at=time.time(),
            expires_at=None,
            many=True,
            owner=self._owner,
        )


def _first_ready(order: Sequence[int], ready: dict[int, Outcome]) -> list[Outcome]:
    """The outcomes with which the order begins, taken out of `ready`."""
    found: list[Outcome] = []
    for number in order:
        outcome = ready.pop(number, None)
        if outcome is None:
            break
        found.append(outcome)
    return found


def _outcome(item: Item, row: dict[str, Any], tokens: int) -> Outcome:
    if "error" in row:
        return Outcome(item.number, failure=JobFailure(row["error"]["type"], row["error"]["message"]))
    return Outcome(item.number, row["output"], tokens=tokens)
