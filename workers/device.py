"""The process of one device: serves the queues of all models on it.

`CUDA_VISIBLE_DEVICES` must be set before this process starts; here the device is `cpu` or `cuda:0`.
"""

from __future__ import annotations

import os

from configs import Settings
from workers import process
from workers.app import make_app
from workers.loading import ModelLoader
from workers.outbox import Outbox


def main(settings: Settings, device: str, index: int) -> int:
    """Serve all models of `settings` on `device` until told to stop. `index` counts this machine's worker processes."""
    process.prepare(settings, "worker")
    limit_threads(settings, device)
    outbox = Outbox.of(settings.broker.key_prefix)
    return process.run(
        settings,
        make_app(settings),
        {
            name: ModelLoader.of(name, model, device, tf32=settings.workers.tf32, outbox=outbox)
            for name, model in settings.models.items()
        },
        service="worker",
        name=f"sheaf-{device.partition(':')[0]}{index}",
        device=device,
        metrics_port=settings.workers.metrics_port + index,
    )


def limit_threads(settings: Settings, device: str) -> None:
    """What torch reads from the environment, once: before it is imported."""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if device == "cpu":
        # Threads that wait for each other by spinning keep the API and the broker from the cores that they share: with
        # them on two cores a full queue of like texts went 5 % slower.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        if settings.workers.cpu_threads is not None:
            os.environ["OMP_NUM_THREADS"] = str(settings.workers.cpu_threads)
