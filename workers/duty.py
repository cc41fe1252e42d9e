"""What a thread does every so often, whether the broker is there or not."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from broker import BrokerUnavailable

log = logging.getLogger(__name__)


class Duty:
    """Something to do every so often; at once again, after the other duties, when it says that there is more to do."""

    def __init__(self, name: str, every_s: float, perform: Callable[[], bool | None]) -> None:
        self.name = name
        self.next_at = 0.0
        self._every_s = every_s
        self._perform = perform

    def due_in(self) -> float:
        """Seconds until it is due; 0 when it is."""
        return max(0.0, self.next_at - time.monotonic())

    def perform_when_due(self) -> None:
        now = time.monotonic()
        if now < self.next_at:
            return
        self.next_at = now + self._every_s
        try:
            if self._perform():
                self.next_at = now
        except BrokerUnavailable as error:
            self.next_at = now + min(self._every_s, 1.0)
            log.warning("The broker is away; trying again.", extra={"duty": self.name, "cause": str(error)})
        except Exception:
            log.exception("A duty failed; it is tried again.", extra={"duty": self.name})


def perform_until(stopped: threading.Event, duties: Sequence[Duty]) -> None:
    """Perform each of them whenever it is due."""
    while not stopped.wait(min(duty.due_in() for duty in duties)):
        for duty in duties:
            duty.perform_when_due()
