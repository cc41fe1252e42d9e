"""The handler of the chaos run: its output shows which row it belongs to, and it takes the time that a row asks for."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import TypedDict

from inference import Encoded, Handler, ModelSpec


class MarkedRow(TypedDict):
    """A row of the chaos run. `mark` is unique, so an output that went to another job shows."""

    mark: str
    sleep_s: float
    fails: bool
    kills: bool


class Marked(Handler):
    """Answers each row's mark, after the longest sleep that a row of the batch asks for; some rows kill the process."""

    uses_torch = False

    def load(self, spec: ModelSpec, device: str, dtype: object) -> None:
        """There is nothing to load."""

    def preprocess(self, rows: Sequence[object]) -> list[Encoded]:
        return [Encoded(row) for row in rows]

    def infer(self, batch: Sequence[Encoded]) -> object:
        rows: list[MarkedRow] = [row.data for row in batch]  # type: ignore[misc]  # only the chaos run sends rows here
        time.sleep(max(row["sleep_s"] for row in rows))
        for row in rows:
            if row["kills"]:
                os.kill(os.getpid(), signal.SIGKILL)
            if row["fails"]:
                raise ArithmeticError(f"{row['mark']} cannot be served")
        return [row["mark"] for row in rows]

    def postprocess(self, raw: object) -> list[object]:
        assert isinstance(raw, list)
        return raw
