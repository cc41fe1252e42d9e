"""A job as the broker keeps it and as readers see it.

`NewJob` goes in, `JobState` comes out. Times are Unix seconds. JSON travels as bytes, parsed only
by who needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Self


def queue_name(model: str) -> str:
    """The Celery queue that a model's jobs are sent to."""
    return f"infer.{model}"


class Priority(IntEnum):
    """Named priorities, as the step of Celery's priority list that carries them (0 is served first)."""

    HIGH = 0
    NORMAL = 3
    LOW = 9

    @classmethod
    def of_list(cls, step: int) -> Priority:
        """The name for any of the four lists; a plain Celery producer may use steps that have none of their own."""
        if step <= cls.HIGH:
            return cls.HIGH
        return cls.NORMAL if step < cls.LOW else cls.LOW


class JobStatus(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class JobEvent(StrEnum):
    """The ends of a job that a webhook may be told of."""

    SUCCEEDED = "job.succeeded"
    FAILED = "job.failed"
    CANCELLED = "job.cancelled"
    EXPIRED = "job.expired"


class BatchEvent(StrEnum):
    """The ends of a batch that a webhook may be told of."""

    COMPLETED = "batch.completed"
    FAILED = "batch.failed"
    EXPIRED = "batch.expired"
    CANCELLED = "batch.cancelled"


Event = JobEvent | BatchEvent

# Calling an enum takes longer than all else that is done with a webhook for each job.
EVENTS: dict[str, Event] = {event.value: event for event in (*JobEvent, *BatchEvent)}


@dataclass(frozen=True, slots=True)
class Webhook:
    """Whom to tell of the end of a job or batch: an address, and the ends that it asked for."""

    url: str
    events: tuple[Event, ...] = tuple(EVENTS.values())
    #: Whose secret signs the calls.
    owner: str = ""
    #: Of the submit; found again in the log lines of the calls.
    request_id: str | None = None

    @classmethod
    def of_json(cls, value: object) -> Self | None:
        """None for null. Raises `ValueError` for what is no webhook."""
        match value:
            case None:
                return None
            case {
                "url": str(url),
                "events": list(events),
                "owner": str(owner),
                "request_id": (str() | None) as request_id,
            }:
                if set(events) <= EVENTS.keys():
                    return cls(url, tuple([EVENTS[event] for event in events]), owner, request_id)
        raise ValueError("the webhook is not as it should be")


@dataclass(slots=True)
class NewJob:
    """A job to submit. `payload` is the JSON object of the task's keyword arguments (`input` or `inputs`)."""

    id: str
    model: str
    queue: str
    payload: bytes
    priority: Priority
    created_at: float
    expires_at: float | None = None
    metadata: bytes = b"{}"
    many: bool = False
    request_id: str | None = None
    #: Whose job this is; owners share a queue fairly. "" for nobody in particular.
    owner: str = ""
    #: Owner and key; the same pair within its TTL stands for the same job.
    idempotency_key: tuple[str, str] | None = None
    #: Hash of the payload that the idempotency key or a chosen id stands for; holds no colon.
    fingerprint: str = ""
    #: The caller chose the id: it may be taken.
    chosen_id: bool = False
    #: What the caller may submit; None for no bounds.
    quota: Quota | None = None
    #: Whom to tell of its end.
    webhook: Webhook | None = None

    @property
    def counted_by(self) -> str:
        """Id of the access key whose in-flight quota counts this job; "" for none."""
        return self.quota.key_id if self.quota is not None and self.quota.max_in_flight is not None else ""


@dataclass(frozen=True, slots=True)
class Rate:
    """So many submits in so many seconds, and as many at once after a pause."""

    count: int
    period_s: float


@dataclass(frozen=True, slots=True)
class Quota:
    """What one access key may submit; None for no bound."""

    key_id: str
    rate: Rate | None = None
    #: Jobs that have not ended.
    max_in_flight: int | None = None


@dataclass(frozen=True, slots=True)
class RateState:
    """Where a caller stands: submits that would be taken now, and seconds until all of its rate is there again."""

    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job that the server holds: the submitted one, or the first one that it repeats."""

    id: str
    #: Unix seconds.
    created_at: float
    repeated: bool = False
    #: None for a caller without a rate.
    rate: RateState | None = None


@dataclass(frozen=True, slots=True)
class JobFailure:
    type: str
    message: str


@dataclass(frozen=True, slots=True)
class JobState:
    """One job at one moment. `result`, `metadata` and `timings` are JSON texts."""

    id: str
    model: str
    version: str | None
    status: JobStatus
    priority: Priority
    created_at: float | None
    #: When a job that has not begun ends by itself; None for one that has ended.
    expires_at: float | None
    started_at: float | None
    finished_at: float | None
    attempt: int
    many: bool
    result: bytes | None
    error: JobFailure | None
    metadata: bytes
    timings: bytes | None
    #: Of all rows together, as the model counts; None for one that did not run, or not yet.
    input_tokens: int | None = None
    #: Of each row of a job of many that ran.
    row_tokens: tuple[int, ...] | None = None
    #: Rows done and rows, of a job of many that runs; None for another.
    progress: tuple[int, int] | None = None
    #: Whose job it is; None where no record says so: a plain Celery client's.
    owner: str | None = None
    #: Its number among the messages of its queue and priority; None for one that is not known to wait.
    ticket: int | None = None
    #: Access key whose in-flight quota counts it, or "".
    counted_by: str = ""
    webhook: Webhook | None = None

    @property
    def ended(self) -> bool:
        return self.status not in (JobStatus.QUEUED, JobStatus.RUNNING)


@dataclass(frozen=True, slots=True)
class QueueDepth:
    queue: str
    priority: int
    depth: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One model in one worker; `state` is loading, ready or failed (then `error` says why)."""

    name: str
    version: str
    task: str | None
    precision: str
    state: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A live worker as it announced itself."""

    session: str
    hostname: str
    device: str
    pid: int
    models: tuple[ModelInfo, ...]
