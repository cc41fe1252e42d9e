"""What the drain needs of whatever runs its batches: a model on a device, or anything else with these three steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from inference import Encoded, RowError


class Executor(Protocol):
    """Three steps, each called from a thread of its own: encode (feeder), infer (device), finish (settler).

    `encode` and `finish` answer one entry per row, in order; a row that failed is a `RowError`. None of them raises for
    a bad row. What `infer` returns is known to `finish` alone.
    """

    def encode(self, rows: Sequence[object]) -> list[Encoded | RowError]: ...

    def infer(self, batch: Sequence[Encoded]) -> Any: ...

    def finish(self, inferred: Any) -> list[object | RowError]: ...
