"""The memory of what came lately."""

from __future__ import annotations

import redis

from broker import Broker, TrafficRow
from broker.traffic import MAX_NOTED, MAX_ROWS
from tests.broker.conftest import QUEUE


def test_rows_are_remembered_as_they_were_noted_in_the_order_they_were_enqueued(broker: Broker) -> None:
    rows = [TrafficRow(1_000, 7, 0), TrafficRow(2_000, 300, 3, stands_for=16), TrafficRow(3_000, 0, 1)]
    broker.note_traffic(QUEUE, rows[1:])
    broker.note_traffic(QUEUE, rows[:1])
    assert broker.traffic(QUEUE) == rows
    assert broker.traffic("infer.other") == []


def test_the_oldest_are_forgotten_first_and_all_of_them_within_a_day(broker: Broker, client: redis.Redis) -> None:
    notes = MAX_ROWS // MAX_NOTED + 1
    for note in range(notes):
        broker.note_traffic(QUEUE, [TrafficRow(note * MAX_NOTED + row, 1, 0) for row in range(MAX_NOTED)])
    kept = [row.enqueued_ms for row in broker.traffic(QUEUE)]
    assert kept == list(range(notes * MAX_NOTED - MAX_ROWS, notes * MAX_NOTED))
    [key] = client.keys("sheaf:traffic:*")
    assert 0 < int(client.ttl(key)) <= 86_400
