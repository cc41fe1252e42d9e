"""What a device runs next, of all the models that it serves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from batching.batcher import Batcher
from batching.fairness import Shares
from batching.types import LOWEST, Batch

T = TypeVar("T")

#: Share of a device's time that each lower priority gets while a higher one waits.
LOW_SHARE = 0.1
#: How many times the device time of another model a model gets at most because its rows have waited longer.
MOST_BY_AGE = 8.0


@dataclass(slots=True, eq=False)
class _Place(Generic[T]):
    """One model's place in the turns: `used_s` is its device time, weighted; the least is next."""

    batcher: Batcher[T]
    used_s: float = 0.0
    #: What batches that have not ended were charged, by the identity of the batch.
    charges: dict[int, _Charge] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Charge:
    """What a batch was expected to take, and for whom it counts."""

    level: int
    waiting: Sequence[int]
    seconds: float
    weight: float


class Scheduler(Generic[T]):
    """Joins batchers: first the priority level is chosen, then the model.

    A lower level leads for its share of the device's time. Models of one level share it by the age of their oldest
    rows: twice as long a wait gets twice the time, within `MOST_BY_AGE`, so the ages draw level and none starves.
    """

    def __init__(self, low_share: float = LOW_SHARE) -> None:
        self._places: list[_Place[T]] = []
        self._shares = Shares(low_share)

    def serve(self, batcher: Batcher[T]) -> None:
        """From now on this one's rows too."""
        self._places.append(_Place(batcher, min((place.used_s for place in self._places), default=0.0)))

    def next_wakeup(self, now: float) -> float | None:
        """When a batch will be due if nothing is added; None without rows."""
        wakeups = [place.batcher.next_wakeup(now) for place in self._places]
        return min((wakeup for wakeup in wakeups if wakeup is not None), default=None)

    def due(self, now: float, *, callers_only: bool = False) -> tuple[Batcher[T], Batch[T]] | None:
        """The batch to run, when one is due, and whose it is. Ask when the device is free, or about to be.

        With `callers_only` ask while a batch of the lowest level runs that could stand aside: for what should go first.
        """
        wakeups = [(place.batcher.next_wakeup(now), place) for place in self._places]
        due = [place for wakeup, place in wakeups if wakeup is not None and wakeup <= now]
        if callers_only:
            due = [place for place in due if place.batcher.levels()[0] != LOWEST]
        if not due:
            for place in self._places if not callers_only else ():
                # They learn that the device waits for them.
                place.batcher.due(now)
            return None
        waiting = sorted({level for place in due for level in place.batcher.levels()})
        if callers_only and LOWEST not in waiting:
            # It is what would stand aside.
            waiting.append(LOWEST)
        level = self._shares.pick(waiting)
        if callers_only and level == LOWEST:
            return None
        chosen = min(
            (place for place in due if place.batcher.rows_at(level)),
            key=lambda place: (place.used_s, place.batcher.oldest),
        )
        age_s = now - chosen.batcher.oldest
        floor = min(place.used_s for place in due)
        batch = chosen.batcher.due(now, level, callers_only=callers_only)
        assert batch is not None
        seconds = chosen.batcher.cost.model.seconds(batch.padded_tokens)
        weight = _weight(age_s)
        self._shares.charge(level, waiting, seconds)
        self._advance(chosen, seconds, weight, floor, due)
        chosen.charges[id(batch)] = _Charge(level, waiting, seconds, weight)
        return chosen.batcher, batch

    def ended(self, batcher: Batcher[T], batch: Batch[T], seconds: float) -> None:
        """A batch that was due has taken so many seconds; 0 when it was not run. What it was charged is set right."""
        place = next(place for place in self._places if place.batcher is batcher)
        charge = place.charges.pop(id(batch))
        place.used_s += (seconds - charge.seconds) / charge.weight
        self._shares.correct(charge.level, charge.waiting, seconds - charge.seconds)

    def _advance(
        self, chosen: _Place[T], seconds: float, weight: float, floor: float, due: Sequence[_Place[T]]
    ) -> None:
        chosen.used_s += seconds / weight
        for place in self._places:
            # Who has nothing to run saves nothing up. What it is ahead melts by the whole time of the others' batches,
            # whatever their age: a trickle that needs less than an equal part is served as it comes.
            if place not in due or (place is not chosen and not len(place.batcher)):
                place.used_s = max(place.used_s - seconds * (1 - 1 / weight), floor)


def _weight(age_s: float) -> float:
    """What divides a batch's time when it is charged: grows with the wait, in seconds, of the model's oldest row."""
    return min(max(1.0, age_s), MOST_BY_AGE) if math.isfinite(age_s) else 1.0
