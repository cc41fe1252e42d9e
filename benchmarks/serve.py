"""The same model over HTTP: our service through its durable queue, beside servers that batch in memory.

Each of them runs all-MiniLM-L6-v2 in fp32 with torch's own number of threads, in batches of up to 32, waiting 10 ms at
most for one to fill. The same texts come in the same order from the same client, which keeps a number of requests in
flight. Ours is `POST /v1/jobs` with `Prefer: wait`: the job is stored, leased, run, settled and answered.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.processes import (
    BenchmarkError,
    free_port,
    peer_environment,
    peer_python,
    process,
    server,
    sheaf,
    wait_for_answer,
)
from benchmarks.report import Ratio, Report
from benchmarks.texts import MIXES
from benchmarks.wrk import Answered, closed_loop

TARGET_MIXED = 3.0
TARGET_FIXED = 1.0
TARGET_P99 = 1.0
#: The peers by name, each with its command beside the interpreter.
PEERS: Mapping[str, Sequence[str]] = {
    "mosec": ("mosec_server.py", "--timeout", "60000", "--address", "127.0.0.1"),
    "litserve": ("litserve_server.py",),
}
OURS = "sheaf"
#: More than any load sends, so that no text is seen twice.
TEXTS = 8000
#: A server that answers a short text within so long, thrice in a row, has nothing else to do.
QUIET_S = 0.5
PROBE = "a text of some length"
#: How long one may take until it is quiet.
QUIET_TIMEOUT_S = 90.0
#: How far the outputs of two servers may lie apart.
TOLERANCE = 1e-3
_ALL_MIXES = ("mixed", "fixed", "fortunes")
#: Seconds of each mix and number in flight, round by round. In the second one only what the ratios are made of.
_LONG: Sequence[Mapping[tuple[str, int], int]] = (
    {(mix, count): seconds for mix in _ALL_MIXES for count, seconds in ((1, 3), (8, 5), (64, 10), (256, 14))},
    {(mix, 64): 10 for mix in _ALL_MIXES},
)
_QUICK: Sequence[Mapping[tuple[str, int], int]] = ({("mixed", 64): 8, ("fixed", 64): 3},)


@dataclass(frozen=True, slots=True)
class Cell:
    """One load: who answered, which texts, how many requests in flight."""

    who: str
    mix: str
    in_flight: int


Cells = Mapping[Cell, Sequence[Answered]]


def run(*, quick: bool, peers: Sequence[str] = tuple(PEERS)) -> Report:
    if unknown := set(peers) - PEERS.keys():
        raise BenchmarkError(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    texts = {mix: MIXES[mix](TEXTS) for mix in (("mixed", "fixed") if quick else _ALL_MIXES)}
    cells: defaultdict[Cell, list[Answered]] = defaultdict(list)
    outputs: dict[str, Sequence[float]] = {}
    for loads in _QUICK if quick else _LONG:
        for who in (OURS, *peers):
            with _serving(who) as front:
                outputs[who] = front.warm_up(texts["mixed"][0])
                for (mix, in_flight), seconds in loads.items():
                    cells[Cell(who, mix, in_flight)].append(front.load(texts[mix], in_flight, seconds))
    _check_alike(outputs)
    return Report("serve", _ratios(cells, peers), _details(cells), _table(cells))


@dataclass(frozen=True, slots=True)
class _Front:
    """Where a server takes requests, and in which form."""

    url: str
    fields: Mapping[str, str]
    headers: Mapping[str, str]
    log: Path

    def warm_up(self, text: str) -> Sequence[float]:
        """Wait until it serves, and is quick; returns this text's output."""
        output: Sequence[float] = json.loads(wait_for_answer(self._request(text), self.log))["output"]
        self._wait_until_quiet()
        return output

    def load(self, texts: Sequence[str], in_flight: int, seconds: int) -> Answered:
        bodies = [self._body(text) for text in texts]
        answered = closed_loop(self.url, bodies, in_flight=in_flight, seconds=seconds, headers=self.headers)
        self._wait_until_quiet()
        return answered

    def _wait_until_quiet(self) -> None:
        """What was in flight when the load ended is run still, though nobody waits for it."""
        quiet, deadline = 0, time.monotonic() + QUIET_TIMEOUT_S
        while quiet < 3:
            begin = time.monotonic()
            wait_for_answer(self._request(PROBE), self.log)
            quiet = quiet + 1 if time.monotonic() - begin < QUIET_S else 0
            if time.monotonic() > deadline:
                raise BenchmarkError(f"{self.url} is still busy {QUIET_TIMEOUT_S:g} s after its load has ended")

    def _body(self, text: str) -> str:
        return json.dumps({**self.fields, "input": text})

    def _request(self, text: str) -> urllib.request.Request:
        headers = {"Content-Type": "application/json", **self.headers}
        return urllib.request.Request(self.url, self._body(text).encode(), headers, method="POST")


