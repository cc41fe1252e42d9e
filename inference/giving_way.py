"""Where a batch that nobody waits for stands aside, in the middle of its computation, for rows that somebody waits for.

A device runs one batch at a time, so a row that comes waits for the one that runs. A handler whose `infer` takes long
calls `give_way` between its parts (layers, decoding steps): whoever runs the batch may have another one run there, on
the same thread, before it goes on. Nothing is computed twice, and a row waits for a part, not for a batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

_thread = threading.local()


def give_way() -> None:
    """Let more urgent rows be run now, if there are any. Called by handlers on the thread of `infer`; never raises.

    Nothing of the batch may depend on what the device or its model held before the call: `infer` may have been called
    with other rows meanwhile.
    """
    stand_aside: Callable[[], None] | None = getattr(_thread, "stand_aside", None)
    if stand_aside is not None:
        stand_aside()


@contextmanager
def giving_way(stand_aside: Callable[[], None] | None) -> Iterator[None]:
    """Have `stand_aside` called where what this thread runs gives way; None when it is to give way to nobody."""
    before = getattr(_thread, "stand_aside", None)
    _thread.stand_aside = stand_aside
    try:
        yield
    finally:
        _thread.stand_aside = before


def give_way_between_layers(model: nn.Module) -> int:
    """Have a model give way before each of its layers; returns how many there are.

    Layers are the members of its outermost module lists, which is where transformers keeps them. On CUDA they are
    queued ahead of their computation: then a batch gives way while it is queued, and not after that.
    """
    layers = _layers(model)
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: give_way())
    return len(layers)


def _layers(module: nn.Module) -> list[nn.Module]:
    from torch.nn import ModuleList

    found: list[nn.Module] = []
    for child in module.children():
        found += child if isinstance(child, ModuleList) else _layers(child)
    return found
