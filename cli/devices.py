"""Which devices this machine has, found without loading CUDA into this process."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pynvml

from cli.problems import CommandError


@dataclass(frozen=True, slots=True)
class Device:
    """One worker's device. `visible` is its `CUDA_VISIBLE_DEVICES`; inside the worker the GPU is always `cuda:0`."""

    name: str
    visible: str


CPU = Device("cpu", "")


def chosen_devices(devices: str) -> list[Device]:
    """The devices that the setting `workers.devices` means here. Raises `CommandError` for GPUs that are not there."""
    if devices == "cpu":
        return [CPU]
    visible = _visible_gpus()
    if devices == "auto":
        return [Device("cuda:0", gpu) for gpu in visible] or [CPU]
    indices = [int(index) for index in devices.split(",")]
    missing = [index for index in indices if index >= len(visible)]
    if missing:
        there = f"has {len(visible)} GPUs" if visible else "has no GPU"
        raise CommandError(f"workers.devices names GPU {missing[0]}, but this machine {there}: use auto, cpu or others")
    return [Device("cuda:0", visible[index]) for index in indices]


def _visible_gpus() -> list[str]:
    """What each GPU is called in `CUDA_VISIBLE_DEVICES`; an outer setting of that variable narrows the choice."""
    outer = os.environ.get("CUDA_VISIBLE_DEVICES")
    if outer is not None:
        return [name for name in outer.split(",") if name and name != "-1"]
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [str(index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()
