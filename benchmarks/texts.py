"""The texts that benchmarks send: all alike, or of the lengths that real traffic has; the same ones in every run.

`mixed` is synthetic: lengths drawn from a lognormal distribution, mean 36 tokens, a few cut at 256. `fortunes` is what
people wrote: Debian's package of that name, mean 42 tokens, median 26. Batches of 32 in the order of arrival are 77 %
padding on the former and 79 % on the latter.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.processes import BenchmarkError

#: What the model cuts texts at.
MAX_TOKENS = 256
#: Tokens that the model's tokenizer adds to those of the words.
_ENDS = 2
#: Of the lognormal distribution: its median in tokens, and the deviation of the logarithm.
_MEDIAN = 24.5
_SIGMA = 0.9
_SEED = 5
_FORTUNES = Path("/usr/share/games/fortunes")
_VOCABULARY = """
time year way work day world life hand part place case week point fact right water room money story month book eye job
word business issue side kind head house service friend father power hour game line end member law
"""
#: Each is one token.
_WORDS = _VOCABULARY.split()


def fixed(count: int) -> list[str]:
    """`count` texts of 12 words each."""
    draw = random.Random(_SEED)
    return [_sentence(draw, 12) for _ in range(count)]


def mixed(count: int) -> list[str]:
    """`count` texts of unlike lengths."""
    draw = random.Random(_SEED)
    lengths = (draw.lognormvariate(math.log(_MEDIAN), _SIGMA) for _ in range(count))
    return [_sentence(draw, max(1, min(MAX_TOKENS, round(tokens)) - _ENDS)) for tokens in lengths]


def fortunes(count: int) -> list[str]:
    """`count` short texts of the package `fortunes` in a shuffled order; from the start again after the last one."""
    found = _read_fortunes(_FORTUNES)
    random.Random(_SEED).shuffle(found)
    return [found[number % len(found)] for number in range(count)]


#: The mixes by name.
MIXES: Mapping[str, Callable[[int], list[str]]] = {"fixed": fixed, "mixed": mixed, "fortunes": fortunes}


def _sentence(draw: random.Random, words: int) -> str:
    return " ".join(draw.choices(_WORDS, k=words))


def _read_fortunes(folder: Path) -> list[str]:
    files = sorted(path for path in folder.glob("*") if path.suffix not in (".dat", ".u8"))
    if not files:
        raise BenchmarkError(
            f"there are no texts in {folder}: `make bench` installs the package fortunes on Debian as root"
        )
    texts = (text.strip() for file in files for text in re.split(r"^%$", file.read_text(), flags=re.MULTILINE))
    return [text for text in texts if text]
