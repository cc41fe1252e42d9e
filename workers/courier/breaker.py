"""Leaves a host alone that fails time after time, but for one call now and then that finds out whether it is back."""

from __future__ import annotations

import logging
import random
import time

from workers.courier.schedule import Answer

log = logging.getLogger(__name__)

#: Longest time for which a breaker stays open, seconds.
MAX_OPEN_S = 600.0


class Breaker:
    """Of one owner's calls to one host. Clock: `time.monotonic`."""

    def __init__(self, host: str, owner: str, failures: int, open_s: float) -> None:
        self._told = {"host": host, "owner": owner}
        self._most = failures
        self._first_open_s = open_s
        self._failures = 0
        self._open_until = 0.0
        self._open_s = open_s
        self._probing = False

    @property
    def is_open(self) -> bool:
        """The host is left alone, but for probes."""
        return self._failures >= self._most

    @property
    def is_untouched(self) -> bool:
        """There is nothing to remember."""
        return not self._failures and not self._probing

    def put_off_s(self) -> float | None:
        """For how long one more is to be put off; None when it may come, as a probe where the breaker is open."""
        closed = self.is_open and (self._probing or time.monotonic() < self._open_until)
        return self.until_probe_s() if closed else None

    def until_probe_s(self) -> float:
        """A little later than the probe, so that what it says is known."""
        left = max(0.0, self._open_until - time.monotonic())
        return left + random.uniform(0.1, 0.3) * self._first_open_s

    def begin(self) -> bool:
        """One more comes; True for a probe, whose end is to be told of."""
        self._probing = self.is_open
        return self._probing

    def probed(self) -> None:
        """The probe is over, whether or not there was a call."""
        self._probing = False

    def ended(self, answer: Answer) -> None:
        """A call has ended."""
        was_open = self.is_open
        if not answer.blames_host:
            if was_open:
                log.info("A host answers again.", extra=self._told)
            self._failures, self._open_s = 0, self._first_open_s
            return
        self._failures += 1
        if self.is_open and time.monotonic() >= self._open_until:
            if was_open:
                self._open_s = min(2 * self._open_s, max(MAX_OPEN_S, self._first_open_s))
            self._open_until = time.monotonic() + self._open_s
            extra = {**self._told, "failures": self._failures, "open_s": self._open_s, "error": answer.error}
            log.warning("A host fails, and is left alone for a while.", extra=extra)
