"""What a webhook is to be told of: the messages of the queue `sheaf.webhooks`.

One is queued together with the result that it tells of, or not at all. It holds no output: what is sent is made of the
stored job when it is sent first, so that a webhook costs the job's way next to nothing.
"""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import dataclass
from typing import Self

import orjson

from broker.errors import BadMessage
from broker.jobs import EVENTS, Event, JobEvent, JobState, JobStatus, Webhook

_NAMESPACE = uuid.UUID("6d0f5c0a-52fd-5b43-8a3c-0b1a5e2f7d11").bytes


@dataclass(frozen=True, slots=True)
class Notification:
    """One event that is to be told to one address."""

    event: Event
    #: Of the job, or of the batch.
    job_id: str
    model: str
    url: str
    owner: str
    request_id: str | None
    #: When it happened, Unix seconds.
    at: float
    #: Counts how often people asked for it to be sent again.
    round: int = 0
    #: When that was; None for the first round, which began with the event.
    asked_at: float | None = None

    @property
    def began_at(self) -> float:
        """When its round began, Unix seconds."""
        return self.at if self.asked_at is None else self.asked_at

    @property
    def id(self) -> str:
        """The `webhook-id`: the same however often it is sent."""
        return delivery_id(self.job_id, self.event)

    @classmethod
    def of(cls, webhook: Webhook | None, status: JobStatus, job_id: str, model: str, at: float) -> Self | None:
        """What is to be told of a job's end; None where nobody asked for it."""
        event = JobEvent(f"job.{status}")
        if webhook is None or event not in webhook.events:
            return None
        return cls(event, job_id, model, webhook.url, webhook.owner, webhook.request_id, at)

    def encode(self) -> bytes:
        return orjson.dumps(self)

    @classmethod
    def decode(cls, raw: bytes) -> Self:
        """Raises `BadMessage`."""
        try:
            fields = orjson.loads(raw)
            told = cls(**(fields | {"event": EVENTS[fields["event"]]}))
            told._check()
            return told
        except (KeyError, TypeError, ValueError) as error:
            raise BadMessage(f"this is nothing that a webhook could be told: {error!r}") from None

    def _check(self) -> None:
        """Raises `TypeError` where a field is of another kind than its readers rely on."""
        texts = (self.job_id, self.model, self.url, self.owner)
        numbers = (self.at, self.began_at, self.round)
        if not all(isinstance(it, str) for it in texts) or not all(isinstance(it, (int, float)) for it in numbers):
            raise TypeError("a field is not of its type")


def delivery_id(job_id: str, event: Event) -> str:
    """A UUID of version 5, made here: `uuid.uuid5` takes four times as long, and a flood needs very many."""
    digest = hashlib.sha1(_NAMESPACE + f"{job_id}/{event}".encode(), usedforsecurity=False).hexdigest()
    variant = "89ab"[int(digest[16], 16) & 3]
    return f"msg_{digest[:12]}5{digest[13:16]}{variant}{digest[17:32]}"


def told_of_drop(state: JobState | None, status: JobStatus, at: float) -> bytes:
    """The message for the webhook of a job that is dropped; empty where there is none."""
    if state is None or (told := Notification.of(state.webhook, status, state.id, state.model, at)) is None:
        return b""
    return told.encode()
