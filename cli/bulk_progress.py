"""How far a bulk run has come, on standard error: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich import progress as rich_progress

    from bulk.run import Progress

#: Seconds between lines where there is no terminal.
LINE_EVERY_S = 5.0


@contextmanager
def shown() -> Iterator[Bar | Lines]:
    """What is told within is shown, and what is logged, too."""
    if not sys.stderr.isatty():
        with _logged(lines := Lines()):
            yield lines
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress, _logged(bar := Bar(progress)):
        yield bar


class Bar:
    """On a terminal; what is said stands above the bar."""

    def __init__(self, progress: rich_progress.Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None)

    def tell(self, progress: Progress) -> None:
        ratio = progress.ratio
        total = None if ratio is None else 1.0
        self._progress.update(self._task, description=line(progress), total=total, completed=ratio or 0.0)

    def say(self, what: str) -> None:
        self._progress.console.print(f"sheaf: {what}", markup=False, highlight=False)


class Lines:
    """Without a terminal."""

    def __init__(self) -> None:
        self._told_at = time.monotonic()

    def tell(self, progress: Progress) -> None:
        if time.monotonic() - self._told_at >= LINE_EVERY_S:
            self._told_at = time.monotonic()
            self.say(f"{line(progress)}{_time_left(progress)}")

    def say(self, what: str) -> None:
        typer.echo(f"sheaf: {what}", err=True)


def line(progress: Progress) -> str:
    return f"{progress.rows:,} rows, {progress.failed:,} failed, {progress.rows_per_second:,.0f} rows/s"


def _time_left(progress: Progress) -> str:
    if not progress.ratio:
        return ""
    done_here = progress.ratio * (1 - progress.resumed_from / max(progress.rows, 1))
    worked_s = progress.seconds - progress.paused_s
    left_s = worked_s * (1 - progress.ratio) / done_here if done_here else 0.0
    return f", {progress.ratio:.0%} done, about {timedelta(seconds=round(left_s))} left"


class _Log(logging.Handler):
    """Warnings, in one line each."""

    def __init__(self, display: Bar | Lines) -> None:
        super().__init__(logging.WARNING)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        # That the broker is away is told once, by the run.
        if record.name not in ("broker.waiting", "bulk.patience") or record.levelno > logging.WARNING:
            message = record.getMessage()
            cause = f": {record.exc_info[1]}" if record.exc_info else ""
            self._display.say(f"{message[:1].lower()}{message[1:].rstrip('.')}{cause}")


@contextmanager
def _logged(display: Bar | Lines) -> Iterator[None]:
    handler = _Log(display)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
