"""The bare model in a process of its own: the least that any worker can need for these batches.

Reads `{"texts": [...], "batches": [[number of a text, ...], ...]}` from standard input; the texts are tokenized before
the clock starts. Writes the moments at which the batches were finished, in seconds on a clock of its own.
"""

from __future__ import annotations

import json
import sys
import time

from configs.layers import load_settings
from inference import Encoded, Model, ModelSpec

MODEL = "minilm"


def main() -> None:
    given = json.load(sys.stdin)
    settings = load_settings().settings.models[MODEL]
    spec = ModelSpec(MODEL, task=settings.task, source=settings.source, precision=settings.precision)
    model = Model.load(spec, "cpu")
    rows = [row for row in model.encode(given["texts"]) if isinstance(row, Encoded)]
    moments: list[float] = []
    for batch in given["batches"]:
        model.finish(model.infer([rows[number] for number in batch]))
        moments.append(time.monotonic())
    json.dump({"moments": moments, "tokens": [row.tokens for row in rows]}, sys.stdout)


if __name__ == "__main__":
    main()
