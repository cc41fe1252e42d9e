"""What came lately: when rows were enqueued, how long they are, how urgent; never what stands in them."""

from __future__ import annotations

from dataclasses import dataclass

#: Rows that are remembered of each queue.
MAX_ROWS = 5000
#: Most rows of one note: a write must not hold the server up, nor push everything older out.
MAX_NOTED = 500
#: Seconds after which a queue that nothing came to is forgotten.
TTL_S = 86_400

assert MAX_NOTED < MAX_ROWS


@dataclass(frozen=True, slots=True)
class TrafficRow:
    """One row that came. `level` is the place of its priority step, 0 the most urgent."""

    enqueued_ms: int
    tokens: int
    level: int
    #: How many rows it stands for: when many come, only a sample of them is noted.
    stands_for: int = 1

    def encode(self) -> str:
        return f"{self.enqueued_ms}:{self.tokens}:{self.level}:{self.stands_for}"

    @classmethod
    def decode(cls, text: bytes) -> TrafficRow:
        enqueued_ms, tokens, level, stands_for = map(int, text.split(b":"))
        return cls(enqueued_ms, tokens, level, stands_for)
