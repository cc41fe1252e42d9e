"""What the producers know: which jobs were accepted, which may have been, and how each of them has to end."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Producer(StrEnum):
    HTTP_ONE = "http, one row"
    HTTP_MANY = "http, many rows"
    HTTP_WAITING = "http, waiting for the result"
    CELERY = "celery"


class Outcome(StrEnum):
    SUCCEEDS = "succeeds"
    FAILS = "fails"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Expectation:
    """How a job has to end. `value` is its output, or what the failure's message or the dead letter's reason holds."""

    outcome: Outcome
    value: object


@dataclass(frozen=True, slots=True)
class Sent:
    """A job as its producer knows it. Times are Unix seconds."""

    id: str
    producer: Producer
    queue: str
    expected: Expectation
    #: When the producer was told that it is accepted; None when it was told that something failed on the way.
    accepted_at: float | None
    #: When it may run, for a delayed one.
    due_at: float = 0.0
    #: How often it was submitted.
    tries: int = 1


class Ledger:
    """Written by all producers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: list[Sent] = []
        self._complaints: list[str] = []

    def note(self, sent: Sent) -> None:
        with self._lock:
            self._sent.append(sent)

    def complain(self, what: str) -> None:
        """A producer was given an answer that it should never get."""
        with self._lock:
            self._complaints.append(what)

    @property
    def sent(self) -> Sequence[Sent]:
        with self._lock:
            return list(self._sent)

    @property
    def complaints(self) -> Sequence[str]:
        with self._lock:
            return list(self._complaints)
