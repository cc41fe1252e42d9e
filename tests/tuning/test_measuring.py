"""Batches of many sizes on a model: rows of a wanted length, want of memory, and the line through the times."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from batching import CostModel
from inference import Encoded, Handler, Model, ModelSpec
from tuning.errors import TuningError
from tuning.measuring import Measured, Tried, fit, measure
from tuning.rows import Rows


class Letters(Handler):
    """Counts letters by the ten; cuts at 50 tokens, or refuses what is longer."""

    uses_torch = False

    def load(self, spec: ModelSpec, device: str, dtype: object) -> None:
        self._cuts = spec.over_length == "truncate"

    def preprocess(self, rows: Sequence[object]) -> Sequence[Encoded]:
        tokens = [1 + len(str(row)) // 10 for row in rows]
        if not self._cuts and max(tokens) > 50:
            raise ValueError("too long")
        return [Encoded(row, min(count, 50)) for row, count in zip(rows, tokens, strict=True)]

    def infer(self, batch: Sequence[Encoded]) -> object:
        return [0] * len(batch)

    def postprocess(self, raw: object) -> list[object]:
        assert isinstance(raw, list)
        return raw


class Pairs(Letters):
    """Takes nothing but pairs of numbers."""

    def preprocess(self, rows: Sequence[object]) -> Sequence[Encoded]:
        if not all(isinstance(row, list) for row in rows):
            raise TypeError("two numbers are needed")
        return [Encoded(row, 0) for row in rows]


class PairsWithExample(Pairs):
    def example(self) -> object:
        return [1, 2]


def load(handler: str, **changes: object) -> Model:
    fields: dict[str, object] = {"name": "mine", "handler": handler, "warmup": False}
    return Model.load(ModelSpec(**(fields | changes)), "cpu")  # type: ignore[arg-type]  # a test's shorthand


def hungry(memory: int, raises: str = "torch") -> Model:
    return load("tests.workers.handlers:Hungry", options={"memory": memory, "raises": raises})


def measured(model: Model, lengths: Sequence[int]) -> Measured:
    return measure(model, Rows(model), lengths, 60.0, lambda *_: None, longest_s=60.0)


@pytest.mark.parametrize("over_length", ["truncate", "refuse"])
def test_rows_have_the_length_that_is_asked_for_up_to_the_models_limit(over_length: str) -> None:
    rows = Rows(load(f"{__name__}:Letters", over_length=over_length))
    assert rows.have_length
    assert rows.limit == 50
    for tokens in (1, 7, 23, 50):
        assert tokens - 1 <= rows.of(tokens).tokens <= max(1, tokens)
    assert rows.of(500).tokens == 50


def test_rows_are_made_of_the_texts_that_are_given() -> None:
    rows = Rows(hungry(100), ["one two", "three"])
    assert rows.of(4).row == "one two three one"
    assert rows.limit is None


def test_rows_without_a_length_are_the_handlers_example() -> None:
    rows = Rows(load(f"{__name__}:PairsWithExample"))
    assert not rows.have_length
    assert (rows.of(1).row, rows.of(99).row, rows.of(1).tokens) == ([1, 2], [1, 2], 1)


def test_a_handler_that_takes_no_text_and_has_no_example_is_told() -> None:
    with pytest.raises(TuningError, match=r"model mine: its handler has no example\(\) and does not take the row"):
        Rows(load(f"{__name__}:Pairs"))


@pytest.mark.parametrize(("raises", "cause"), [("torch", "OutOfMemoryError"), ("python", "MemoryError")])
def test_want_of_memory_is_a_finding_and_nothing_as_large_is_tried(raises: str, cause: str) -> None:
    found = measured(hungry(300, raises), [8, 32])
    assert found.failed == Tried(rows=16, tokens=32, seconds=None, cause=cause)
    assert found.batches[-1] == found.failed
    assert [batch.padded_tokens for batch in found.ran][-1] == found.most_padded_tokens == 256
    assert str(found.failed) == f"16 x 32 tokens: NOT POSSIBLE ({cause})"


def test_a_row_that_fails_alone_is_an_error() -> None:
    with pytest.raises(TuningError, match="a row of 8 tokens fails alone: OutOfMemoryError: CUDA out of memory"):
        measured(hungry(4), [8])


def test_rows_alone_are_run_when_the_time_is_over_or_a_batch_took_too_long() -> None:
    model = hungry(10**9)
    short = measure(model, Rows(model), [10, 5_000], 30.0, lambda *_: None, longest_s=0.003)
    assert [batch.rows for batch in short.ran if batch.tokens == 5_000] == [1]
    assert short.ended == "it took over 0.003 s"
    assert short.most_padded_tokens == 5_000


def test_the_time_is_bounded_and_the_smallest_come_first() -> None:
    model = hungry(10**9)
    found = measure(model, Rows(model), [100, 400], 0.2, lambda *_: None, longest_s=60.0)
    sizes = [batch.padded_tokens for batch in found.ran]
    assert sizes == sorted(sizes)
    assert 2 < len(sizes) < 22
    assert found.ended == "--seconds 0.2 were over"


def test_a_line_is_found_again_however_far_its_points_lie_apart() -> None:
    line = CostModel(overhead_s=0.004, token_s=0.00002)
    found = fit([Tried(1, tokens, line.seconds(tokens)) for tokens in (1, 10, 100, 1000, 100_000)])
    assert found.cost.overhead_s == pytest.approx(line.overhead_s)
    assert found.cost.token_s == pytest.approx(line.token_s)
    assert found.worst_error < 1e-6
    assert not found.poor


def test_times_on_no_line_are_told() -> None:
    found = fit([Tried(1, tokens, (tokens / 100) ** 3) for tokens in (10, 20, 50, 100, 500)])
    assert found.poor


@pytest.mark.parametrize("points", [[(10, 0.5)], [(10, 0.5), (20, 0.3)], [(10, 0.001), (20, 0.5)]])
def test_neither_overhead_nor_a_tokens_time_is_ever_below_zero(points: list[tuple[int, float]]) -> None:
    cost = fit([Tried(1, tokens, seconds) for tokens, seconds in points]).cost
    assert cost.overhead_s >= 0
    assert cost.token_s > 0
