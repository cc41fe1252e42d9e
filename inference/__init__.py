"""Models on devices: loading, precision, handlers. Knows no queue."""

from inference.errors import InferenceError, InvalidInput, ModelLoadError, WrongOutputCount
from inference.giving_way import give_way, give_way_between_layers, giving_way
from inference.handler import Encoded, Handler, ModelSpec, RowError
from inference.model import Collated, Inferred, Model, free_gpu_memory, gpu_memory_bytes

__all__ = [
    "Collated",
    "Encoded",
    "Handler",
    "InferenceError",
    "Inferred",
    "InvalidInput",
    "Model",
    "ModelLoadError",
    "ModelSpec",
    "RowError",
    "WrongOutputCount",
    "free_gpu_memory",
    "give_way",
    "give_way_between_layers",
    "giving_way",
    "gpu_memory_bytes",
]
