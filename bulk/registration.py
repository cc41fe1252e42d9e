"""A run's entry in the broker's registry: it says every second how far the run is, and has it do what people want.

The broker may be away: the run goes on, and is told of when the broker is back.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from broker import BrokerUnavailable, BulkRun, BulkRuns, RunState, Wanted
from broker.bulk_runs import REPORT_EVERY_S
from bulk.errors import RunCancelled
from bulk.locations import without_credentials
from bulk.run import Progress, Task
from bulk.steering import Steering

#: How often a run that ends tries to say so, and seconds between the tries: a broker that restarts is soon back.
LAST_TRIES = 10
LAST_TRY_EVERY_S = 0.3


def described(task: Task) -> BulkRun:
    """The entry of a run that begins now, in this process."""
    now = time.time()
    return BulkRun(
        id=f"bulk_{uuid.uuid4().hex[:12]}",
        model=task.model,
        input=without_credentials(task.input.url),
        output=without_credentials(task.output.url),
        host=socket.gethostname(),
        pid=os.getpid(),
        created_at=now,
        updated_at=now,
    )


class Registration:
    """One run's, used in the run's own task.

    `changed` is called with each state that people have brought it to, `reached` when the broker goes away and when it
    is back.
    """

    def __init__(
        self, runs: BulkRuns, run: BulkRun, changed: Callable[[RunState], None], reached: Callable[[bool], None]
    ) -> None:
        self._runs = runs
        self.run = run
        self._changed = changed
        self._reached = reached
        self._is_reached = True
        self._cancelling = False
        self._ended = asyncio.Event()
        self._task = asyncio.current_task()
        self.steering = Steering()
        self._keeper = asyncio.create_task(self._keep())

    def tell(self, progress: Progress) -> None:
        self.run = replace(
            self.run,
            succeeded=progress.succeeded,
            failed=progress.failed,
            rows_per_second=progress.rows_per_second,
            ratio=progress.ratio,
        )

    async def end(self, state: RunState, error: str | None = None) -> None:
        """Say how it ended, if the broker is there."""
        self._ended.set()
        # The last word must not be overtaken by one that is under way.
        await asyncio.wait([self._keeper], timeout=LAST_TRIES * LAST_TRY_EVERY_S)
        self._keeper.cancel()
        said = None if error is None else without_credentials(error)
        ratio = 1.0 if state is RunState.SUCCEEDED else self.run.ratio
        self.run = replace(self.run, state=state, error=said, ratio=ratio)
        for _ in range(LAST_TRIES):
            try:
                await self._report(state)
            except BrokerUnavailable:
                await asyncio.sleep(LAST_TRY_EVERY_S)
            else:
                return

    def cancelled(self) -> bool:
        """Whether the cancellation that has ended the run was what people wanted, and nothing else's too."""
        return self._cancelling and self._task is not None and self._task.uncancel() == 0

    async def _keep(self) -> None:
        """Report for as long as the run lives."""
        while not self._ended.is_set():
            try:
                # Who has heard of something says at once that it is so.
                while self._heed(await self._report(self._state())):
                    pass
            except BrokerUnavailable:
                self._tell_reached(False)
            else:
                self._tell_reached(True)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), REPORT_EVERY_S)

    def _tell_reached(self, now: bool) -> None:
        if now is not self._is_reached:
            self._is_reached = now
            self._reached(now)

    async def _report(self, state: RunState) -> Wanted:
        if state is not self.run.state:
            self.run = replace(self.run, state=state)
            self._changed(state)
        now = replace(self.run, updated_at=time.time())
        return await self._runs.report(replace(now, rows_per_second=0.0) if state is RunState.PAUSED else now)

    def _state(self) -> RunState:
        if self._cancelling:
            return RunState.CANCELLING
        return RunState.PAUSED if self.steering.rests else RunState.RUNNING

    def _heed(self, wanted: Wanted) -> bool:
        """Do what is wanted; returns whether that changed the state."""
        if self._ended.is_set():
            return False
        match wanted:
            case Wanted.PAUSE:
                self.steering.pause()
            case Wanted.RUN:
                self.steering.resume()
            case Wanted.CANCEL if not self._cancelling and self._task is not None:
                self._cancelling = True
                self._task.cancel()
        return self._state() is not self.run.state


@asynccontextmanager
async def registered(
    runs: BulkRuns, run: BulkRun, changed: Callable[[RunState], None], reached: Callable[[bool], None]
) -> AsyncIterator[Registration]:
    """Have the run in the registry while the body does it, in the same task. See `Registration`.

    Raises:
        BrokerUnavailable: it cannot be registered.
        RunCancelled: people wanted the run to end.
    """
    await runs.report(run)
    registration = Registration(runs, run, changed, reached)
    try:
        yield registration
    except asyncio.CancelledError:
        if registration.cancelled():
            await registration.end(RunState.CANCELLED)
            raise RunCancelled("people wanted the run to end") from None
        await registration.end(RunState.STOPPED, "a signal stopped it")
        raise
    except Exception as error:
        await registration.end(RunState.FAILED, str(error))
        raise
    await registration.end(RunState.SUCCEEDED)
