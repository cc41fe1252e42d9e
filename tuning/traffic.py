"""The traffic to tune for: from a file, from what workers noted on the broker, or made up."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from batching.simulation import Arrival, lognormal, poisson
from broker import TrafficRow
from inference import Encoded, RowError
from tuning.errors import TrafficError

#: Rows that are made up.
ROWS = 2_000
#: Lengths that are made up: as short texts have them, tokens.
MEDIAN_TOKENS = 24
SIGMA = 0.8
#: Longest row that is made up for a model without a limit, tokens.
LONGEST_TOKENS = 512
_SEED = 1


@dataclass(frozen=True)
class Traffic:
    """Rows in the order in which they come, the first at second 0; `source` says where from, for people."""

    arrivals: Sequence[Arrival]
    source: str

    @property
    def seconds(self) -> float:
        return self.arrivals[-1].at

    @cached_property
    def rate(self) -> float:
        """Rows a second."""
        return (len(self.arrivals) - 1) / self.seconds

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of the rows, ascending."""
        return sorted(arrival.tokens for arrival in self.arrivals)

    def quantile(self, share: float) -> int:
        """Tokens that this share of the rows stays within."""
        return self.lengths[min(len(self.lengths) - 1, int(share * len(self.lengths)))]

    def at_rate(self, rate: float) -> Traffic:
        """The same rows, closer together or further apart."""
        factor = self.rate / rate
        arrivals = [replace(arrival, at=arrival.at * factor) for arrival in self.arrivals]
        return Traffic(arrivals, f"{self.source}, brought to {rate:,g} rows/s")

    def cut_to(self, tokens: int) -> Traffic:
        """No row longer than this."""
        return replace(self, arrivals=[replace(one, tokens=min(one.tokens, tokens)) for one in self.arrivals])

    def busiest(self, seconds: float, rows: int) -> Traffic:
        """The stretch of at most so many seconds and rows in which most came."""
        best, best_key, end = (0, 1), (0, 0.0), 0
        for begin, first in enumerate(self.arrivals):
            while end < len(self.arrivals) and end - begin < rows and self.arrivals[end].at - first.at <= seconds:
                end += 1
            key = (end - begin, first.at - self.arrivals[end - 1].at)
            if key > best_key:
                best, best_key = (begin, end), key
        return Traffic(_from_zero(self.arrivals[slice(*best)]), self.source)


def recorded(rows: Sequence[TrafficRow]) -> Traffic:
    """What workers noted. A row that stands for several is that many, spread to the next one's time."""
    if not _spans_time([row.enqueued_ms for row in rows]):
        raise TrafficError(f"{len(rows)} recorded rows tell no rate: let some time of traffic go by, or give --rate")
    arrivals: list[Arrival] = []
    for row, following in pairwise([*rows, rows[-1]]):
        step_ms = (following.enqueued_ms - row.enqueued_ms) / row.stands_for
        arrivals += [
            Arrival((row.enqueued_ms + number * step_ms) / 1e3, max(1, row.tokens), row.level)
            for number in range(row.stands_for)
        ]
    return Traffic(_from_zero(arrivals), f"{len(arrivals):,} rows that workers recorded")


def made_up(rate: float, longest: int) -> Traffic:
    """Poisson arrivals with lengths as short texts have them, or all of one token."""
    lengths = lognormal(MEDIAN_TOKENS, SIGMA, longest)
    told = f"lengths around {MEDIAN_TOKENS} tokens, at most {longest}" if longest > 1 else "all of one length"
    arrivals = poisson(rate, ROWS, lengths, _SEED)
    return Traffic(_from_zero(arrivals), f"made up: {rate:,g} rows/s, independent of one another, {told}")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a traffic file: when a row came, and its tokens or its text."""

    number: int
    at: float
    tokens: int | None
    text: str | None


@dataclass(frozen=True, slots=True)
class TrafficFile:
    """JSON lines: `{"at": seconds, "tokens": n}` or `{"at": seconds, "text": "…"}`, in any order."""

    path: Path
    lines: tuple[Line, ...]

    @classmethod
    def read(cls, path: Path) -> TrafficFile:
        """Raises `TrafficError`."""
        try:
            texts = path.read_text("utf-8").splitlines()
        except OSError as error:
            raise TrafficError(f"{path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise TrafficError(f"{path} is not UTF-8") from None
        lines = [_line(path, number, text) for number, text in enumerate(texts, 1) if text.strip()]
        if not _spans_time([line.at for line in lines]):
            raise TrafficError(f"{path} tells no rate: it needs two rows, at different times, at least")
        return cls(path, tuple(sorted(lines, key=lambda line: line.at)))

    @property
    def texts(self) -> list[str]:
        return [line.text for line in self.lines if line.text is not None]

    def traffic(self, encode: Callable[[Sequence[object]], Sequence[Encoded | RowError]]) -> Traffic:
        """The rows with their lengths, texts as `encode` counts them. Raises `TrafficError` for a text that it
        refuses.
        """
        encoded = iter(encode(self.texts) if self.texts else [])
        arrivals: list[Arrival] = []
        for line in self.lines:
            tokens = line.tokens
            if tokens is None:
                row = next(encoded)
                if isinstance(row, RowError):
                    raise TrafficError(f"{self.path}, line {line.number}: the model refuses this text: {row.message}")
                tokens = max(1, row.tokens)
            arrivals.append(Arrival(line.at, tokens))
        return Traffic(_from_zero(arrivals), f"{len(arrivals):,} rows of {self.path}")


def _line(path: Path, number: int, text: str) -> Line:
    def fault(what: str) -> TrafficError:
        return TrafficError(f'{path}, line {number}: {what}; write {{"at": 0.25, "tokens": 12}} or "text" for tokens')

    try:
        found = json.loads(text)
    except ValueError as error:
        raise fault(f"this is not JSON ({error})") from None
    if not isinstance(found, dict) or "at" not in found or ("tokens" in found) == ("text" in found):
        raise fault('an object with "at" and either "tokens" or "text" is needed')
    at, tokens, row = found["at"], found.get("tokens"), found.get("text")
    if isinstance(at, bool) or not isinstance(at, (int, float)) or not 0 <= at < float("inf"):
        raise fault(f'"at" must be seconds from 0 on, not {at!r}')
    if "tokens" in found and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1):
        raise fault(f'"tokens" must be a whole number from 1 on, not {tokens!r}')
    if "text" in found and not isinstance(row, str):
        raise fault(f'"text" must be a text, not {row!r}')
    return Line(number, float(at), tokens, row)


def _spans_time(times: Sequence[float]) -> bool:
    return len(times) > 1 and max(times) > min(times)


def _from_zero(arrivals: Sequence[Arrival]) -> list[Arrival]:
    return [replace(arrival, at=arrival.at - arrivals[0].at) for arrival in arrivals]
