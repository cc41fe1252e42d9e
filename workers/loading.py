"""From a model's settings to what the drain needs to serve it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batching import Limits
from broker import ModelInfo, queue_name
from configs import ModelSettings
from inference import Model, ModelSpec
from workers.executor import Executor


@dataclass(frozen=True, slots=True)
class ModelLoader:
    """Loads one model on one device when told to; knows its queue and bounds before that."""

    spec: ModelSpec
    device: str
    queue: str
    limits: Limits
    info: ModelInfo

    @classmethod
    def of(cls, name: str, settings: ModelSettings, device: str, *, tf32: bool) -> ModelLoader:
        spec = ModelSpec(
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
        return cls(
            spec=spec,
            device=device,
            queue=queue_name(name),
            limits=Limits(settings.max_batch_size, settings.max_batch_tokens, settings.max_wait_ms / 1e3),
            info=ModelInfo(name, settings.version, settings.task, settings.precision, "loading"),
        )

    def load(self) -> tuple[Executor, ModelInfo]:
        """The loaded model, and what to announce of it. Raises `inference.ModelLoadError`."""
        model = Model.load(self.spec, self.device)
        return model, replace(self.info, precision=str(model.precision), state="ready")
