"""Shares a courier's places between owners, so that none keeps another's deliveries waiting.

It asks nothing of hosts: names cost nothing, and whoever has some can make up any number of hosts that never answer.
"""

from __future__ import annotations

import time

from workers.courier.pace import MIN_PUT_OFF_S, Pace
from workers.portions import Portions


class Places:
    """Who has which of `most` places, a place for each leased message that is in hand. Clock: `time.monotonic`."""

    def __init__(self, most: int) -> None:
        self._portions = Portions(most)
        #: Of each message with a place: its owner, and since when.
        self._taken: dict[bytes, tuple[str, float]] = {}
        #: Of each owner with a place.
        self._paces: dict[str, Pace] = {}

    @property
    def free(self) -> int:
        return self._portions.free

    def take(self, tag: bytes, owner: str) -> float | None:
        """Give a message a place. Where there is none for its owner: for how long it is to be put off, seconds."""
        held = self._portions.held(owner)
        if not self._portions.has_one_for(owner):
            return self._paces[owner].until_turn_s(held) if held else MIN_PUT_OFF_S
        if not held:
            self._paces[owner] = Pace()
        self._portions.take(owner)
        self._taken[tag] = owner, time.monotonic()
        self._paces[owner].began()
        return None

    def leave(self, tag: bytes) -> None:
        """The message that had this place is not in hand any more."""
        owner, since = self._taken.pop(tag)
        self._portions.give_back(owner)
        self._paces[owner].ended(time.monotonic() - since)
        if not self._portions.held(owner):
            del self._paces[owner]
