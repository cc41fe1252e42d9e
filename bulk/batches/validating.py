"""Looks at all lines of a batch before the first is run: each is a request to its endpoint and to one model.

What lies in a body is looked at when its line is run: a fault there is that line's answer, one here the whole batch's.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from hashlib import blake2b

from broker import BatchFault
from bulk.batches.endpoints import Models
from bulk.errors import NoText
from bulk.formats import Format
from bulk.locations import Location
from bulk.reading import read_rows
from bulk.rows import BadRow, Reason, Row

#: Faults that are told of one batch.
MAX_FAULTS = 100
#: Characters of a `custom_id`.
MAX_CUSTOM_ID = 512
#: Lines between looks at whether anybody still wants to know.
_LOOK_EVERY = 1000


@dataclass(frozen=True, slots=True)
class Validated:
    """Every line is a request to this model."""

    model: str
    lines: int


class Interrupted(Exception):
    """Nobody wants to know any more."""


class _Seen:
    """Ids that came before, on disk beyond a few megabytes, so that a batch may have any number of lines."""

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None)
        self._db.execute("CREATE TABLE seen (id BLOB PRIMARY KEY) WITHOUT ROWID")
        self._db.execute("BEGIN")

    def add(self, custom_id: str) -> bool:
        """False for one that is there."""
        digest = blake2b(custom_id.encode(errors="surrogatepass"), digest_size=16).digest()
        return self._db.execute("INSERT OR IGNORE INTO seen VALUES (?)", (digest,)).rowcount == 1

    def close(self) -> None:
        self._db.close()


def validate(
    location: Location, endpoint: str, models: Models, *, max_lines: int, given_up: Callable[[], bool]
) -> Validated | list[BatchFault]:
    """The batch's model and size, or all that is wrong with its lines, the first `MAX_FAULTS` of it.

    Raises:
        InputFailed: the file cannot be read.
        Interrupted: `given_up` says so.
    """
    try:
        return _validated(location, endpoint, models, max_lines, given_up)
    except NoText:
        return [BatchFault("invalid_file", "the file is no text in UTF-8: upload JSON lines, and not packed")]


def _validated(
    location: Location, endpoint: str, models: Models, max_lines: int, given_up: Callable[[], bool]
) -> Validated | list[BatchFault]:
    faults: list[BatchFault] = []
    model: str | None = None
    lines = 0
    with closing(_Seen()) as seen, read_rows(location, Format.JSONL) as rows:
        for row in rows:
            if lines % _LOOK_EVERY == 0 and given_up():
                raise Interrupted
            lines += 1
            if lines > max_lines:
                message = f"a batch may have {max_lines} lines: cut the file up"
                return [*faults, BatchFault("too_many_lines", message, row.line)]
            found = _fault(row, endpoint, seen)
            if found is None:
                assert isinstance(row, Row)
                named = _model(row)
                found = _model_fault(row.line, named, model, models)
                if found is None:
                    model = str(named)
            if found is not None:
                faults.append(found)
                if len(faults) == MAX_FAULTS:
                    return faults
    if not lines:
        return [BatchFault("empty_file", "the input file has no lines")]
    if faults:
        return faults
    assert model is not None
    return Validated(model, lines)


def _fault(row: Row | BadRow, endpoint: str, seen: _Seen) -> BatchFault | None:
    if isinstance(row, BadRow):
        code = "line_too_long" if row.reason is Reason.LINE_TOO_LONG else "invalid_json_line"
        return BatchFault(code, row.message, row.line)
    columns = row.columns
    for name in ("custom_id", "method", "url", "body"):
        if name not in columns:
            return BatchFault("missing_required_parameter", f"the line has no {name!r}", row.line, name)
    custom_id = columns["custom_id"]
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        message = f"a `custom_id` is a text of 1 to {MAX_CUSTOM_ID} characters"
        return BatchFault("invalid_custom_id", message, row.line, "custom_id")
    if columns["method"] != "POST":
        return BatchFault("invalid_method", "the `method` is POST", row.line, "method")
    if columns["url"] != endpoint:
        return BatchFault("url_mismatch", f"the `url` is the batch's endpoint, {endpoint}", row.line, "url")
    if not isinstance(columns["body"], Mapping):
        return BatchFault("invalid_body", "the `body` is a JSON object", row.line, "body")
    if not seen.add(custom_id):
        return BatchFault("duplicate_custom_id", "an earlier line has the same `custom_id`", row.line, "custom_id")
    return None


def _model(row: Row) -> object:
    body = row.columns["body"]
    assert isinstance(body, Mapping)
    return body.get("model")


def _model_fault(line: int, named: object, model: str | None, models: Models) -> BatchFault | None:
    if not isinstance(named, str):
        return BatchFault("missing_required_parameter", "the body names no model", line, "body.model")
    if model is not None and named != model:
        return BatchFault(
            "model_mismatch", f"all lines name the same model, as the first does: {model}", line, "body.model"
        )
    if named not in models:
        return BatchFault(
            "model_not_found", f"there is no such model: it is one of {', '.join(models)}", line, "body.model"
        )
    return None
