"""What a handler is: the steps that turn rows into outputs for one model. Knows no torch.

Write one by subclassing `Handler` and naming it in the settings as `handler: package.module:Class`.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

#: Longest traceback that is kept with a failed row, characters; the end of it is what tells.
MAX_TRACEBACK = 8000


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model as its settings describe it."""

    name: str
    version: str = "1"
    #: A built-in task, or None when `handler` names a class.
    task: str | None = None
    handler: str | None = None
    source: str | None = None
    precision: str = "auto"
    #: Whether fp32 products may run in TF32; the last model loaded decides for its process.
    tf32: bool = True
    #: Longest row, tokens; None for the model's own limit.
    max_length: int | None = None
    #: What happens to longer rows: `truncate` or `refuse`.
    over_length: str = "truncate"
    max_batch_size: int = 32
    max_batch_tokens: int = 8192
    warmup: bool = True
    #: What only this handler understands.
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Encoded:
    """One row, ready for the device. `tokens` is its length in whatever unit padding costs."""

    data: object
    tokens: int = 1


@dataclass(frozen=True, slots=True)
class RowError:
    """Why one row failed: an exception's class name, text, module and traceback."""

    type: str
    message: str
    module: str = "builtins"
    traceback: str | None = None

    @classmethod
    def of(cls, error: BaseException, *, with_traceback: bool = True) -> RowError:
        kind = type(error)
        lines = "".join(traceback.format_exception(error))[-MAX_TRACEBACK:] if with_traceback else None
        return cls(kind.__name__, _writable(_text(error)), kind.__module__, None if lines is None else _writable(lines))


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return f"<its text could not be made: {type(error).__name__}.__str__ failed>"


def _writable(text: str) -> str:
    """The same text with what UTF-8 cannot hold (lone surrogates, as file names may) written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


class Handler(ABC):
    """One model in one process. `load` is called once; the other steps each from a thread of its own, in this order.

    A `preprocess`, `collate` or `infer` that raises is called again with fewer rows until the bad ones stand alone, so
    raise freely; a `postprocess` that raises, or returns another number of outputs than there are rows, fails its
    batch. Keep nothing of a batch in `self`: steps of different batches overlap.
    """

    #: False for handlers that do without torch; theirs is then never imported and `load` gets None as its dtype.
    uses_torch: ClassVar[bool] = True

    @abstractmethod
    def load(self, spec: ModelSpec, device: str, dtype: object) -> None:
        """Load the model to `device` (`cpu` or `cuda:0`) with weights of `dtype` (a `torch.dtype`)."""

    @abstractmethod
    def preprocess(self, rows: Sequence[object]) -> Sequence[Encoded | RowError]:
        """Encode rows as they came in the request, one answer a row. Runs on the CPU, beside the device."""

    def collate(self, batch: Sequence[Encoded]) -> object:
        """Make one input of the rows of a batch: pad, copy to the device. Runs while the batch before it is computed,
        on CUDA with a stream of its own: copy from pinned memory with `non_blocking=True`. The default is the rows.
        """
        return batch

    @abstractmethod
    def infer(self, batch: Any) -> object:
        """Run what `collate` returned on the device, under `inference_mode` and autocast, and wait for it.

        One that takes long may call `inference.give_way()` between its parts, so that callers' rows need not wait for
        the end of a batch of the lowest priority.
        """

    @abstractmethod
    def postprocess(self, raw: object) -> Sequence[object]:
        """Turn what `infer` returned into one JSON-able output a row (numpy arrays are)."""

    def example(self) -> object:
        """A row to warm the model up with; None to skip that."""
        return None
