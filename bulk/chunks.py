"""Which rows travel together: those of like length, so that a batch of them has little padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import orjson

from broker import JobFailure

#: Most rows of one message: many, so that the queue costs nothing beside the model, and few enough that several workers
#: have something to do with one window.
MAX_ROWS = 128
#: Bytes of a message's rows from which on no further one is added.
MAX_BYTES = 1 << 19


@dataclass(frozen=True, slots=True)
class Item:
    """One row on its way to the model. `payload` is its input as JSON; its size stands for what it costs.

    One that has a failure already keeps its place among the others, and goes nowhere.
    """

    number: int
    payload: bytes = b""
    failure: JobFailure | None = None

    @classmethod
    def of(cls, number: int, value: object) -> Item:
        """Raises `TypeError` for what JSON cannot tell."""
        return cls(number, orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one row: an output, or a failure."""

    number: int
    output: object = None
    failure: JobFailure | None = None
    #: As the model counts; 0 for one that did not run.
    tokens: int = 0


def chunks(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Cut items into messages, the shortest together first."""
    chunk: list[Item] = []
    size = 0
    for item in sorted(items, key=lambda item: len(item.payload)):
        if chunk and (len(chunk) == MAX_ROWS or size + len(item.payload) > MAX_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(item)
        size += len(item.payload)
    if chunk:
        yield chunk


def payload(chunk: Sequence[Item]) -> bytes:
    """The task's keyword arguments that carry these rows."""
    return b'{"inputs":[' + b",".join(item.payload for item in chunk) + b"]}"
