"""What must follow a job's end: messages, queued together with its result, that carry its caller's canvas on and tell
its webhook.

Canvas is Celery's word for what a caller may hang on a call: `link`, `link_error`, `chain`, `chord`. The message holds
all that `workers.callbacks` needs to go on from there; the two are kept or lost as one.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Self

import orjson

from broker import BadMessage, FollowUp, JobStatus, Webhook
from broker.keys import Keys
from broker.message import CALLBACKS, WEBHOOKS, Message, encode_callbacks
from broker.webhooks import Notification

_EMBEDDED = ("callbacks", "errbacks", "chain", "chord")
_FROM_HEADERS = ("root_id", "parent_id", "group", "group_index", "ignore_result")
_NAMESPACE = uuid.UUID("1f5f1d4e-3c5b-5d0a-9b56-5a1e9c0f7f0b")


@dataclass(frozen=True, slots=True)
class Outbox:
    """The lists that take what follows a job's end: what carries canvases on, and what webhooks are to be told."""

    callbacks: str
    webhooks: str

    @classmethod
    def of(cls, key_prefix: str) -> Self:
        keys = Keys(key_prefix)
        return cls(keys.queue(CALLBACKS).waiting[0], keys.queue(WEBHOOKS).waiting[0])

    def told(
        self, webhook: Webhook | None, status: JobStatus, job_id: str, model: str, at: float
    ) -> tuple[FollowUp, ...]:
        """What tells a job's webhook of its end, in the form of a settlement's follow-ups."""
        told = Notification.of(webhook, status, job_id, model, at)
        return () if told is None else (FollowUp(self.webhooks, told.encode()),)


@dataclass(frozen=True, slots=True)
class Canvas:
    """What hangs on one call. `called` are the ids of the tasks that its success will call, as far as they have one."""

    job_id: str
    #: JSON.
    request: bytes
    called: tuple[str, ...]

    @classmethod
    def of(cls, message: Message) -> Canvas | None:
        """None for a call that nothing hangs on. Raises `BadMessage` for what cannot be carried on."""
        embed = {name: message.embed.get(name) for name in _EMBEDDED}
        if not any(embed.values()):
            return None
        try:
            callbacks = [_identified(call, message.id, place) for place, call in enumerate(_listed(embed["callbacks"]))]
            chain = _listed(embed["chain"])
            called = [_id(call) for call in (*callbacks, *chain[-1:])]
            request: dict[str, object] = {name: message.headers.get(name) for name in _FROM_HEADERS}
            request |= embed | {"callbacks": callbacks, "id": message.id, "task": message.task}
            written = orjson.dumps(request)
        except (TypeError, ValueError, RecursionError) as error:
            reason = f"what hangs on the call (link, chain, chord) cannot be carried on: {error}"
            raise BadMessage(reason, job_id=message.id) from None
        return cls(message.id, written, tuple(one for one in called if one is not None))

    def follow_up(
        self, outbox: Outbox, lease_tag: bytes, state: str, result: object, traceback: str | None
    ) -> FollowUp:
        """The message that goes to the `outbox` when the job ends in Celery's state `state`.

        `result` is the job's output, or the stored form of its exception. Raises `TypeError` for an output that cannot
        be written as JSON.
        """
        ended = {"request": orjson.Fragment(self.request), "state": state, "result": result, "traceback": traceback}
        # A message that is served again after a crash has the same id, so what it calls has the same ids too.
        call_id = str(uuid.uuid5(_NAMESPACE, f"{self.job_id}:{lease_tag.decode()}"))
        body = orjson.dumps(ended, option=orjson.OPT_SERIALIZE_NUMPY)
        return FollowUp(outbox.callbacks, encode_callbacks(call_id, self.job_id, body))


def _listed(calls: object) -> list[object]:
    return calls if isinstance(calls, list) else []


def _identified(call: object, job_id: str, place: int) -> object:
    """The signature of a plain task with an id of its own; a nested canvas as it is, since Celery names its parts."""
    if not isinstance(call, dict) or call.get("subtask_type"):
        return call
    options = call.get("options") or {}
    if not isinstance(options, dict):
        raise ValueError("the options of a signature are no object")
    task_id = options.get("task_id") or str(uuid.uuid5(_NAMESPACE, f"{job_id}/{place}"))
    return {**call, "options": {**options, "task_id": task_id}}


def _id(call: object) -> str | None:
    match call:
        case {"options": {"task_id": str() as task_id}}:
            return task_id
    return None
