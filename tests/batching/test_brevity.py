"""Rows of the lowest priority beside callers: their batches are short while somebody may come."""

from __future__ import annotations

import math

from batching import LEVELS, Batch, Batcher, CostFit, CostModel, Limits, Row
from batching.brevity import ABOUT_S, Brevity

LOWEST = LEVELS - 1
#: A millisecond a batch, and a millisecond a token.
COST = CostModel(0.001, 0.001)
LIMITS = Limits(max_batch_size=16, max_batch_tokens=100, max_wait_s=0.0)


def batcher(low_rows: int, tokens: int = 2) -> Batcher[str]:
    made: Batcher[str] = Batcher(LIMITS, CostFit(COST))
    for _ in range(low_rows):
        made.add(Row("low", tokens, 0.0, LOWEST), 0.0)
    return made


def served(made: Batcher[str], now: float) -> Batch[str]:
    batch = made.due(now)
    assert batch is not None
    return batch


def caller(made: Batcher[str], now: float, tokens: int = 10) -> None:
    made.add(Row("caller", tokens, now, 0), now)


def test_without_callers_batches_are_full() -> None:
    assert len(served(batcher(64), 0.0).rows) == 16


def test_after_a_caller_they_take_no_longer_than_callers_batches() -> None:
    made = batcher(64)
    caller(made, 1.0)
    assert served(made, 1.0).rows[0].payload == "caller"
    # Ten tokens, as the caller's row: five rows of two.
    assert len(served(made, 1.1).rows) == 5
    assert len(served(made, 1.0 + ABOUT_S).rows) == 5
    assert len(served(made, 1.1 + ABOUT_S).rows) == 16


def test_a_callers_batch_is_filled_no_further_than_that() -> None:
    made = batcher(64, tokens=10)
    caller(made, 1.0)
    served(made, 1.0)
    caller(made, 2.0)
    assert [row.payload for row in served(made, 2.0).rows] == ["caller"]


def test_callers_batches_are_as_large_as_ever() -> None:
    made = batcher(64)
    for _ in range(8):
        caller(made, 1.0)
    assert [row.payload for row in served(made, 1.0).rows] == ["caller"] * 8


def test_a_callers_row_that_would_expire_leads_while_low_rows_wait() -> None:
    made: Batcher[str] = Batcher(Limits(4, 40, 0.0), CostFit(CostModel(0.1, 1.0)))
    caller(made, 0.0, tokens=1)
    served(made, 0.0)
    made.add(Row("low", 1, 0.0, LOWEST), 0.0)
    for _ in range(8):
        caller(made, 1.0, tokens=1)
    made.add(Row("urgent", 1, 1.0, deadline=6.0), 1.0)
    assert served(made, 1.0).rows[0].payload == "urgent"


def test_a_row_longer_than_all_callers_runs_alone() -> None:
    made = batcher(3, tokens=50)
    caller(made, 1.0)
    served(made, 1.0)
    assert len(served(made, 1.1).rows) == 1


def test_half_of_the_device_goes_into_rows_however_short_callers_batches_are() -> None:
    brevity, cost = Brevity(), CostModel(overhead_s=0.005, token_s=0.00001)
    brevity.came(0.0)
    brevity.ran(cost.seconds(10))
    assert brevity.most_tokens(1.0, cost) == 500
    assert Brevity().most_tokens(0.0, cost) == math.inf
