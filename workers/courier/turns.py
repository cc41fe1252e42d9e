"""Shares the turns of a host between the owners whose webhooks it receives.

Who finds no turn waits in its owner's own line. A turn that ends goes to the first of the lines whose owner may have
one, and that line becomes the last one: however long it is, it keeps no other owner out.
"""

from __future__ import annotations

import asyncio

from workers.portions import Portions


class Turns:
    """`most` turns; for one event loop."""

    def __init__(self, most: int) -> None:
        self._portions = Portions(most)
        #: Who waits, by owner; no empty lines. Nobody is in one who may have a turn.
        self._lines: dict[str, dict[asyncio.Future[None], None]] = {}

    def held(self, owner: str) -> int:
        return self._portions.held(owner)

    def waiting(self, owner: str) -> int:
        return len(self._lines.get(owner, ()))

    async def take(self, owner: str) -> None:
        """Wait until there is a turn, and have it."""
        if self._portions.has_one_for(owner):
            self._portions.take(owner)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(owner, {})[turn] = None
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._step_out(owner, turn)
            else:
                # It came in the very moment in which nobody waited for it any more.
                self.give_back(owner)
            raise

    def give_back(self, owner: str) -> None:
        """A turn of this owner has ended."""
        self._portions.give_back(owner)
        while (next_owner := next(filter(self._portions.has_one_for, self._lines), None)) is not None:
            line = self._lines.pop(next_owner)
            turn = next(iter(line))
            del line[turn]
            if line:
                self._lines[next_owner] = line
            if not turn.done():
                self._portions.take(next_owner)
                turn.set_result(None)

    def _step_out(self, owner: str, turn: asyncio.Future[None]) -> None:
        line = self._lines.get(owner, {})
        line.pop(turn, None)
        if not line:
            self._lines.pop(owner, None)
