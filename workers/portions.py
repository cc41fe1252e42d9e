"""The rule by which owners share a number of places, or of turns, so that none keeps another waiting. Pure.

An owner gets another one while it holds fewer than are free. So one that takes all it can get has half of them when
alone; `n` that do so have a part of `n + 1` each, and as much stays free for others.

Source: Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches", 1998, with alpha 1.
"""

from __future__ import annotations


class Portions:
    """How many of `most` each owner holds."""

    def __init__(self, most: int) -> None:
        self.free = most
        #: No zeros.
        self._held: dict[str, int] = {}

    def held(self, owner: str) -> int:
        return self._held.get(owner, 0)

    def has_one_for(self, owner: str) -> bool:
        """Whether this owner may take another one now."""
        return self.held(owner) < self.free

    def take(self, owner: str) -> None:
        self._held[owner] = self.held(owner) + 1
        self.free -= 1

    def give_back(self, owner: str) -> None:
        self._held[owner] -= 1
        self.free += 1
        if not self._held[owner]:
            del self._held[owner]
