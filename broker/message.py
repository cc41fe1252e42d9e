"""Celery's message format (protocol 2) on a Redis list, written and read without Celery.

Source: Celery's "Message Protocol" page, version 2; the envelope is kombu's virtual transport's.
"""

from __future__ import annotations

import binascii
import socket
from base64 import b64encode
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

import orjson

from broker.errors import BadMessage
from broker.jobs import NewJob, Webhook

#: The task that every model queue carries.
TASK_NAME = "sheaf.infer"
#: The task, and its queue, that carries on where a job of somebody's canvas ended: link, chain, chord.
CALLBACKS = "sheaf.callbacks"
#: The task, and its queue, that runs a batch of requests from a file; see `broker.batches`.
BATCHES = "sheaf.batches"
#: The queue of what webhooks are to be told; see `broker.webhooks`.
WEBHOOKS = "sheaf.webhooks"

#: The last second of the year 9999.
LATEST = 253_402_300_799.0

_EMBED = b',{"callbacks":null,"errbacks":null,"chain":null,"chord":null}]'
_ORIGIN = f"sheaf@{socket.gethostname()}"


@dataclass(slots=True, eq=False)
class Message:
    """A queued message, taken apart. `args` and `kwargs` are what the producer passed to the task."""

    id: str
    task: str
    args: list[object]
    kwargs: dict[str, object]
    #: What follows the call: `callbacks`, `errbacks`, `chain`, `chord`.
    embed: dict[str, object]
    headers: dict[str, object]
    #: Unix seconds; None when the producer's message does not say (plain Celery producers' do not).
    enqueued_at: float | None
    #: Unix seconds; None without.
    expires_at: float | None
    #: Unix seconds of a delayed message's time; None without.
    eta: float | None
    #: Celery's `ignore_result`.
    ignore_result: bool
    #: True for jobs submitted through `submit`: they have a record.
    recorded: bool
    request_id: str | None
    #: Whose job this is; "" for nobody in particular. Plain Celery producers say it with the header `sheaf_owner`.
    owner: str
    #: Access key whose in-flight quota counts it, or "".
    counted_by: str = ""
    #: Whom to tell of the job's end.
    webhook: Webhook | None = None


def encode(job: NewJob) -> bytes:
    """The message of a new job, as `app.send_task` would have put it on the list, with our own header `sheaf`."""
    return _encode(
        TASK_NAME,
        job.id,
        job.queue,
        job.payload,
        expires=None if job.expires_at is None else datetime.fromtimestamp(job.expires_at, UTC).isoformat(),
        priority=int(job.priority),
        own={
            "enqueued_at": job.created_at,
            "request_id": job.request_id,
            "owner": job.owner,
            "counted_by": job.counted_by,
            **({} if job.webhook is None else {"webhook": job.webhook}),
        },
    )


def encode_callbacks(call_id: str, job_id: str, ended: bytes) -> bytes:
    """The message, for the queue `CALLBACKS`, that carries on where job `job_id` left off; `ended` is JSON."""
    return _encode(CALLBACKS, call_id, CALLBACKS, b'{"input":' + ended + b"}", parent_id=job_id)


def encode_batch(batch_id: str, created_at: float, request_id: str | None, owner: str) -> bytes:
    """The message, for the queue `BATCHES`, that has a batch run; what it is lies in its record."""
    own: dict[str, object] = {"enqueued_at": created_at, "request_id": request_id, "owner": owner, "counted_by": ""}
    return _encode(BATCHES, batch_id, BATCHES, orjson.dumps({"batch_id": batch_id}), own=own)


def _encode(
    task: str,
    task_id: str,
    queue: str,
    kwargs: bytes,
    *,
    expires: str | None = None,
    parent_id: str | None = None,
    priority: int = 0,
    own: dict[str, object] | None = None,
) -> bytes:
    return orjson.dumps(
        {
            "body": b64encode(b"[[]," + kwargs + _EMBED).decode(),
            "content-encoding": "utf-8",
            "content-type": "application/json",
            "headers": {
                "lang": "py",
                "task": task,
                "id": task_id,
                "shadow": None,
                "eta": None,
                "expires": expires,
                "group": None,
                "group_index": None,
                "retries": 0,
                "timelimit": [None, None],
                "root_id": parent_id or task_id,
                "parent_id": parent_id,
                # The rows themselves stay out of events and of Flower.
                "argsrepr": "()",
                "kwargsrepr": "{...}",
                "origin": _ORIGIN,
                "ignore_result": False,
                "sheaf": own,
            },
            "properties": {
                "correlation_id": task_id,
                "reply_to": "",
                "delivery_mode": 2,
                "delivery_info": {"exchange": "", "routing_key": queue},
                "priority": priority,
                "body_encoding": "base64",
                "delivery_tag": task_id,
            },
        }
    )


