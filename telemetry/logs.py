"""Log lines on standard output: one JSON object a line in production, readable text where a person looks on.

`configure` sets up ordinary logging. `LineWriter` is for the line that every job gets: a batch's lines are made and
written together, since `logging` would cost more than all else of a small job.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import orjson
from pythonjsonlogger.orjson import OrjsonFormatter

#: The logger whose level decides whether jobs get their line.
JOBS_LOGGER = "sheaf.jobs"

#: Attributes that every log record has; what else it has was passed as `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure(level: str, fmt: str, *, service: str) -> None:
    """Send all logging of this process to standard output. `fmt` is `json` or `text`."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_json_formatter(service) if fmt == "json" else _TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    # What these say at info is for their own developers.
    for chatty in ("celery", "kombu", "httpx", "transformers", "uvicorn", "amqp", "tornado"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))


class LineWriter:
    """Writes the lines of a batch's jobs with one system call. Thread-safe."""

    def __init__(self, fmt: str, *, service: str = "worker") -> None:
        self._text = fmt == "text"
        self._service = service
        self._logger = logging.getLogger(JOBS_LOGGER)

    def write(self, rows: Sequence[Mapping[str, object]]) -> None:
        """One line a row, at level info. Each row holds its `message` and fields."""
        if not rows or not self._logger.isEnabledFor(logging.INFO):
            return
        now = _timestamp(time.time())
        if self._text:
            lines = [_text_line(now, "INFO", str(row["message"]), _without_message(row)).encode() for row in rows]
        else:
            head = {"timestamp": now, "level": "INFO", "logger": JOBS_LOGGER, "service": self._service}
            lines = [orjson.dumps({**head, **row}) for row in rows]
        sys.stdout.buffer.write(b"\n".join(lines) + b"\n")
        sys.stdout.buffer.flush()


def _json_formatter(service: str) -> logging.Formatter:
    return OrjsonFormatter(
        "%(levelname)s %(name)s %(message)s",
        rename_fields={"levelname": "level", "name": "logger", "exc_info": "exception"},
        static_fields={"service": service},
        timestamp=True,
    )


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        line = _text_line(_timestamp(record.created), record.levelname, record.getMessage(), fields)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _text_line(when: str, level: str, message: str, fields: Mapping[str, object]) -> str:
    shown = "".join(f" {name}={value}" for name, value in fields.items() if value is not None)
    return f"{when} {level:<7} {message}{shown}"


def _without_message(row: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in row.items() if name != "message"}


def _timestamp(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
