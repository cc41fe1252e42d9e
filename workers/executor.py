"""What the drain needs of whatever runs its batches: a model on a device, or anything else with these four steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from inference import Encoded, RowError


class Executor(Protocol):
    """Four steps, each called from a thread of its own: encode (feeder), collate (stager), infer (device), finish
    (settler).

    `encode` and `finish` answer one entry per row, in order; a row that failed is a `RowError`. None of them raises for
    a bad row. What `collate` returns is known to `infer` alone, and what `infer` returns to `finish`.
    """

    def encode(self, rows: Sequence[object]) -> list[Encoded | RowError]: ...

    def collate(self, batch: Sequence[Encoded]) -> Any: ...

    def infer(self, batch: Sequence[Encoded], collated: Any) -> Any: ...

    def finish(self, inferred: Any) -> list[object | RowError]: ...
