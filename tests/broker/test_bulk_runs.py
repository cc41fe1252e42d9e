"""Runs say how they are and hear what is wanted of them; those that are silent for long are told to have stopped."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import redis

from broker import AsyncBroker, BrokerUnavailable, BulkRun, BulkRuns, RunState, Wanted
from broker.bulk_runs import KEEP_S, MAX_LISTED, SILENT_AFTER_S
from tests.conftest import free_port

RUN = BulkRun(
    id="bulk_000000000001",
    model="echo",
    input="/in.jsonl",
    output="/out.jsonl",
    host="here",
    pid=1,
    created_at=1000.0,
    updated_at=1001.0,
)
KEY = f"sheaf:bulk-run:{RUN.id}"


@pytest.fixture
async def runs(server_url: str, client: redis.Redis) -> AsyncIterator[BulkRuns]:
    front = await AsyncBroker.open(server_url)
    yield front.bulk_runs
    await front.close()


def silent(client: redis.Redis, seconds: float) -> None:
    """As it is when the last report was so long ago."""
    client.pexpire(KEY, int((KEEP_S - seconds) * 1000))


async def test_a_run_is_read_as_it_reported_last(runs: BulkRuns) -> None:
    await runs.report(RUN)
    later = replace(RUN, updated_at=1002.0, succeeded=5, failed=1, rows_per_second=6.0, ratio=0.5)
    assert await runs.report(later) is Wanted.RUN
    assert await runs.get(RUN.id) == later
    assert await runs.listed(9) == [later]
    assert await runs.get("bulk_unknown") is None


async def test_what_is_wanted_of_a_run_is_heard_with_its_next_report(runs: BulkRuns) -> None:
    await runs.report(RUN)
    for wanted in (Wanted.PAUSE, Wanted.RUN, Wanted.CANCEL):
        assert await runs.want(RUN.id, wanted) == RUN
        assert await runs.report(RUN) is wanted


async def test_nothing_is_wanted_of_a_run_that_is_unknown_or_has_ended(runs: BulkRuns, client: redis.Redis) -> None:
    assert await runs.want(RUN.id, Wanted.PAUSE) is None
    assert client.keys("*") == []
    ended = replace(RUN, state=RunState.SUCCEEDED)
    await runs.report(ended)
    assert await runs.want(RUN.id, Wanted.PAUSE) == ended
    assert client.hget(KEY, "wanted") == b"run"


async def test_a_paused_run_stays_paused_when_the_server_has_lost_everything(
    runs: BulkRuns, client: redis.Redis
) -> None:
    await runs.report(RUN)
    await runs.want(RUN.id, Wanted.PAUSE)
    client.flushall()
    assert await runs.report(replace(RUN, state=RunState.PAUSED)) is Wanted.PAUSE
    assert [run.id for run in await runs.listed(9)] == [RUN.id]


async def test_a_run_that_is_silent_for_long_has_stopped_until_it_reports_again(
    runs: BulkRuns, client: redis.Redis
) -> None:
    paused = replace(RUN, state=RunState.PAUSED)
    await runs.report(paused)
    silent(client, SILENT_AFTER_S - 5)
    assert await runs.get(RUN.id) == paused
    silent(client, SILENT_AFTER_S + 1)
    gone = await runs.get(RUN.id)
    assert gone is not None
    assert (gone.state, gone.ended, gone.error) == (RunState.STOPPED, True, "its process is gone")
    assert await runs.listed(9) == [gone]
    assert await runs.want(RUN.id, Wanted.RUN) == gone
    assert await runs.report(paused) is Wanted.PAUSE
    assert await runs.get(RUN.id) == paused


async def test_a_run_that_has_ended_is_kept_as_it_ended_for_a_week(runs: BulkRuns, client: redis.Redis) -> None:
    ended = replace(RUN, state=RunState.FAILED, error="the disk is full")
    await runs.report(ended)
    silent(client, 86_400)
    assert await runs.get(RUN.id) == ended
    client.delete(KEY)
    assert await runs.listed(9) == []


async def test_the_runs_that_reported_last_are_listed_and_the_newest_of_them_is_first(runs: BulkRuns) -> None:
    for number in range(4):
        run = replace(RUN, id=f"bulk_{number}", created_at=1000.0 - number, updated_at=2000.0 + number)
        await runs.report(run)
    assert [run.id for run in await runs.listed(3)] == ["bulk_1", "bulk_2", "bulk_3"]


async def test_the_list_forgets_what_is_no_longer_kept(runs: BulkRuns, client: redis.Redis) -> None:
    await runs.report(RUN)
    client.zadd("sheaf:bulk-runs", {f"old-{number}": 1001.0 for number in range(MAX_LISTED)})
    await runs.report(replace(RUN, updated_at=1002.0))
    assert client.zcard("sheaf:bulk-runs") == MAX_LISTED
    await runs.report(replace(RUN, updated_at=1002.0 + KEEP_S))
    assert client.zrange("sheaf:bulk-runs", 0, -1) == [RUN.id.encode()]


async def test_a_record_that_another_version_wrote_is_left_out(runs: BulkRuns, client: redis.Redis) -> None:
    other = RUN.encode().replace(b'"state":"running"', b'"state":"dreaming"')
    await runs.report(RUN)
    client.hset(KEY, "record", other)
    assert await runs.listed(9) == []
    assert await runs.get(RUN.id) is None


async def test_a_server_that_is_away_is_told_of() -> None:
    front = await AsyncBroker.open(f"redis://127.0.0.1:{free_port()}/0")
    with pytest.raises(BrokerUnavailable):
        await front.bulk_runs.report(RUN)
    with pytest.raises(BrokerUnavailable):
        await front.bulk_runs.want(RUN.id, Wanted.PAUSE)
    await front.close()
