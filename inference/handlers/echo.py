"""Returns its input: for wiring, and for measuring everything but the model."""

from __future__ import annotations

from collections.abc import Sequence

from inference.handler import Encoded, Handler, ModelSpec


class Echo(Handler):
    """Takes any JSON value; each row counts as one token."""

    uses_torch = False

    def load(self, spec: ModelSpec, device: str, dtype: object) -> None:
        """There is nothing to load."""

    def preprocess(self, rows: Sequence[object]) -> Sequence[Encoded]:
        return [Encoded(row) for row in rows]

    def infer(self, batch: Sequence[Encoded]) -> object:
        return [row.data for row in batch]

    def postprocess(self, raw: object) -> Sequence[object]:
        assert isinstance(raw, list)
        return raw
