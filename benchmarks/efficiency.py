"""What our worker makes of a full queue of texts, beside the bare model.

A real worker with everything on drains plain Celery messages of one text each. From its log the batches are known, and
two bare loops are run, each in a process of its own: one over the very same batches, with every text tokenized before
its clock starts, and one over batches of 32 in the order of arrival. The former is the most that any worker could do
with these batches, the latter is what a server does that does not look at lengths.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import redis

from benchmarks.preload import preload_texts
from benchmarks.processes import REPOSITORY, BenchmarkError, free_port, server, sheaf
from benchmarks.report import Ratio, Report
from benchmarks.texts import MIXES

TARGET_BARE = 0.95
TARGET_FIFO = 3.0
TARGET_PADDING = 0.10
QUEUE = "infer.minilm"
FIFO_SIZE = 32
#: Batches at the begin that no rate counts: caches are still being filled.
WARM_UP = 2
#: The queue counts as full until this share of the batches has run; after it, texts run out.
FULL_SHARE = 0.9
#: A worker that settles nothing for so long is not draining the queue.
STALLED_S = 60.0


@dataclass(frozen=True, slots=True)
class Drained:
    """Batches in the order in which they ended, as numbers of texts, and when each ended in seconds."""

    batches: Sequence[Sequence[int]]
    moments: Sequence[float]

    @property
    def rate(self) -> float:
        """Rows per second, from the end of the last warm-up batch to the end of the last one."""
        rows = sum(len(batch) for batch in self.batches[WARM_UP:])
        return rows / (self.moments[-1] - self.moments[WARM_UP - 1])


@dataclass(frozen=True, slots=True)
class Round:
    """One after the other: the worker, the bare loop over its batches, the loop in order of arrival."""

    worker: Drained
    bare: Drained
    fifo: Drained
    #: Of each text.
    tokens: Sequence[int]


def run(*, quick: bool) -> Report:
    mixes, count, fifo_count, rounds = (("mixed",), 1200, 320, 1) if quick else (("mixed", "fortunes"), 4000, 1600, 2)
    found = {mix: [_round(MIXES[mix](count), fifo_count) for _ in range(rounds)] for mix in mixes}
    ratios = _ratios_of_mixed(found["mixed"])
    if "fortunes" in found:
        ratios.append(_beside_fifo("fortunes", found["fortunes"]))
    return Report("efficiency", ratios, {"texts": count, **{mix: _details(rounds) for mix, rounds in found.items()}})


def _round(texts: Sequence[str], fifo_count: int) -> Round:
    worker = _worker(texts)
    bare, tokens = bare_loop(texts, worker.batches)
    in_order = range(fifo_count)
    fifo, _ = bare_loop(texts, [in_order[begin : begin + FIFO_SIZE] for begin in range(0, fifo_count, FIFO_SIZE)])
    return Round(worker, bare, fifo, tokens)


def _worker(texts: Sequence[str]) -> Drained:
    with server() as valkey, redis.Redis.from_url(valkey.url) as client:
        preload_texts(client, valkey.url, QUEUE, texts)
        config: dict[str, object] = {"broker": {"url": valkey.url}, "workers": {"metrics_port": free_port()}}
        with sheaf(["device", "--device", "cpu"], config) as log:
            _wait_for_lines(log, len(texts))
            return _batches_of(log)


def _wait_for_lines(log: Path, count: int) -> None:
    done, moved = 0, time.monotonic()
    while done < count:
        time.sleep(0.2)
        now_done = log.read_bytes().count(b'"Job done."')
        if now_done != done:
            done, moved = now_done, time.monotonic()
        elif time.monotonic() - moved > STALLED_S:
            raise BenchmarkError(f"the queue is not drained: {done} of {count} jobs have ended")


def _batches_of(log: Path) -> Drained:
    """From the lines of the jobs: each names its batch, in the order of the rows."""
    batches: defaultdict[int, list[int]] = defaultdict(list)
    moments: dict[int, float] = {}
    for text in log.read_text().splitlines():
        line = json.loads(text) if text.startswith("{") else {}
        if line.get("message") != "Job done.":
            continue
        if line["status"] != "succeeded":
            raise BenchmarkError(f"a job has failed: {line}")
        batches[line["batch"]].append(int(line["job_id"].removeprefix("job-")))
        moments[line["batch"]] = datetime.fromisoformat(line["timestamp"]).timestamp()
    return Drained(list(batches.values()), list(moments.values()))


def bare_loop(texts: Sequence[str], batches: Sequence[Sequence[int]]) -> tuple[Drained, Sequence[int]]:
    """The bare loop over these batches, and the tokens of each text."""
    given = json.dumps({"texts": texts, "batches": [list(batch) for batch in batches]})
    command = [sys.executable, "-m", "benchmarks.bare"]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    if done.returncode:
        raise BenchmarkError(f"the bare loop failed: {done.stderr[-2000:]}")
    answer = json.loads(done.stdout)
    return Drained(batches, answer["moments"]), answer["tokens"]


def _ratios_of_mixed(rounds: Sequence[Round]) -> list[Ratio]:
    worker, bare = [found.worker.rate for found in rounds], [found.bare.rate for found in rounds]
    padding, fifo_padding = (
        _full_padding(rounds[0].worker, rounds[0].tokens),
        _padding(rounds[0].fifo, rounds[0].tokens),
    )
    return [
        Ratio.of_rates("full queue, beside the bare model on the same batches", worker, bare, TARGET_BARE, "rows/s"),
        _beside_fifo("mixed lengths", rounds),
        Ratio(
            "share of padding in what is computed, full queue, mixed lengths",
            padding,
            TARGET_PADDING,
            padding,
            fifo_padding,
            "padding",
            lower_is_better=True,
        ),
    ]


def _beside_fifo(mix: str, rounds: Sequence[Round]) -> Ratio:
    worker, fifo = [found.worker.rate for found in rounds], [found.fifo.rate for found in rounds]
    name = f"full queue, {mix}, beside the bare model on batches in order of arrival"
    return Ratio.of_rates(name, worker, fifo, TARGET_FIFO, "rows/s")


def _full_padding(drained: Drained, tokens: Sequence[int]) -> float:
    """While the queue was full."""
    full = round(len(drained.batches) * FULL_SHARE)
    return _padding(Drained(drained.batches[:full], drained.moments[:full]), tokens)


def _padding(drained: Drained, tokens: Sequence[int]) -> float:
    """The share of the computed tokens that belong to no text."""
    lengths = [[tokens[number] for number in batch] for batch in drained.batches]
    return 1 - sum(map(sum, lengths)) / sum(max(batch) * len(batch) for batch in lengths)


def _details(rounds: Sequence[Round]) -> dict[str, object]:
    return {
        "worker_rows_per_s": [found.worker.rate for found in rounds],
        "bare_rows_per_s": [found.bare.rate for found in rounds],
        "fifo_rows_per_s": [found.fifo.rate for found in rounds],
        "padding": {
            "worker, full queue": [_full_padding(found.worker, found.tokens) for found in rounds],
            "worker, to the end": [_padding(found.worker, found.tokens) for found in rounds],
            "fifo": [_padding(found.fifo, found.tokens) for found in rounds],
        },
        "batches": [len(found.worker.batches) for found in rounds],
        "mean_tokens": sum(rounds[0].tokens) / len(rounds[0].tokens),
    }