@contextmanager
def _serving(who: str) -> Iterator[_Front]:
    port = free_port()
    if who == OURS:
        with server() as valkey:
            config: dict[str, object] = {
                "broker": {"url": valkey.url},
                "api": {"port": port},
                "workers": {"metrics_port": free_port()},
            }
            with sheaf(["device", "--device", "cpu"], config), sheaf(["api"], config) as log:
                yield _Front(f"http://127.0.0.1:{port}/v1/jobs", {"model": "minilm"}, {"Prefer": "wait=60"}, log)
    else:
        environment = {**peer_environment(), "PORT": str(port), "MOSEC_PORT": str(port)}
        with process([peer_python(), *PEERS[who]], environment=environment) as log:
            yield _Front(f"http://127.0.0.1:{port}/inference", {}, {}, log)


def _check_alike(outputs: Mapping[str, Sequence[float]]) -> None:
    """All ran the same model: their outputs agree."""
    for who, output in outputs.items():
        apart = max(abs(one - other) for one, other in zip(output, outputs[OURS], strict=True))
        if apart > TOLERANCE:
            raise BenchmarkError(f"{who} answers with another embedding than ours: they lie {apart:g} apart")


def _ratios(cells: Cells, peers: Sequence[str]) -> list[Ratio]:
    mixed, fixed = _beside_the_better(cells, peers, "mixed"), _beside_the_better(cells, peers, "fixed")
    p99 = [_p99(cells[Cell(who, "mixed", 64)]) for who in (OURS, *peers)]
    return [
        Ratio.of_rates("mixed lengths, 64 in flight, beside the better peer", *mixed, TARGET_MIXED, "req/s"),
        Ratio.of_rates("one length, 64 in flight, beside the better peer", *fixed, TARGET_FIXED, "req/s"),
        Ratio.of_times("p99, mixed lengths, 64 in flight, beside the better peer", p99[0], min(p99[1:]), TARGET_P99),
    ]


def _beside_the_better(cells: Cells, peers: Sequence[str], mix: str) -> tuple[list[float], list[float]]:
    """The rates of 64 in flight: ours, and the better peer's, a number a round."""
    rates = {who: [answered.rate for answered in cells[Cell(who, mix, 64)]] for who in (OURS, *peers)}
    return rates[OURS], [max(round_) for round_ in zip(*(rates[peer] for peer in peers), strict=True)]


def _p99(rounds: Sequence[Answered]) -> float:
    return sum(answered.p99_ms for answered in rounds) / len(rounds)


def _details(cells: Cells) -> dict[str, object]:
    return {"cells": [asdict(cell) | {"rounds": [asdict(found) for found in rounds]} for cell, rounds in cells.items()]}


def _table(cells: Cells) -> list[str]:
    """A line for each mix and number in flight: rate, p50 and p99 of each server."""
    names = list(dict.fromkeys(cell.who for cell in cells))
    columns = "".join(f"  {f'{name}: req/s, p50, p99 ms':>32}" for name in names)
    lines = ["", f"{'texts':<9}{'in flight':>9}{columns}"]
    for mix, in_flight in dict.fromkeys((cell.mix, cell.in_flight) for cell in cells):
        line = f"{mix:<9}{in_flight:>9}"
        for name in names:
            first = cells[Cell(name, mix, in_flight)][0]
            line += f"  {first.rate:>12,.1f}{first.p50_ms:>10,.0f}{first.p99_ms:>10,.0f}"
        lines.append(line)
    return lines
