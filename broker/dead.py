"""Dead letters: messages that could not be run, or whose worker was lost too often. Only people take them away."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Self, cast

import orjson

from broker.connect import connect
from broker.faults import translated
from broker.keys import PRIORITY_STEPS, Keys
from broker.lua import script_text

#: Letters that one command reads.
AT_A_TIME = 16


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One message and why it is here. `number` names it within its queue."""

    number: str
    queue: str
    reason: str
    #: None where the message was too broken to tell.
    job_id: str | None
    #: The step of the priority list that it came from.
    priority: int
    attempts: int
    #: Unix seconds.
    buried_at: float
    message: bytes
    #: As it stands in the list.
    raw: bytes

    @classmethod
    def encode(
        cls,
        *,
        number: str,
        queue: str,
        reason: str,
        job_id: str | None,
        priority: int,
        attempts: int,
        buried_at: float,
        message: bytes,
    ) -> bytes:
        """The stored form. Messages that are no text are kept too: every byte is the code point of the same number."""
        return orjson.dumps(
            {
                "number": number,
                "queue": queue,
                "reason": reason,
                "job_id": job_id,
                "priority": priority,
                "attempts": attempts,
                "buried_at": buried_at,
                "message": message.decode("latin-1"),
            }
        )

    @classmethod
    def decode(cls, raw: bytes) -> Self:
        fields: dict[str, Any] = orjson.loads(raw)
        return cls(**(fields | {"message": fields["message"].encode("latin-1")}), raw=raw)


class DeadLetters:
    """The dead letters of all queues, for people. Raises `BrokerUnavailable`."""

    def __init__(self, url: str, *, key_prefix: str = "", read_timeout_s: float = 10.0) -> None:
        self._keys = Keys(key_prefix)
        self._client = connect(url, read_timeout_s)
        self._revive = self._client.register_script(script_text("revive"))

    def count(self, queue: str) -> int:
        with translated():
            return self._client.llen(self._keys.queue(queue).dead)

    def newest(self, queue: str, limit: int | None = None) -> Iterator[DeadLetter]:
        """At most `limit` letters, the newest first. They may be large, so only a few are read at a time."""
        name = self._keys.queue(queue).dead
        for first in count(0, AT_A_TIME):
            wanted = AT_A_TIME if limit is None else min(AT_A_TIME, limit - first)
            with translated():
                raws = cast("list[bytes]", self._client.lrange(name, first, first + wanted - 1)) if wanted > 0 else []
            yield from map(DeadLetter.decode, raws)
            if len(raws) < AT_A_TIME:
                return

    def revive(self, letter: DeadLetter) -> bool:
        """Let the letter's message run again. False when somebody else has taken the letter."""
        queue = self._keys.queue(letter.queue)
        waiting = queue.waiting[PRIORITY_STEPS.index(letter.priority)]
        with translated():
            revived = self._revive(
                keys=[queue.dead, waiting, self._keys.result(letter.job_id or ""), self._keys.revoked],
                args=[letter.raw, letter.message, letter.job_id or ""],
            )
        return bool(revived)

    def purge(self, letters: Sequence[DeadLetter]) -> int:
        """Throw letters away; returns how many were still there. Stored failures stay."""
        with translated(), self._client.pipeline(transaction=False) as pipe:
            for letter in letters:
                pipe.lrem(self._keys.queue(letter.queue).dead, 1, cast("str", letter.raw))
            return sum(pipe.execute())

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
