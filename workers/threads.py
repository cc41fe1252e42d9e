"""Threads that a worker cannot live without."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

#: Exit status of a worker that lost one of its threads; BSD's EX_SOFTWARE.
EXIT_STATUS = 70


def core_thread(name: str, run: Callable[[], None]) -> threading.Thread:
    """A thread for `run`. When `run` raises, the process ends at once: its supervisor starts another, and what it held
    comes back with its attempt counted. A worker that lives on without one of its threads would hold its jobs for ever.
    """

    def guarded() -> None:
        try:
            run()
        except BaseException:
            log.critical("A thread died, so the worker ends.", exc_info=True, extra={"dead_thread": name})
            logging.shutdown()
            os._exit(EXIT_STATUS)

    return threading.Thread(target=guarded, name=name, daemon=True)
