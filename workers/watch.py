"""Finds steps of executors that never end: a device that hangs, a handler that waits for ever.

A thread in such a step can be neither stopped nor replaced. While its process lives it would renew its leases, and its
jobs would be held for ever; so the process has to end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from workers.lane import Lane


@dataclass(frozen=True, slots=True)
class Step:
    """A step that runs. Clock: `time.monotonic`."""

    name: str
    lane: Lane
    since: float


class StepWatch:
    """Knows which steps run now. Each thread runs one at a time."""

    def __init__(self) -> None:
        self._running: dict[int, Step] = {}

    @contextmanager
    def step(self, name: str, lane: Lane) -> Iterator[None]:
        """Wrap a call of an executor."""
        thread = threading.get_ident()
        self._running[thread] = Step(name, lane, time.monotonic())
        try:
            yield
        finally:
            del self._running[thread]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """The step that this thread runs stands still meanwhile, and others may run in between."""
        thread = threading.get_ident()
        step, begin = self._running.pop(thread), time.monotonic()
        try:
            yield
        finally:
            self._running[thread] = replace(step, since=step.since + time.monotonic() - begin)

    def frozen(self) -> Step | None:
        """A step that has run for longer than its lane allows; None when there is none."""
        now = time.monotonic()
        overdue = (step for step in list(self._running.values()) if now - step.since > step.lane.kind.step_timeout_s)
        return next(overdue, None)
