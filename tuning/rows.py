"""Rows of a wanted length for one model, made of a text that its handler takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle, islice

from inference import Encoded, Model, RowError
from tuning.errors import TuningError

#: What is tried on a handler that has no example of its own.
TEXT = "The quick brown fox jumps over the lazy dog."
#: Rows of more tokens than this are not looked for, tokens.
MOST_TOKENS = 32_768
#: Words of the given texts that rows are made of.
MOST_WORDS = 5_000
#: So many times the text tells whether a row's length changes what the model counts.
_LONGER = 8
#: Words that surely count as more than one does.
_FIRST_STEP = 16


@dataclass(frozen=True, slots=True)
class Sample:
    """A row, as a producer sends it and as the device takes it."""

    row: object
    encoded: Encoded

    @property
    def tokens(self) -> int:
        """At least 1: a handler that counts none is measured by its rows."""
        return max(1, self.encoded.tokens)


class Rows:
    """Makes rows for `model`, of the words of `texts`, or of its handler's example.

    Raises `TuningError` when the handler takes neither.
    """

    def __init__(self, model: Model, texts: Sequence[str] = ()) -> None:
        self._model = model
        example = " ".join(texts) or model.example() or TEXT
        found = self._encode(example)
        if isinstance(found, RowError):
            hint = "its handler has no example() and" if model.example() is None else "it"
            raise TuningError(
                f"model {model.spec.name}: {hint} does not take the row {str(example)[:60]!r} "
                f"({found.type}: {found.message}): give its handler an example(), or texts with --traffic FILE"
            )
        self._example = Sample(example, found)
        self._words = example.split()[:MOST_WORDS] if isinstance(example, str) else []
        self._by_words: dict[int, Sample | None] = {}
        self._by_tokens: dict[int, Sample] = {}

    @cached_property
    def have_length(self) -> bool:
        """Whether a longer text is more tokens; otherwise all rows cost the same."""
        few, many = self._of_words(1), self._of_words(_LONGER * max(1, len(self._words)))
        return bool(self._words) and few is not None and (many is None or many.tokens > few.tokens)

    @cached_property
    def limit(self) -> int | None:
        """Tokens of the longest row that the model takes, or cuts a longer one to; None when no limit was found."""
        if not self.have_length:
            return self._example.tokens
        words = self._words_beyond
        return None if words is None else self._longest_within(MOST_TOKENS, words).tokens

    def of(self, tokens: int) -> Sample:
        """A row of so many tokens, or the next fewer that words can make; never none at all."""
        if not self.have_length:
            return self._example
        if tokens not in self._by_tokens:
            self._by_tokens[tokens] = self._longest_within(tokens, self._words_over(tokens))
        return self._by_tokens[tokens]

    @cached_property
    def _words_beyond(self) -> int | None:
        """So many words are more than the model takes; None when it takes any number."""
        words, before = _FIRST_STEP, self._of_words(1)
        while before is not None and before.tokens < MOST_TOKENS:
            sample = self._of_words(words)
            if sample is None or sample.tokens <= before.tokens:
                return words
            words, before = 2 * words, sample
        return None

    def _words_over(self, tokens: int) -> int:
        """So many words are over `tokens`, or gain no more of them."""
        words = _FIRST_STEP
        most = self._words_beyond or MOST_TOKENS
        while words < most and (sample := self._of_words(words)) is not None and sample.tokens <= tokens:
            words *= 2
        return min(words, most)

    def _longest_within(self, tokens: int, beyond: int) -> Sample:
        """The longest row of at most `tokens` and fewer words than `beyond`."""
        low, high = 1, beyond
        while high - low > 1:
            middle = (low + high) // 2
            sample = self._of_words(middle)
            if sample is not None and sample.tokens <= tokens:
                low = middle
            else:
                high = middle
        found = self._of_words(low)
        assert found is not None, "one word is what was tried first"
        return found

    def _of_words(self, count: int) -> Sample | None:
        if count not in self._by_words:
            text = " ".join(islice(cycle(self._words), count))
            encoded = self._encode(text)
            self._by_words[count] = Sample(text, encoded) if isinstance(encoded, Encoded) else None
        return self._by_words[count]

    def _encode(self, row: object) -> Encoded | RowError:
        return self._model.encode([row])[0]
