"""What is known of files: quotas that hold however many come at once, owners, pages, ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import redis

from broker import AsyncBroker, BrokerUnavailable, FileQuota, FileRecord, TooManyFiles, UnknownFile
from broker.files import AT_A_TIME
from tests.conftest import free_port

NOW = time.time()


@pytest.fixture
async def front(server_url: str, client: redis.Redis) -> AsyncIterator[AsyncBroker]:
    front = await AsyncBroker.open(server_url)
    yield front
    await front.close()


def record(number: int, **changes: object) -> FileRecord:
    fields: dict[str, object] = {
        "id": f"file-{number:032x}",
        "owner": "me",
        "filename": "rows \u20ac.jsonl",
        "purpose": "batch",
        "bytes": 100,
        "created_at": NOW + number,
        "expires_at": NOW + 3600,
    }
    return FileRecord(**(fields | changes))  # type: ignore[arg-type]  # a test's shorthand


def ids(records: list[FileRecord]) -> list[int]:
    return [int(one.id.removeprefix("file-"), 16) for one in records]


async def pages(front: AsyncBroker, limit: int, *, newest_first: bool = False, purpose: str | None = None) -> list[int]:
    found: list[FileRecord] = []
    while True:
        after = found[-1].id if found else None
        page = await front.files.listed("me", after=after, limit=limit, newest_first=newest_first, purpose=purpose)
        if not page:
            return ids(found)
        assert len(page) <= limit
        found += page


async def test_a_file_is_found_as_it_was_added(front: AsyncBroker) -> None:
    for one in (record(1), record(2, expires_at=None, owner="", bytes=0)):
        await front.files.add(one)
        assert await front.files.get(one.id) == one
    assert await front.files.get(record(3).id) is None


async def test_the_same_file_again_replaces_it_and_counts_once(front: AsyncBroker) -> None:
    await front.files.add(record(1, bytes=100))
    await front.files.add(record(1, bytes=70), quota_bytes=100)
    assert await front.files.used_bytes("me") == 70
    assert await pages(front, 10) == [1]


async def test_large_files_are_counted_to_the_byte(front: AsyncBroker) -> None:
    await front.files.add(record(1, bytes=(1 << 52) + 1))
    await front.files.add(record(2, bytes=2))
    assert await front.files.used_bytes("me") == (1 << 52) + 3


async def test_a_quota_is_the_owners_and_may_be_used_to_the_last_byte(front: AsyncBroker) -> None:
    await front.files.add(record(1, bytes=60), quota_bytes=100)
    with pytest.raises(FileQuota) as caught:
        await front.files.add(record(2, bytes=41), quota_bytes=100)
    assert (caught.value.used_bytes, caught.value.quota_bytes) == (60, 100)
    assert await front.files.get(record(2).id) is None
    await front.files.add(record(3, bytes=41, owner="you"), quota_bytes=100)
    await front.files.add(record(4, bytes=40), quota_bytes=100)
    assert await front.files.used_bytes("me") == 100
    await front.files.add(record(5, bytes=1_000_000), quota_bytes=0)


async def test_many_at_once_do_not_pass_a_quota_together(front: AsyncBroker) -> None:
    answers = await asyncio.gather(
        *(front.files.reserve(record(number, bytes=30), quota_bytes=100) for number in range(20)),
        return_exceptions=True,
    )
    assert sum(isinstance(answer, FileQuota) for answer in answers) == 17
    assert await front.files.used_bytes("me") == 90


async def test_an_owner_may_have_so_many_files_and_those_may_still_grow(front: AsyncBroker) -> None:
    for number in range(3):
        await front.files.reserve(record(number, bytes=0), quota_files=3)
        await front.files.add(record(number, bytes=0))
    with pytest.raises(TooManyFiles, match="the 3 files"):
        await front.files.reserve(record(3), quota_files=3)
    await front.files.reserve(record(4, owner="you"), quota_files=3)
    await front.files.reserve(record(2, bytes=9), quota_files=3)
    assert await front.files.used_bytes("me") == 9


async def test_a_reserved_file_counts_and_nobody_finds_it_until_it_is_added(front: AsyncBroker) -> None:
    await front.files.reserve(record(1, bytes=10))
    await front.files.reserve(record(1, bytes=80))
    assert await front.files.used_bytes("me") == 80
    assert await front.files.get(record(1).id) is None
    assert await pages(front, 10) == []
    await front.files.add(record(1, bytes=80))
    assert await front.files.get(record(1).id) == record(1, bytes=80)
    assert await front.files.used_bytes("me") == 80


async def test_what_never_came_whole_expires_like_any_other(front: AsyncBroker) -> None:
    reserved = record(1, expires_at=NOW - 1)
    await front.files.reserve(reserved)
    assert await front.files.expired(NOW, 10) == [reserved]
    assert await front.files.remove(reserved.id)
    assert await front.files.used_bytes("me") == 0


async def test_a_removed_file_is_gone_from_everywhere(front: AsyncBroker, client: redis.Redis) -> None:
    await front.files.add(record(1))
    await front.files.add(record(2, expires_at=None, bytes=7))
    assert await front.files.remove(record(1).id)
    assert not await front.files.remove(record(1).id)
    assert await front.files.get(record(1).id) is None
    assert await pages(front, 10) == [2]
    assert await front.files.used_bytes("me") == 7
    assert await front.files.remove(record(2).id)
    assert client.keys("sheaf:*file*") == []


async def test_a_file_whose_time_is_over_is_found_by_nobody_but_who_removes_it(front: AsyncBroker) -> None:
    over = record(1, expires_at=time.time() - 0.01)
    await front.files.add(over)
    await front.files.add(record(2, expires_at=None))
    assert await front.files.get(over.id) is None
    assert await pages(front, 10) == [2]
    assert await front.files.expired(time.time(), 10) == [over]


async def test_those_that_expired_first_are_told_first(front: AsyncBroker) -> None:
    for number in range(5):
        await front.files.add(record(number, expires_at=NOW - number))
    assert ids(await front.files.expired(NOW - 2, 2)) == [4, 3]
    assert ids(await front.files.expired(NOW - 2, 10)) == [4, 3, 2]


async def test_a_file_that_is_added_with_a_later_end_does_not_expire_before_it(front: AsyncBroker) -> None:
    await front.files.reserve(record(1, expires_at=NOW - 1))
    await front.files.add(record(1, expires_at=None))
    assert await front.files.expired(NOW, 10) == []


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("limit", [1, 3, 100])
async def test_pages_hold_every_file_of_the_owner_once_and_in_order(
    front: AsyncBroker, limit: int, newest_first: bool
) -> None:
    for number in range(10):
        # Several of one moment.
        await front.files.add(record(number, created_at=NOW + number // 4))
        await front.files.add(record(100 + number, owner="you"))
    expected = sorted(range(10), reverse=newest_first)
    assert await pages(front, limit, newest_first=newest_first) == expected


async def test_pages_of_a_purpose_skip_the_others(front: AsyncBroker) -> None:
    for number in range(AT_A_TIME + 20):
        few = number % 100 == 0
        await front.files.add(record(number, purpose="batch_output" if few else "batch"))
    assert await pages(front, 2, purpose="batch_output") == [0, 100, 200, 300, 400, 500]
    assert await pages(front, 2, purpose="nothing") == []


async def test_a_page_after_a_file_that_is_not_the_owners_is_refused(front: AsyncBroker) -> None:
    await front.files.add(record(1))
    await front.files.add(record(2, owner="you"))
    for other in (record(2).id, "nonsense"):
        with pytest.raises(UnknownFile, match=other):
            await front.files.listed("me", after=other, limit=1, newest_first=True, purpose=None)


async def test_without_a_server_every_verb_says_so() -> None:
    front = await AsyncBroker.open(f"redis://127.0.0.1:{free_port()}/0")
    files = front.files
    try:
        for asked in (
            files.add(record(1)),
            files.reserve(replace(record(1), bytes=1)),
            files.get("x"),
            files.listed("me", after=None, limit=1, newest_first=True, purpose=None),
            files.remove("x"),
            files.used_bytes("me"),
            files.expired(0.0, 1),
        ):
            with pytest.raises(BrokerUnavailable):
                await asked
    finally:
        await front.close()
