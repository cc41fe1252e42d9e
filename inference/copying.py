"""Copies to a GPU on a stream of their own, so that the next batch's run beside this one's computation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class CopyStream:
    """The side stream of one CUDA device. Tensors that are made in `copying` may be used after `wait`.

    They must live until the batch that uses them has ended: their memory belongs to this stream, which does not know
    of the batch's own.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch types it not

    @contextmanager
    def copying(self) -> Iterator[torch.cuda.Event]:
        """Copies and computations within run on the side stream; yields what tells when they have ended."""
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch types it not
        with torch.cuda.stream(self._stream):
            yield done
            done.record(self._stream)

    def wait(self, done: torch.cuda.Event) -> None:
        """Whatever is started from now on begins after `done`; the caller itself does not wait."""
        torch.cuda.current_stream(self._device).wait_event(done)
