"""A file of texts through a real worker, beside the bare model; and what it does to callers who wait meanwhile.

The bare loops are given texts that are tokenized already: one batches a window's texts by length, as a program would
that knows what it has; one batches in the order of the file. Callers send texts at random moments, five a second, to an
API beside the same worker, first alone and then while a file is on its way that is too long to end before them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from benchmarks.efficiency import FIFO_SIZE, Drained, bare_loop
from benchmarks.open_loop import poisson, send_all, spread
from benchmarks.processes import REPOSITORY, BenchmarkError, free_port, process, server, sheaf, wait_for_page
from benchmarks.report import Ratio, Report
from benchmarks.texts import fixed, mixed

TARGET_BARE = 0.95
TARGET_FIFO = 3.0
TARGET_P99 = 1.3
WINDOW = 2000
RATE = 5.0
#: Rows that are done before any rate counts: the worker's caches are being filled.
WARM_UP = 200


def run(*, quick: bool) -> Report:
    count, fifo_count, rounds, seconds = (3000, 640, 1, 20) if quick else (12_000, 3200, 2, 120)
    texts = mixed(count)
    ours = [_file(texts) for _ in range(rounds)]
    by_length = [_bare(texts, _by_length(texts)) for _ in range(rounds)]
    fifo = [_bare(texts, _cut(range(fifo_count))) for _ in range(rounds)]
    alone, beside = _callers(mixed(100 * count), seconds)
    ratios = [
        Ratio.of_rates("file, beside the bare model on batches by length", ours, by_length, TARGET_BARE, "rows/s"),
        Ratio.of_rates("file, beside the bare model in the file's order", ours, fifo, TARGET_FIFO, "rows/s"),
        Ratio.of_times("p99 of callers while a file runs, beside alone", beside["p99"], alone["p99"], TARGET_P99),
    ]
    lines = [
        f"callers {how}: p50 {times['p50']:.1f} ms, p99 {times['p99']:.1f} ms"
        for how, times in (("alone", alone), ("while a file runs", beside))
    ]
    details: dict[str, object] = {"rows": count, "rows_per_s": ours, "by_length": by_length, "fifo": fifo}
    return Report("bulk", ratios, details | {"callers_ms": {"alone": alone, "beside": beside}}, lines)


def _cut(numbers: Sequence[int]) -> list[Sequence[int]]:
    return [numbers[begin : begin + FIFO_SIZE] for begin in range(0, len(numbers), FIFO_SIZE)]


def _by_length(texts: Sequence[str]) -> list[Sequence[int]]:
    batches: list[Sequence[int]] = []
    for begin in range(0, len(texts), WINDOW):
        window = range(begin, min(begin + WINDOW, len(texts)))
        batches += _cut(sorted(window, key=lambda number: len(texts[number])))
    return batches


def _bare(texts: Sequence[str], batches: Sequence[Sequence[int]]) -> float:
    drained: Drained = bare_loop(texts, batches)[0]
    return drained.rate


def _file(texts: Sequence[str]) -> float:
    """Rows per second of `sheaf bulk`, as it says itself: from the first row that it reads to the output's name."""
    with server() as valkey, TemporaryDirectory(prefix="sheaf-bench-") as name:
        config: dict[str, object] = {"broker": {"url": valkey.url}, "workers": {"metrics_port": free_port()}}
        with sheaf(["device", "--device", "cpu"], config):
            folder = Path(name)
            _bulk(folder, config, texts[:WARM_UP], "warm")
            summary = _bulk(folder, config, texts, "texts")
    rate: float = summary["rows_per_second"]
    return rate


def _bulk(folder: Path, config: Mapping[str, object], texts: Sequence[str], name: str) -> dict[str, float]:
    command = [*_command(folder, config, texts, name), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    if done.returncode:
        raise BenchmarkError(f"the file was not done: {done.stderr[-2000:]}")
    summary: dict[str, float] = json.loads(done.stdout)
    return summary


def _command(folder: Path, config: Mapping[str, object], texts: Sequence[str], name: str) -> list[str]:
    settings, rows = folder / "bulk.yaml", folder / f"{name}.jsonl"
    settings.write_text(yaml.safe_dump(dict(config)))
    with rows.open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    command = [
        sys.executable,
        "-m",
        "cli",
        "--config",
        str(settings),
        "bulk",
        str(rows),
        str(folder / f"{name}.out.jsonl"),
    ]
    return [*command, "--model", "minilm", "--window", str(WINDOW)]


def _callers(texts: Sequence[str], seconds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds from when a request was to be sent to its answer: without, and with a file of `texts` beside it."""
    port = free_port()
    count = round(RATE * seconds)
    bodies = [json.dumps({"model": "minilm", "input": text}) for text in fixed(count)]
    with server() as valkey, TemporaryDirectory(prefix="sheaf-bench-") as name:
        config: dict[str, object] = {
            "broker": {"url": valkey.url},
            "api": {"port": port},
            "workers": {"metrics_port": free_port()},
        }
        with sheaf(["device", "--device", "cpu"], config), sheaf(["api"], config) as log:
            wait_for_page(f"http://127.0.0.1:{port}/readyz", log)

            def measured(seed: int) -> dict[str, float]:
                moments = poisson(RATE, count, seed=seed)
                return spread(send_all(port, "/v1/jobs", bodies, moments, "Prefer: wait=60"))

            measured(1)
            alone = measured(2)
            with _running(_command(Path(name), config, texts, "beside")):
                # The worker learns what its batches cost while others are about.
                measured(1)
                beside = measured(2)
    return alone, beside


@contextmanager
def _running(command: Sequence[str]) -> Iterator[None]:
    with process(command, environment={}, folder=REPOSITORY):
        yield
