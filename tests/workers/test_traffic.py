"""What workers note of the rows that come."""

from __future__ import annotations

import time

import pytest

from broker import Broker, TrafficRow
from broker.traffic import MAX_NOTED
from tests.conftest import wait_until
from tests.workers.conftest import Shop
from workers.traffic import TrafficSample


def taken(sample: TrafficSample[int]) -> list[tuple[int, int]]:
    rows = sample.take(lambda row, stands_for: TrafficRow(row, 1, 0, stands_for))
    return [(row.enqueued_ms, row.stands_for) for row in rows]


@pytest.mark.parametrize("together", [1, 7, 64, 1000])
@pytest.mark.parametrize("count", [0, 1, MAX_NOTED, MAX_NOTED + 1, 2 * MAX_NOTED + 1, 29_000])
def test_a_sample_is_every_nth_row_and_stays_small(together: int, count: int) -> None:
    sample = TrafficSample[int]()
    for begin in range(0, count, together):
        sample.add(range(begin, min(begin + together, count)))
    rows = taken(sample)
    stride = rows[0][1] if rows else 1
    assert rows == [(number, stride) for number in range(0, count, stride)]
    assert count <= MAX_NOTED or MAX_NOTED / 2 < len(rows) <= MAX_NOTED
    assert taken(sample) == []


def test_lengths_times_and_levels_of_rows_are_noted_and_no_text(shop: Shop) -> None:
    shop.client.delete("sheaf:traffic:infer.picky")
    begin = time.time()
    shop.call(0.01, model="picky", priority=6).get(timeout=10)
    shop.call(0, model="picky").get(timeout=10)
    broker = Broker(shop.url, "reader")

    def noted() -> list[TrafficRow]:
        # Rows of other tests may be noted only now.
        return [row for row in broker.traffic("infer.picky") if row.enqueued_ms >= int(begin * 1e3)]

    wait_until(lambda: len(noted()) == 2, description="both rows are noted")
    rows = noted()
    broker.close()
    assert [(row.tokens, row.level, row.stands_for) for row in rows] == [(1, 2, 1), (1, 0, 1)]
    assert begin <= rows[0].enqueued_ms / 1e3 + 0.001 <= rows[1].enqueued_ms / 1e3 + 0.001 <= time.time() + 0.001
    assert 0 < int(shop.client.ttl("sheaf:traffic:infer.picky")) <= 86_400
