"""A loaded model: runs its handler's steps, keeps every row's outcome in its place, and isolates rows that fail.

The steps (encode, collate, infer, finish) run on threads of their own, each on another batch; a model keeps nothing of
a batch.
Whatever a handler raises is the row's failure, `SystemExit` too: none of these threads is one that signals reach.
"""

from __future__ import annotations

import gc
import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inference.errors import InvalidInput, ModelLoadError, WrongOutputCount
from inference.handler import Encoded, Handler, ModelSpec, RowError

if TYPE_CHECKING:
    import torch

    from inference.copying import CopyStream

log = logging.getLogger(__name__)

#: The built-in tasks, as handlers.
TASKS = {"embedding": "inference.handlers.embedding:Embedding"}


@dataclass(frozen=True, slots=True)
class Collated:
    """A batch as the handler's `infer` takes it. `done` tells when its copy to a GPU has ended."""

    batch: object
    done: torch.cuda.Event | None = None


@dataclass(frozen=True, slots=True)
class _Part:
    """Some rows of a batch that ran together: what `infer` returned for them, or why it failed."""

    rows: int
    raw: object
    error: RowError | None = None


@dataclass(frozen=True, slots=True)
class Inferred:
    """A batch that has run; more than one part when it had to be split."""

    parts: tuple[_Part, ...]
    #: Class name of the error that made it be split; None for a batch that ran as one.
    split_by: str | None = None


