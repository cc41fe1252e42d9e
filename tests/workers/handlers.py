"""Handlers of the tests' own, as a user would write them."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

import numpy as np

from inference import Encoded, Handler, ModelSpec, give_way


class Sleeper(Handler):
    """Sleeps, on the device's thread, for as many seconds as the longest row says."""

    uses_torch = False

    def load(self, spec: ModelSpec, device: str, dtype: object) -> None:
        pass

    def preprocess(self, rows: Sequence[object]) -> list[Encoded]:
        return [Encoded(float(str(row)), tokens=1) for row in rows]

    def infer(self, batch: Sequence[Encoded]) -> object:
        seconds = [float(str(row.data)) for row in batch]
        time.sleep(max(0.0, *seconds))
        return seconds

    def postprocess(self, raw: object) -> list[object]:
        assert isinstance(raw, list)
        return raw


class Layered(Sleeper):
    """Sleeps for as long in tenths of a second, and gives way before each. A negative row fails."""

    def infer(self, batch: Sequence[Encoded]) -> object:
        seconds = [float(str(row.data)) for row in batch]
        if min(seconds) < 0:
            raise ValueError("a negative row")
        for _ in range(round(10 * max(seconds))):
            give_way()
            time.sleep(0.1)
        return seconds


class Padded(Sleeper):
    """Takes a text of as many tokens as characters; computes for 0.1 ms a padded token, as a model does that pads.

    Answers how many rows and how many padded tokens a row's batch had.
    """

    def preprocess(self, rows: Sequence[object]) -> list[Encoded]:
        return [Encoded(row, tokens=len(str(row))) for row in rows]

    def infer(self, batch: Sequence[Encoded]) -> object:
        padded = len(batch) * max(row.tokens for row in batch)
        time.sleep(0.0001 * padded)
        return [[len(batch), padded]] * len(batch)


class Picky(Sleeper):
    """Refuses the row -1 on the device; answers one row too few when it sees the row 13."""

    def infer(self, batch: Sequence[Encoded]) -> object:
        numbers = [float(str(row.data)) for row in batch]
        if -1.0 in numbers:
            raise ArithmeticError("minus one cannot be served")
        return numbers[:-1] if 13.0 in numbers else numbers


class Killer(Sleeper):
    """Kills its process when it sees the row -9, as a crash in native code would."""

    def infer(self, batch: Sequence[Encoded]) -> object:
        seconds = super().infer(batch)
        if -9.0 in [float(str(row.data)) for row in batch]:
            os.kill(os.getpid(), signal.SIGKILL)
        return seconds


class Freezer(Sleeper):
    """Never comes back from the step that a row names."""

    def preprocess(self, rows: Sequence[object]) -> list[Encoded]:
        if "preprocess" in rows:
            threading.Event().wait()
        return [Encoded(row) for row in rows]

    def infer(self, batch: Sequence[Encoded]) -> object:
        rows = [row.data for row in batch]
        if "infer" in rows:
            threading.Event().wait()
        return rows

    def postprocess(self, raw: object) -> list[object]:
        assert isinstance(raw, list)
        if "postprocess" in raw:
            threading.Event().wait()
        return raw


class Wild(Sleeper):
    """Goes wrong in every way that a row names."""

    def preprocess(self, rows: Sequence[object]) -> list[Encoded]:
        if "exit in preprocess" in rows:
            sys.exit(3)
        return ["not encoded"] if "no Encoded" in rows else [Encoded(row, tokens=0) for row in rows]  # type: ignore[list-item]  # on purpose

    def infer(self, batch: Sequence[Encoded]) -> object:
        rows = [row.data for row in batch]
        if "exit in infer" in rows:
            sys.exit(3)
        if "interrupt" in rows:
            raise KeyboardInterrupt
        if "surrogate" in rows:
            raise ValueError("\ud800 in a file name")
        if "no text" in rows:
            raise NoText
        if "unpicklable" in rows:
            raise Unpicklable(threading.Lock())
        return rows

    def postprocess(self, raw: object) -> list[object]:
        assert isinstance(raw, list)
        special = {"object": object(), "nan": float("nan"), "array of nan": np.array([1.0, np.nan])}
        special["every other"] = np.arange(6.0, dtype=np.float32)[::2]
        return [special.get(row, row) for row in raw]


class Hungry(Sleeper):
    """Counts words; has memory for so many padded tokens as the option `memory` says, and takes its time for each."""

    def load(self, spec: ModelSpec, device: str, dtype: object) -> None:
        self._memory = int(str(spec.options["memory"]))
        self._raises = str(spec.options.get("raises", "torch"))

    def preprocess(self, rows: Sequence[object]) -> list[Encoded]:
        return [Encoded(row, tokens=len(str(row).split())) for row in rows]

    def infer(self, batch: Sequence[Encoded]) -> object:
        padded = len(batch) * max(row.tokens for row in batch)
        if padded > self._memory:
            if self._raises == "torch":
                import torch

                raise torch.OutOfMemoryError("CUDA out of memory")
            raise MemoryError
        time.sleep(0.002 + 0.000_01 * padded)
        return [row.tokens for row in batch]


class Unpicklable(Exception):
    """What it holds can be neither pickled nor written as JSON."""

    def __str__(self) -> str:
        return "it holds a lock"


class NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")
