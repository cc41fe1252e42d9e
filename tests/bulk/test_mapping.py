"""`bulk.map`: rows of a program, with a real broker and worker in between."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from functools import partial
from itertools import count, islice

import pytest

import bulk
from configs import Settings, load_settings
from tests.bulk.running import Bulk, running
from tests.conftest import wait_until

MODELS: dict[str, object] = {
    "echo": {"handler": "inference.handlers.echo:Echo", "max_batch_size": 64, "max_wait_ms": 0},
    "picky": {"handler": "tests.workers.handlers:Picky", "max_batch_size": 16, "max_wait_ms": 0},
    "slow": {"handler": "tests.workers.handlers:Sleeper", "max_batch_size": 4, "max_wait_ms": 0},
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bulk]:
    with running(tmp_path_factory.mktemp("map"), MODELS) as made:
        yield made


@pytest.fixture
def settings(service: Bulk) -> Settings:
    return load_settings(service.config).settings


def test_answers_come_in_the_order_of_the_rows(settings: Settings) -> None:
    rows = [{"number": number, "text": "x" * (number * 37 % 500)} for number in range(3000)]
    assert list(bulk.map(iter(rows), model="echo", window=500, settings=settings)) == rows


async def test_asynchronous_rows_that_come_slowly_are_answered_as_they_come(settings: Settings) -> None:
    answered = asyncio.Event()

    async def rows() -> AsyncIterator[int]:
        yield 1
        # Were the answer held back until a window is full, this would wait for ever.
        await answered.wait()
        yield 2

    found: list[object] = []
    async with asyncio.timeout(20), aclosing(bulk.amap(rows(), model="echo", settings=settings)) as answers:
        async for answer in answers:
            found.append(answer)
            answered.set()
    assert found == [1, 2]


def test_no_more_rows_are_taken_than_the_window_holds(settings: Settings) -> None:
    taken = count()
    rows = (next(taken) for _ in range(100_000))
    answers = bulk.map(rows, model="echo", window=100, settings=settings)
    assert list(islice(answers, 250)) == list(range(250))
    # What was read and not given is within a window; what is being given came together.
    assert next(taken) <= 250 + 2 * 100
    answers.close()  # type: ignore[attr-defined]  # a generator


def test_a_row_that_fails_is_raised_or_given(settings: Settings) -> None:
    answers = bulk.map([1, 2, -1, 3], model="picky", settings=settings)
    assert [next(answers), next(answers)] == [1.0, 2.0]
    with pytest.raises(bulk.RowFailed, match="row 2: ArithmeticError: minus one"):
        next(answers)
    given = list(bulk.map([1, 2, -1, 3], model="picky", settings=settings, on_error="return"))
    assert given == [1.0, 2.0, bulk.Failure(2, "ArithmeticError", "minus one cannot be served"), 3.0]


def test_what_is_left_early_does_not_run(service: Bulk, settings: Settings) -> None:
    answers = bulk.map([0.0] * 4 + [0.1] * 2000, model="slow", window=2000, settings=settings)
    next(answers)
    answers.close()  # type: ignore[attr-defined]  # a generator
    after = bulk.map([0.0], model="slow", settings=settings)
    ended = threading.Event()

    def drain() -> None:
        list(after)
        ended.set()

    thread = threading.Thread(target=drain)
    thread.start()
    # Two thousand rows of a tenth of a second, four at a time, would take fifty.
    wait_until(ended.is_set, description="the queue is free again", timeout_s=20)
    thread.join()


def test_a_source_that_fails_is_heard(settings: Settings) -> None:
    def rows() -> Iterator[int]:
        yield 1
        raise OSError("the source is gone")

    with pytest.raises(OSError, match="the source is gone"):
        list(bulk.map(rows(), model="echo", settings=settings))


async def test_a_row_that_is_no_json_fails_as_a_row(settings: Settings) -> None:
    rows = [1, object(), {2}, 3]
    first, *others = bulk.map(iter(rows), model="echo", settings=settings, on_error="return")
    assert (first, others[2]) == (1, 3)
    assert [(failure.number, failure.type) for failure in others[:2]] == [(1, "InvalidInput"), (2, "InvalidInput")]
    assert repr(others[0]).startswith("Failure(number=1, type='InvalidInput', message='it has no form in JSON")
    with pytest.raises(bulk.RowFailed, match="row 1: InvalidInput: it has no form in JSON"):
        list(bulk.map(rows, model="echo", settings=settings))

    async def slowly() -> AsyncIterator[object]:
        for row in rows:
            yield row

    answers = [answer async for answer in bulk.amap(slowly(), model="echo", settings=settings, on_error="return")]
    assert answers == [1, *others]


def test_what_cannot_be_is_told_by_the_call(settings: Settings) -> None:
    ask: Callable[..., object] = partial(bulk.map, model="echo", settings=settings)
    with pytest.raises(ValueError, match="there is no model 'none'"):
        ask([1], model="none")
    with pytest.raises(ValueError, match="at least one row, not 0"):
        ask([1], window=0)
    with pytest.raises(TypeError, match="window is a whole number of rows, not 'x'"):
        ask([1], window="x")
    with pytest.raises(ValueError, match="on_error is one of raise or return, not 'bah'"):
        ask([1], on_error="bah")
    for rows in ("a text", b"bytes", {"text": "one"}):
        with pytest.raises(TypeError, match="rows is one row"):
            ask(rows)
    with pytest.raises(TypeError, match="not iterable"):
        ask(5)