class Model:
    """Made by `load`. No step raises for a bad row: its outcome is a `RowError`."""

    def __init__(
        self,
        spec: ModelSpec,
        handler: Handler,
        precision: str,
        running: Callable[[], AbstractContextManager[object]],
        copies: CopyStream | None = None,
    ) -> None:
        self.spec = spec
        self.precision = precision
        self._handler = handler
        self._running = running
        self._copies = copies

    @classmethod
    def load(cls, spec: ModelSpec, device: str) -> Model:
        """Load a model to `device` (`cpu` or `cuda:0`) and warm it up. Raises `ModelLoadError`."""
        handler = _make_handler(spec)
        if handler.uses_torch:
            model = cls._with_torch(spec, handler, device)
        else:
            _call_load(handler, spec, device, None)
            model = cls(spec, handler, "none", nullcontext)
        if spec.warmup:
            model._warm_up()
        return model

    @classmethod
    def _with_torch(cls, spec: ModelSpec, handler: Handler, device: str) -> Model:
        import torch

        from inference.precision import Precision, allow_tf32

        allow_tf32(spec.tf32)
        precision = Precision(spec.precision).on(device)
        _call_load(handler, spec, device, precision.dtype)

        def running() -> AbstractContextManager[object]:
            with ExitStack() as stack:
                stack.enter_context(torch.inference_mode())
                stack.enter_context(precision.autocast(device))
                return stack.pop_all()

        copies = None
        if device.startswith("cuda"):
            from inference.copying import CopyStream

            copies = CopyStream(device)
        return cls(spec, handler, str(precision), running, copies)

    def encode(self, rows: Sequence[object]) -> list[Encoded | RowError]:
        """One entry per row: encoded for the device, or why it cannot be."""
        try:
            return self._encode_together(rows)
        except BaseException as error:
            if len(rows) == 1:
                return [RowError.of(error, with_traceback=not isinstance(error, InvalidInput))]
            return [self.encode([row])[0] for row in rows]

    def _encode_together(self, rows: Sequence[object]) -> list[Encoded | RowError]:
        encoded = list(self._handler.preprocess(rows))
        if len(encoded) != len(rows):
            raise WrongOutputCount(len(rows), len(encoded))
        for row in encoded:
            if not isinstance(row, (Encoded, RowError)):
                raise TypeError(f"preprocess must return Encoded or RowError for each row, not {type(row).__name__}")
        return encoded

    def collate(self, batch: Sequence[Encoded]) -> Collated | None:
        """The batch made ready for `infer`, while another one runs; None when that fails: `infer` finds out why."""
        try:
            with self._running():
                if self._copies is None:
                    return Collated(self._handler.collate(batch))
                with self._copies.copying() as done:
                    return Collated(self._handler.collate(batch), done)
        except BaseException:
            return None

    def infer(self, batch: Sequence[Encoded], collated: Collated | None = None) -> Inferred:
        """Run a batch on the device. A batch that raises is halved until the rows that cannot run stand alone.

        `collated` is what `collate` returned for it; the batch is collated here without.
        """
        causes: list[str] = []
        with self._running():
            parts = tuple(self._infer_parts(batch, causes, collated))
        return Inferred(parts, causes[0] if len(parts) > 1 else None)

    def example(self) -> object:
        """A row to try the model with; None when its handler names none."""
        return self._handler.example()

    def _infer_parts(
        self, batch: Sequence[Encoded], causes: list[str], collated: Collated | None = None
    ) -> list[_Part]:
        try:
            return [_Part(len(batch), self._infer_whole(batch, collated))]
        except BaseException as error:
            if len(batch) == 1:
                return [_Part(1, None, RowError.of(error))]
            # Not the error's text: it may quote a row. Its caller gets it.
            log.warning(
                "A batch failed; trying its halves.",
                extra={"model": self.spec.name, "rows": len(batch), "cause": type(error).__name__},
            )
            causes.append(type(error).__name__)
        middle = len(batch) // 2
        return self._infer_parts(batch[:middle], causes) + self._infer_parts(batch[middle:], causes)

    def _infer_whole(self, batch: Sequence[Encoded], collated: Collated | None) -> object:
        if collated is None:
            return self._handler.infer(self._handler.collate(batch))
        if self._copies is not None and collated.done is not None:
            self._copies.wait(collated.done)
        return self._handler.infer(collated.batch)

    def finish(self, inferred: Inferred) -> list[object | RowError]:
        """One outcome per row of the batch, in its order."""
        outcomes: list[object | RowError] = []
        for part in inferred.parts:
            outcomes += [part.error] if part.error is not None else self._postprocess(part)
        return outcomes

    def _postprocess(self, part: _Part) -> Sequence[object | RowError]:
        try:
            outputs = list(self._handler.postprocess(part.raw))
            if len(outputs) != part.rows:
                raise WrongOutputCount(part.rows, len(outputs))
        except BaseException as error:
            # Not its text or traceback: they may quote a row. Its callers get both.
            log.warning(
                "Postprocessing failed.",
                extra={"model": self.spec.name, "rows": part.rows, "cause": type(error).__name__},
            )
            return [RowError.of(error)] * part.rows
        return outputs

    def _warm_up(self) -> None:
        """Run the smallest and the largest batch once, so that no caller pays for lazy initialisation."""
        example = self.example()
        if example is None:
            return
        for rows in (1, self.spec.max_batch_size):
            encoded = [row for row in self.encode([example] * rows) if isinstance(row, Encoded)]
            if not encoded:
                # Its settings refuse the example: too long for them.
                log.info("The model was not warmed up: it refuses its example.", extra={"model": self.spec.name})
                return
            outcomes = self.finish(self.infer(encoded))
            failed = next((outcome for outcome in outcomes if isinstance(outcome, RowError)), None)
            if failed is not None or len(outcomes) != rows:
                raise ModelLoadError(self.spec.name, f"its warm-up failed: {failed}")


def gpu_memory_bytes() -> int | None:
    """Device memory that this process has allocated for tensors; None without CUDA in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    allocated: int = torch.cuda.memory_allocated()
    return allocated


def free_gpu_memory() -> None:
    """Give the device back what no tensor uses any more; models that nobody refers to are gone then."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _make_handler(spec: ModelSpec) -> Handler:
    name = spec.handler
    if name is None:
        if spec.task not in TASKS:
            raise ModelLoadError(spec.name, f"task {spec.task!r} is unknown: it is one of {', '.join(TASKS)}")
        name = TASKS[spec.task]
    module_name, _, class_name = name.partition(":")
    try:
        made = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelLoadError(spec.name, f"handler {name!r} cannot be imported: {error}") from error
    if not (isinstance(made, type) and issubclass(made, Handler)):
        raise ModelLoadError(spec.name, f"handler {name!r} is no subclass of inference.Handler")
    try:
        return made()
    except TypeError as error:
        raise ModelLoadError(spec.name, f"handler {name!r} cannot be made: {error}") from error


def _call_load(handler: Handler, spec: ModelSpec, device: str, dtype: object) -> None:
    try:
        handler.load(spec, device, dtype)
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(spec.name, f"{type(error).__name__}: {error}") from error
