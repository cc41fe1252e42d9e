"""What can go wrong with a model, and where.

InferenceError
├── ModelLoadError      load: the source, the handler or a setting of the model does not fit; the model stays unready
├── InvalidInput        preprocess: this row can never be served; only its job fails
└── WrongOutputCount    postprocess: the handler broke its promise of one output a row; its batch fails
"""

from __future__ import annotations


class InferenceError(Exception):
    """Base of everything this room raises on purpose."""


class ModelLoadError(InferenceError):
    """A model cannot be loaded as its settings say."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"model {model}: {reason}")


class InvalidInput(InferenceError):
    """A row that the model does not take; the message says what it takes."""


class WrongOutputCount(InferenceError):
    """A handler returned another number of outputs than its batch has rows."""

    def __init__(self, rows: int, outputs: int) -> None:
        super().__init__(f"the handler returned {outputs} outputs for {rows} rows; it must return one output a row")
