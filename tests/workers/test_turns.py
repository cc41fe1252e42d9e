"""How owners share the turns of a host, and who is next."""

from __future__ import annotations

import asyncio

import pytest

from workers.courier.turns import Turns


async def waiting(turns: Turns, owner: str) -> asyncio.Task[None]:
    """Somebody who asks for a turn, and has it or waits now."""
    asked = asyncio.create_task(turns.take(owner))
    await asyncio.sleep(0)
    return asked


async def test_a_turn_that_ends_goes_to_each_waiting_owner_once_before_it_goes_to_one_again() -> None:
    turns = Turns(2)
    await turns.take("a")
    await turns.take("b")
    lines = {owner: [await waiting(turns, owner) for _ in range(3)] for owner in "cde"}
    served = ""
    for last in "abcdecd":
        turns.give_back(last)
        await asyncio.sleep(0)
        [owner] = [owner for owner, line in lines.items() if line[0].done()]
        served += owner
        lines[owner].pop(0)
    assert served == "cdecdec"
    for line in lines.values():
        for asked in line:
            asked.cancel()


async def test_however_many_of_an_owner_wait_another_has_its_turn_at_once() -> None:
    turns = Turns(8)
    long = [await waiting(turns, "long") for _ in range(100)]
    assert (turns.held("long"), turns.waiting("long")) == (4, 96)
    await asyncio.wait_for(turns.take("short"), 1)
    for asked in long:
        asked.cancel()


async def test_who_waits_no_more_is_passed_over() -> None:
    turns = Turns(1)
    await turns.take("a")
    first, second = [await waiting(turns, "b") for _ in range(2)]
    first.cancel()
    turns.give_back("a")
    await asyncio.wait_for(second, 1)
    assert (turns.held("a"), turns.held("b"), turns.waiting("b")) == (0, 1, 0)


async def test_a_turn_that_came_in_the_moment_in_which_it_was_given_up_is_had_by_the_next() -> None:
    turns = Turns(1)
    await turns.take("a")
    first, second = [await waiting(turns, owner) for owner in "bc"]
    turns.give_back("a")
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await asyncio.wait_for(second, 1)
    assert (turns.held("b"), turns.held("c")) == (0, 1)
