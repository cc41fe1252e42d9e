"""Shares a courier's places between owners, so that none keeps another's deliveries waiting.

An owner gets another place while it has fewer than are free. So one that floods the courier alone gets half of all;
`n` that do so get a part of `n + 1` each, and as much stays free for others. It asks nothing of hosts: names cost
nothing, and whoever has some can make up any number of hosts that never answer.

Source: Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches", 1998, with alpha 1.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from workers.courier.pace import MIN_PUT_OFF_S, Pace


@dataclass(slots=True)
class _Share:
    held: int = 0
    pace: Pace = field(default_factory=Pace)


class Places:
    """Who has which of `most` places, a place for each leased message that is in hand. Clock: `time.monotonic`."""

    def __init__(self, most: int) -> None:
        self._most = most
        #: Of each message with a place: its owner, and since when.
        self._taken: dict[bytes, tuple[str, float]] = {}
        self._shares: dict[str, _Share] = {}

    @property
    def free(self) -> int:
        return self._most - len(self._taken)

    def take(self, tag: bytes, owner: str) -> float | None:
        """Give a message a place. Where there is none for its owner: for how long it is to be put off, seconds."""
        share = self._shares.get(owner) or _Share()
        if share.held >= self.free:
            return share.pace.until_turn_s(share.held) if share.held else MIN_PUT_OFF_S
        self._shares[owner] = share
        self._taken[tag] = owner, time.monotonic()
        share.held += 1
        share.pace.began()
        return None

    def leave(self, tag: bytes) -> None:
        """The message that had this place is not in hand any more."""
        owner, since = self._taken.pop(tag)
        share = self._shares[owner]
        share.held -= 1
        share.pace.ended(time.monotonic() - since)
        if not share.held:
            del self._shares[owner]
