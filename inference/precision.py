"""Number formats: which one a device computes in, and the contexts that make it so."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum

import torch


class Precision(StrEnum):
    """`FP16` and `BF16` hold the weights in half precision and compute under autocast, since some layers overflow
    without it. `AUTO` is fp16 on CUDA and fp32 on CPU.
    """

    AUTO = "auto"
    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"

    def on(self, device: str) -> Precision:
        """What it comes to on this device; never `AUTO`."""
        if self is not Precision.AUTO:
            return self
        return Precision.FP16 if device.startswith("cuda") else Precision.FP32

    @property
    def dtype(self) -> torch.dtype:
        """The weights' type."""
        return {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}.get(self, torch.float32)

    def autocast(self, device: str) -> AbstractContextManager[object]:
        """The context that a batch runs in."""
        if self in (Precision.FP16, Precision.BF16):
            return torch.autocast(device.partition(":")[0], dtype=self.dtype)
        return nullcontext()


def allow_tf32(allowed: bool) -> None:
    """Whether fp32 products may run in TF32 on CUDA devices that have it; for the whole process."""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed
