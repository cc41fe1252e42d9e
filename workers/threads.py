"""Threads that a worker cannot live without, and how long their ends are waited for."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

#: Exit status of a worker that lost one of its threads; BSD's EX_SOFTWARE.
EXIT_STATUS = 70
#: Of threads that work in the background, as nice(1) counts: with a full processor they get a tenth of an equal part.
NICENESS = 10
#: Seconds between looks at whether a wait was cut short.
_LOOK_EVERY_S = 0.05


def core_thread(name: str, run: Callable[[], None], *, in_background: bool = False) -> threading.Thread:
    """A thread for `run`. When `run` raises, the process ends at once: its supervisor starts another, and what it held
    comes back with its attempt counted. A worker that lives on without one of its threads would hold its jobs for ever.

    One that works `in_background`, and what threads it starts, leaves the processor to whatever somebody waits for.
    """

    def guarded() -> None:
        try:
            if in_background:
                # Of a thread, on Linux.
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
            run()
        except BaseException:
            log.critical("A thread died, so the worker ends.", exc_info=True, extra={"dead_thread": name})
            end_process()

    return threading.Thread(target=guarded, name=name, daemon=True)


def end_process() -> None:
    """End at once, whatever other threads do."""
    logging.shutdown()
    os._exit(EXIT_STATUS)


class Grace:
    """The time that is left for stopping in order; may be cut short from a signal handler, before it begins too."""

    def __init__(self) -> None:
        self._ends_at = float("inf")
        self.is_cut = False

    def begin(self, seconds: float) -> None:
        self._ends_at = time.monotonic() + seconds

    def cut(self) -> None:
        """There is no time left."""
        self.is_cut = True

    def left_s(self) -> float:
        return 0.0 if self.is_cut else max(0.0, self._ends_at - time.monotonic())

    def join(self, thread: threading.Thread) -> bool:
        """Wait for the thread to end; False when it had not within the grace."""
        while thread.is_alive() and (left := self.left_s()) > 0:
            thread.join(min(_LOOK_EVERY_S, left))
        return not thread.is_alive()
