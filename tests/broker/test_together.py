"""Requests that share round trips: each is answered, few trips are needed, and never more than two run at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from broker.together import FLIGHTS, Together

Entries = Sequence[tuple[int, "asyncio.Future[int]"]]


class Server:
    """Answers with the number that was asked, after a moment that may be none."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.trips: list[int] = []
        self.at_once = self.most_at_once = 0

    async def answer(self, entries: Entries) -> None:
        self.trips.append(len(entries))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(self._random.choice([0, 0, 0.001]))
        self.at_once -= 1
        for number, future in entries:
            if not future.done():
                future.set_result(number)


@pytest.mark.parametrize("seed", range(5))
async def test_callers_that_ask_again_and_again_are_all_answered(seed: int) -> None:
    server = Server(seed)
    together: Together[int, int] = Together(8, server.answer)

    async def caller(number: int) -> None:
        for turn in range(100):
            assert await together.ask(number * 1000 + turn) == number * 1000 + turn

    async with asyncio.timeout(20):
        await asyncio.gather(*(caller(number) for number in range(16)))
    assert sum(server.trips) == 1600
    assert max(server.trips) <= 8
    assert server.most_at_once <= FLIGHTS


async def test_what_is_asked_at_once_is_one_trip() -> None:
    server = Server(0)
    together: Together[int, int] = Together(256, server.answer)
    assert await asyncio.gather(*map(together.ask, range(64))) == list(range(64))
    assert server.trips == [64]


async def test_a_caller_that_gives_up_leaves_the_others_be() -> None:
    server = Server(0)
    together: Together[int, int] = Together(256, server.answer)
    asked = [asyncio.create_task(together.ask(number)) for number in range(3)]
    await asyncio.sleep(0)
    asked[1].cancel()
    assert list(await asyncio.gather(asked[0], asked[2])) == [0, 2]
