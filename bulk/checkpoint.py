"""How far a run has come, in a small file beside its output: enough to go on after a kill, with each row written once.

It is saved after both outputs were flushed, so all that it counts is on disk; what was written later is cut away.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import orjson
from pydantic import JsonValue, NonNegativeInt, TypeAdapter, ValidationError

from bulk.durable import failing_as_output, write_atomically
from bulk.errors import BadCheckpoint, InputChanged, OptionsChanged
from bulk.fingerprint import Fingerprint

#: Raised when an older reader would misunderstand the file.
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One run's state. `options` are those that the rows depend on; `output` and `errors` name the files written."""

    input: str
    fingerprint: Fingerprint
    input_format: str
    output: str
    output_format: str
    errors: str | None
    options: dict[str, JsonValue]
    #: Whom the run's jobs belong to in the broker; "" for a run that has no name of its own there.
    owner: str = ""
    #: Rows of the input, bad ones too, of which all is written: the number of the row to go on with.
    rows_done: NonNegativeInt = 0
    output_position: NonNegativeInt = 0
    errors_position: NonNegativeInt = 0
    #: Where there are any, their sum is `rows_done`.
    counts: dict[str, NonNegativeInt] = field(default_factory=dict)
    #: All rows are written, only the outputs' names are outstanding, if anything.
    complete: bool = False
    version: int = VERSION

    @classmethod
    def load(cls, path: Path) -> Checkpoint | None:
        """The checkpoint in that file; None when there is no file.

        Raises:
            BadCheckpoint: it cannot be read, is damaged, or a newer version wrote it.
        """
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise BadCheckpoint(str(path), error.strerror or str(error)) from error
        try:
            found = _ADAPTER.validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise BadCheckpoint(str(path), f"{where}: {first['msg']}" if where else first["msg"]) from error
        if found.version != VERSION:
            raise BadCheckpoint(str(path), f"version {found.version} wrote it, this is {VERSION}")
        if found.counts and sum(found.counts.values()) != found.rows_done:
            raise BadCheckpoint(str(path), "its counts are not those of its rows")
        return found

    def save(self, path: Path) -> None:
        """Put it in place of the file's earlier content, at once and for good.

        Raises:
            OutputFailed: it cannot be written; the earlier content is still there.
        """
        with failing_as_output(str(path)):
            write_atomically(path, orjson.dumps(self, option=orjson.OPT_INDENT_2) + b"\n")

    def check(self, now: Checkpoint) -> None:
        """See that a run which begins as `now` would make the same rows; how far either has come does not matter.

        Raises:
            InputChanged: the input is another file, or was written to.
            OptionsChanged: another output, or an option; it names the first that differs.
        """
        if self.input != now.input:
            raise InputChanged(f"it was {self.input} and is {now.input} now")
        if difference := self.fingerprint.difference(now.fingerprint):
            raise InputChanged(f"{self.input}: {difference}")
        for name in ("input_format", "output", "output_format", "errors"):
            before, after = getattr(self, name), getattr(now, name)
            if before != after:
                raise OptionsChanged(name, before, after)
        for name in sorted(self.options.keys() | now.options.keys()):
            before, after = self.options.get(name), now.options.get(name)
            if before != after:
                raise OptionsChanged(name, before, after)


_ADAPTER = TypeAdapter(Checkpoint)
