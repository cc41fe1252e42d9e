"""From settings to what the drain needs to serve a queue."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from batching import Limits
from broker import ModelInfo, queue_name
from broker.message import TASK_NAME
from configs import ModelSettings
from inference import Model, ModelSpec
from workers.executor import Executor
from workers.jobs import Served
from workers.lane import LaneKind
from workers.outbox import Outbox


class Loader(Protocol):
    """Makes the executor of one lane when told to; knows its queue and bounds before that."""

    @property
    def kind(self) -> LaneKind: ...

    @property
    def info(self) -> ModelInfo: ...

    def load(self) -> tuple[Executor, ModelInfo]:
        """The executor, ready to run, and what to announce of it."""


@dataclass(frozen=True, slots=True)
class ModelLoader:
    """Loads one model on one device."""

    spec: ModelSpec
    device: str
    kind: LaneKind
    info: ModelInfo

    @classmethod
    def of(cls, name: str, settings: ModelSettings, device: str, *, tf32: bool, outbox: Outbox) -> ModelLoader:
        """`outbox` takes what follows a job's end."""
        kind = LaneKind(
            queue=queue_name(name),
            task=TASK_NAME,
            served=Served(name, settings.version, outbox),
            limits=limits(settings),
            step_timeout_s=settings.step_timeout_s,
        )
        info = ModelInfo(name, settings.version, settings.task, settings.precision, "loading")
        return cls(spec=model_spec(name, settings, tf32=tf32), device=device, kind=kind, info=info)

    def load(self) -> tuple[Executor, ModelInfo]:
        """Raises `inference.ModelLoadError`."""
        model = Model.load(self.spec, self.device)
        return model, replace(self.info, precision=str(model.precision), state="ready")


def model_spec(name: str, settings: ModelSettings, *, tf32: bool) -> ModelSpec:
    """What `inference` has to know of a model."""
    return ModelSpec(
        name=name,
        version=settings.version,
        task=settings.task,
        handler=settings.handler,
        source=settings.source,
        precision=settings.precision,
        tf32=tf32,
        max_length=settings.max_length,
        over_length=settings.over_length,
        max_batch_size=settings.max_batch_size,
        max_batch_tokens=settings.max_batch_tokens,
        warmup=settings.warmup,
        options=settings.options,
    )


def limits(settings: ModelSettings) -> Limits:
    """What `batching` has to know of a model."""
    return Limits(
        max_batch_size=settings.max_batch_size,
        max_batch_tokens=settings.max_batch_tokens,
        max_wait_s=settings.max_wait_ms / 1e3,
        preferred_sizes=tuple(settings.preferred_batch_sizes),
        adaptive_wait=settings.adaptive_wait,
    )
