"""From settings to what the drain and the model need."""

from __future__ import annotations

from batching import Limits
from configs import ModelSettings
from workers.loading import ModelLoader
from workers.outbox import Outbox


def test_all_that_bounds_a_batch_reaches_its_lane() -> None:
    settings = ModelSettings(
        handler="a:B",
        max_batch_size=16,
        max_batch_tokens=512,
        max_wait_ms=25,
        preferred_batch_sizes=[4, 8],
        adaptive_wait=True,
    )
    loader = ModelLoader.of("mine", settings, "cpu", tf32=True, outbox=Outbox("callbacks", "webhooks"))
    assert loader.kind.limits == Limits(16, 512, 0.025, preferred_sizes=(4, 8), adaptive_wait=True)
    assert (loader.spec.max_batch_size, loader.spec.max_batch_tokens) == (16, 512)