def decode(raw: bytes, max_bytes: int | None = None) -> Message:
    """Take a queued message apart. Raises `BadMessage` with a reason, and with the job's id where one can be read.

    Of a message over `max_bytes` only the envelope is read, for the id.
    """
    oversized = max_bytes is not None and len(raw) > max_bytes
    try:
        envelope = orjson.loads(raw)
        headers = envelope["headers"]
        properties = envelope["properties"]
        job_id = headers["id"]
        task = headers["task"]
    except orjson.JSONDecodeError as error:
        raise BadMessage(f"the message is not JSON: {error}") from None
    except (KeyError, TypeError):
        if oversized:
            raise BadMessage(_over(raw, max_bytes)) from None
        raise _without_headers(envelope) from None
    if not isinstance(job_id, str) or not job_id:
        raise BadMessage("the header `id` is not a string")
    if oversized:
        raise BadMessage(_over(raw, max_bytes), job_id=job_id)
    args, kwargs, embed = _body(envelope, properties, job_id)
    try:
        own = _own_header(headers.get("sheaf"))
        return Message(
            id=job_id,
            task=task,
            args=args,
            kwargs=kwargs,
            embed=embed,
            headers=headers,
            enqueued_at=own.enqueued_at if own else None,
            expires_at=_timestamp(headers.get("expires")),
            eta=_timestamp(headers.get("eta")),
            ignore_result=bool(headers.get("ignore_result")),
            recorded=own is not None,
            request_id=own.request_id if own else None,
            owner=own.owner if own else _name(headers.get("sheaf_owner"), "owner", "sheaf_owner"),
            counted_by=own.counted_by if own else "",
            webhook=own.webhook if own else None,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadMessage(f"a header cannot be read: {error!r}", job_id=job_id) from None


def salvaged_webhook(raw: bytes) -> Webhook | None:
    """Whom a message that `decode` refuses wants told of its end, as far as that can be read."""
    try:
        return Webhook.of_json(orjson.loads(raw)["headers"]["sheaf"].get("webhook"))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _over(raw: bytes, max_bytes: int | None) -> str:
    return f"the message has {len(raw)} bytes, {max_bytes} are read at most (broker.max_message_bytes)"


def _without_headers(envelope: object) -> BadMessage:
    """For a message without the headers of protocol 2. Protocol 1 keeps the id in the body."""
    match envelope:
        case {"content-type": "application/json", "body": str(body), "properties": dict(properties)}:
            with suppress(ValueError):
                match orjson.loads(_text(body, properties)):
                    case {"task": str(), "id": str(job_id)} if job_id:
                        reason = "the message is of Celery's protocol 1, only 2 is read: unset task_protocol"
                        return BadMessage(reason, job_id=job_id)
    return BadMessage("the message is not of Celery's protocol 2: it lacks properties, or the headers `id` and `task`")


def _text(body: str, properties: dict[str, object]) -> bytes | str:
    return binascii.a2b_base64(body, strict_mode=True) if properties.get("body_encoding") == "base64" else body


def _body(
    envelope: dict[str, object], properties: object, job_id: str
) -> tuple[list[object], dict[str, object], dict[str, object]]:
    content_type = envelope.get("content-type")
    if content_type != "application/json":
        raise BadMessage(f"content type {content_type!r} is refused, only application/json is read", job_id=job_id)
    match envelope.get("headers"):
        case {"compression": str(compression)} if compression:
            raise BadMessage(f"the body is compressed ({compression}): unset task_compression", job_id=job_id)
    body = envelope.get("body")
    if not isinstance(body, str) or not isinstance(properties, dict):
        raise BadMessage("the message has no body or no properties", job_id=job_id)
    try:
        args, kwargs, embed = orjson.loads(_text(body, properties))
    except binascii.Error as error:
        raise BadMessage(f"the body is not base64: {error}", job_id=job_id) from None
    except orjson.JSONDecodeError as error:
        raise BadMessage(f"the body is not JSON: {error}", job_id=job_id) from None
    except (TypeError, ValueError):
        raise BadMessage("the body is not [args, kwargs, embed]", job_id=job_id) from None
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise BadMessage("the body's args are not a list or its kwargs not an object", job_id=job_id)
    return args, kwargs, embed if isinstance(embed, dict) else {}


@dataclass(frozen=True, slots=True)
class _Own:
    """The header `sheaf`."""

    enqueued_at: float
    request_id: str | None
    owner: str
    counted_by: str
    webhook: Webhook | None


def _own_header(value: object) -> _Own | None:
    """Of what else it says, old messages may say nothing."""
    if value is None:
        return None
    match value:
        case {"enqueued_at": (int() | float()) as moment, "request_id": (str() | None) as request_id, **others}:
            owner, counted_by = (_name(others.get(field), field, "sheaf") for field in ("owner", "counted_by"))
            webhook = Webhook.of_json(others.get("webhook"))
            return _Own(_plausible(moment), request_id, owner, counted_by, webhook)
    raise ValueError("the header `sheaf` is not as it should be")


def _name(value: object, field: str, header: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"the {field} in the header `{header}` is {value!r:.80}, not a string")
    return value


def _plausible(moment: float) -> float:
    """Unix seconds within what the calendar can write."""
    if not 0 <= moment <= LATEST:
        raise ValueError(f"{moment} is no time")
    return float(moment)


def _timestamp(value: object) -> float | None:
    """Celery writes times as ISO 8601 text, without a zone when it means UTC; `expires` may be a number of seconds."""
    if value is None:
        return None
    if isinstance(value, (int, float)):
        return _clamped(value)
    moment = datetime.fromisoformat(str(value))
    return _clamped((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())


def _clamped(moment: float) -> float:
    """A time of long ago or of no calendar year says \"at once\" or \"never\" as well as any."""
    if not abs(moment) <= 10 * LATEST:
        raise ValueError(f"{moment} is no time")
    return min(max(float(moment), 0.0), LATEST)
