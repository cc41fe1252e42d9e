"""What becomes of a delivery after an attempt. Pure: the clock is an argument."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from broker.deliveries import Attempt, Delivery, DeliveryState

#: Of each pause, what is added to it at random at most: receivers that were down are not called by all at once.
JITTER_RATIO = 0.2
#: Longest pause that a receiver may ask for.
MAX_RETRY_AFTER_S = 86_400.0
#: Attempts that are remembered of a delivery, the last ones.
MAX_ATTEMPTS_KEPT = 32
#: Beyond the time that all attempts take, for how long a host's deliveries may be put off.
PATIENCE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Answer:
    """How a call went. `status` is None where there was no answer, `error` where it was a success.

    `detail` is what others say of the error: the receiver, or the system.
    """

    at: float
    duration_s: float
    status: int | None
    error: str | None
    detail: str | None = None
    #: What the receiver asked for; None where it did not.
    retry_after_s: float | None = None

    @property
    def blames_host(self) -> bool:
        """Whether it lay with the host, not with this one address on it: others would fail too."""
        return self.error is not None and (self.status is None or self.status >= 500 or self.status == 429)


def after(delivery: Delivery, answer: Answer, schedule_s: Sequence[float], now: float) -> Delivery:
    """The delivery once this attempt is counted."""
    attempt = Attempt(answer.at, round(answer.duration_s * 1e3, 3), answer.status, answer.error, answer.detail)
    attempts = (*delivery.attempts, attempt)[-MAX_ATTEMPTS_KEPT:]
    tries = delivery.tries + 1
    counted = replace(delivery, attempts=attempts, tries=tries, next_attempt_at=None)
    if answer.error is None:
        return replace(counted, state=DeliveryState.DELIVERED)
    if answer.status == 410 or tries >= len(schedule_s):
        return replace(counted, state=DeliveryState.FAILED)
    pause_s = schedule_s[tries] * random.uniform(1.0, 1.0 + JITTER_RATIO)
    if answer.retry_after_s is not None:
        pause_s = max(pause_s, min(answer.retry_after_s, MAX_RETRY_AFTER_S))
    return replace(counted, state=DeliveryState.PENDING, next_attempt_at=now + pause_s)


def gives_up_at(began_at: float, schedule_s: Sequence[float]) -> float:
    """Unix seconds after which a delivery that is put off again has failed."""
    return began_at + sum(schedule_s) * (1.0 + JITTER_RATIO) + PATIENCE_S
