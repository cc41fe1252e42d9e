"""That a delivery is not made now: until when, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """In words for whoever waits for the delivery."""

    FAILING = "the last calls of its owner to its host have failed; the host is called again after a while"
    HOST_BUSY = "as many calls of its owner to its host are under way as there may be at once"
    OWNER_BUSY = "as many webhooks of its owner are under way as there may be at once"
    FAULT = "it could not be made by a fault of this service"


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float
    reason: Reason


class PutOff(Exception):
    """Not now, but after a pause."""

    def __init__(self, pause: Pause) -> None:
        super().__init__(f"in {pause.seconds:g} s: {pause.reason}")
        self.pause = pause
