"""The rule by which owners share a courier's places, and the guess of when there is a turn."""

from __future__ import annotations

import time
from itertools import count

import pytest

from workers.courier.pace import MAX_PUT_OFF_S, MIN_PUT_OFF_S, Pace
from workers.courier.places import Places

MOST = 512


TAGS = (str(number).encode() for number in count())


def fill(places: Places, owner: str, known: list[bytes]) -> None:
    """Take all that the owner may have; their tags are added to `known`."""
    while places.take(tag := next(TAGS), owner) is None:
        known.append(tag)


def test_an_owner_alone_may_have_half_of_all_places() -> None:
    places, taken = Places(MOST), list[bytes]()
    fill(places, "a", taken)
    assert (len(taken), places.free) == (MOST // 2, MOST // 2)


@pytest.mark.parametrize("owners", [2, 3, 8, 20])
def test_owners_that_flood_come_to_equal_parts_and_leave_one_free(owners: int) -> None:
    places = Places(MOST)
    taken: dict[str, list[bytes]] = {f"owner-{number}": [] for number in range(owners)}
    for _ in range(2 * MOST):
        for owner, tags in taken.items():
            fill(places, owner, tags)
        longest = max(taken.values(), key=len)
        places.leave(longest.pop(0))
    held = [len(tags) for tags in taken.values()]
    part = MOST / (owners + 1)
    assert max(held) <= part + 1
    assert min(held) >= part - 2
    assert places.free >= part - 1


@pytest.mark.parametrize("most", [1, 2, 3])
def test_of_few_places_there_is_one_for_an_owner_alone(most: int) -> None:
    places = Places(most)
    assert places.take(b"1", "a") is None
    places.leave(b"1")
    assert places.free == most


def test_who_has_no_place_while_all_are_taken_is_soon_back() -> None:
    places = Places(2)
    assert [places.take(owner.encode(), owner) for owner in "ab"] == [None, None]
    assert places.take(b"c", "c") == MIN_PUT_OFF_S


def test_turns_that_hang_are_guessed_to_take_as_long_as_they_have_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pace = Pace()
    pace.began()
    now += 40
    assert [pace.until_turn_s(4) for _ in range(3)] == pytest.approx([MIN_PUT_OFF_S, 10.1, 20.1])
    for _ in range(100):
        pace.ended(0.04)
    now += 40
    pace.began()
    assert [pace.until_turn_s(4) for _ in range(2)] == pytest.approx([MIN_PUT_OFF_S, 0.11], rel=0.01)


def test_a_flood_that_is_put_off_does_not_come_back_in_one_moment() -> None:
    pace = Pace()
    pace.ended(1000.0)
    last = [pace.until_turn_s(1) for _ in range(1000)][10:]
    assert MAX_PUT_OFF_S / 2 <= min(last) < 0.6 * MAX_PUT_OFF_S
    assert 0.9 * MAX_PUT_OFF_S < max(last) <= MAX_PUT_OFF_S
