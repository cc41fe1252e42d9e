"""The event that connections have instead of asyncio's."""

from __future__ import annotations

import asyncio

from api.light import LightEvent


async def test_all_who_wait_are_woken_and_one_that_gives_up_takes_nobody_along() -> None:
    event = LightEvent()
    waiting = [asyncio.create_task(event.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[1].cancel()
    event.set()
    assert list(await asyncio.gather(waiting[0], waiting[2])) == [True, True]
    assert waiting[1].cancelled()


async def test_it_stays_set_until_it_is_cleared() -> None:
    event = LightEvent(True)
    assert event.is_set()
    assert await event.wait()
    event.clear()
    assert not event.is_set()
    waiter = asyncio.create_task(event.wait())
    await asyncio.sleep(0)
    assert not waiter.done()
    event.set()
    assert await waiter
