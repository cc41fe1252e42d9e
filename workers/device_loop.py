"""The thread that owns the device, and the one that makes the next batch ready while the device runs this one.

A batch is formed as late as possible, so that it holds whatever has come by then: the stager begins when the running
batch is about to end, by what the device was seen to take. A device that comes free before that stages by itself.

A batch that nobody waits for gives way to callers' rows where its handler lets it: theirs run in the middle of it.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from functools import partial

from inference import giving_way
from workers.handover import Handover, RunBatch
from workers.lane import Lane
from workers.staging import Staged, Stager
from workers.threads import Grace, core_thread
from workers.watch import StepWatch

#: A batch expected to run for less than this, seconds, is over before another thread has staged the next one.
WORTH_STAGING_S = 0.003
#: A batch that takes longer than this many times what was expected of it, and by so many seconds, was not foreseen.
FORESEEN = 1.5
FORESEEN_S = 0.005
#: Share of its batches, lately, that a lane must have foreseen: what is staged too early misses what comes meanwhile.
TRUSTED = 0.5
#: How much of what staging took lately it is begun ahead of time, and seconds more.
LEAD = 1.5
LEAD_S = 0.001


@dataclass(slots=True, eq=False)
class _Run:
    """A batch on the device. Clock: `time.monotonic`."""

    ends_at: float
    #: The stager has looked for the next one.
    followed: bool = False
    #: Seconds for which it has stood aside for others.
    aside_s: float = 0.0
    #: What went wrong meanwhile; it must not look like a failure of this batch.
    fault: BaseException | None = None


class DeviceLoop:
    """Runs batches of all lanes of one device, one at a time. `lock` is the lanes' lock."""

    def __init__(self, stager: Stager, lock: threading.Condition, settling: Handover, watch: StepWatch) -> None:
        self._lock = lock
        self._settling = settling
        self._watch = watch
        self._stopping = stager.stopping
        self._stager = stager
        #: Held by the thread that stages.
        self._staging = threading.Lock()
        self._staged: Staged | None = None
        self._staging_s = 0.0
        #: Guards `_running`: the batch on the device, while it is worth staging the next one meanwhile.
        self._run_changed = threading.Condition()
        self._running: _Run | None = None
        self._threads = (core_thread("device", self._run), core_thread("stager", self._stage_ahead))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def serve(self, lane: Lane) -> None:
        """From now on run this lane's batches too."""
        self._stager.serve(lane)

    def stop(self, grace: Grace) -> bool:
        """Finish the running batch, take no other. False when it still runs after the grace."""
        self._stopping.set()
        for condition in (self._lock, self._run_changed):
            with condition:
                condition.notify_all()
        ended = [grace.join(thread) for thread in self._threads]
        return all(ended)

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self._staging:
                staged, self._staged = self._staged or self._stage(), None
                if staged is not None:
                    staged = self._stager.looked_over(staged)
            if staged is None:
                self._stager.wait()
            elif not self._stopping.is_set():
                self._run_batch(staged)

    def _run_batch(self, staged: Staged, *, in_between: bool = False) -> None:
        """`in_between`: in the middle of another one, which stands aside."""
        lane = staged.lane
        for row in staged.rows:
            row.job.begun = True
        begin = time.monotonic()
        expected_s = lane.batcher.cost.model.seconds(staged.padded_tokens)
        run = _Run(begin + expected_s)
        followed = not in_between and expected_s >= WORTH_STAGING_S and lane.foreseen >= TRUSTED
        if followed:
            self._set_running(run)
        gives_way = None if staged.is_callers else partial(self._stand_aside, run)
        with self._watch.step("infer", lane), giving_way(gives_way):
            inferred = lane.executor.infer([row.encoded for row in staged.rows], staged.collated)
        if run.fault is not None:
            raise run.fault
        infer_s = time.monotonic() - begin - run.aside_s
        if followed:
            self._set_running(None)
        lane.foreseen += 0.2 * ((infer_s <= FORESEEN * expected_s + FORESEEN_S) - lane.foreseen)
        with self._lock:
            lane.batcher.cost.add(staged.padded_tokens, infer_s)
            self._stager.ended(lane, staged.batch, infer_s)
        self._settling.put(RunBatch(lane, staged.rows, inferred, infer_s, staged.longest, staged.batch.reason))

    def _stand_aside(self, run: _Run) -> None:
        """Run callers' batches in the middle of `run`. Its handler calls this, and must not see what goes wrong."""
        staged = self._staged
        if not (self._stager.callers_wait() or (staged is not None and staged.is_callers)):
            return
        begin = time.monotonic()
        try:
            with self._watch.aside():
                while run.fault is None and (urgent := self._urgent()) is not None:
                    self._run_batch(urgent, in_between=True)
        except BaseException as error:
            run.fault = error
        with self._run_changed:
            aside_s = time.monotonic() - begin
            run.aside_s += aside_s
            run.ends_at += aside_s
            self._run_changed.notify_all()

    def _urgent(self) -> Staged | None:
        """The callers' batch that should go first while one that nobody waits for runs."""
        with self._staging:
            if self._stopping.is_set():
                return None
            if self._staged is not None and self._staged.is_callers:
                staged, self._staged = self._staged, None
                return self._stager.looked_over(staged)
            urgent = self._stager.stage(callers_only=True)
            return None if urgent is None else self._stager.looked_over(urgent)

    def _set_running(self, run: _Run | None) -> None:
        with self._run_changed:
            self._running = run
            self._run_changed.notify_all()

    def _stage_ahead(self) -> None:
        while (run := self._about_to_end()) is not None:
            with self._staging:
                if self._staged is None and self._running is run and not self._stopping.is_set():
                    self._staged = self._stage()

    def _about_to_end(self) -> _Run | None:
        """The batch that runs, once, when it is time to stage the next one; None when stopping."""
        with self._run_changed:
            while not self._stopping.is_set():
                run = self._running
                if run is None or run.followed:
                    self._run_changed.wait()
                    continue
                pause_s = run.ends_at - time.monotonic() - LEAD * self._staging_s - LEAD_S
                if pause_s <= 0:
                    run.followed = True
                    return run
                self._run_changed.wait(pause_s)
        return None

    def _stage(self) -> Staged | None:
        begin = time.monotonic()
        staged = self._stager.stage()
        if staged is not None:
            self._staging_s += 0.2 * (time.monotonic() - begin - self._staging_s)
        return staged
