"""What goes over the wire, as types: they check requests and describe answers in /docs."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from broker import BatchEvent, JobEvent, JobStatus, Priority
from broker.deliveries import DeliveryState

PriorityName = Literal["high", "normal", "low"]
PRIORITIES: dict[PriorityName, Priority] = {"high": Priority.HIGH, "normal": Priority.NORMAL, "low": Priority.LOW}
PRIORITY_NAMES: dict[Priority, PriorityName] = {priority: name for name, priority in PRIORITIES.items()}

#: Most rows in one job: enough for a page of texts, little enough to be leased as one.
MAX_ROWS = 4096


class WebhookAddress(BaseModel):
    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"url": "https://example.org/hooks"}]})

    url: str = Field(description="https, on a public address; called with POST, signed by Standard Webhooks 1.0.")


class WebhookRequest(WebhookAddress):
    """Whom to tell of the job's end."""

    events: list[JobEvent] = Field(
        default_factory=lambda: list(JobEvent), min_length=1, description="The ends to tell of; all without it."
    )


class JobRequest(BaseModel):
    """A job: one `input` or a list of `inputs`, for one model."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"model": "minilm", "input": "Sheaves of grain, bound and carried together."}],
            "oneOf": [
                {"required": ["input"]},
                {"required": ["inputs"], "properties": {"inputs": {"type": "array"}}},
            ],
        },
    )

    model: str = Field(description="A name from GET /v1/models.")
    input: Any = Field(
        default=None, description="One row; the job's answer is its `output`. An embedding takes a text."
    )
    inputs: list[Any] | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_ROWS,
        description="Many rows; the job's answer is `outputs`, one entry a row in their order.",
    )
    priority: PriorityName | None = Field(
        default=None, description="`normal` unless it is given, or the highest that the key allows below that."
    )
    timeout_s: float | None = Field(
        default=None,
        strict=True,
        gt=0,
        le=604_800,
        description="A job that has not begun after so many seconds expires.",
    )
    metadata: dict[str, Any] = Field(default_factory=dict, description="Returned with the job as it is.")
    webhook: WebhookRequest | None = Field(
        default=None, description="Called when the job has ended; without it the key's own, and nobody with null."
    )

    @model_validator(mode="after")
    def _one_of(self) -> JobRequest:
        given = self.model_fields_set
        if ("input" in given) == ("inputs" in given and self.inputs is not None):
            raise ValueError("give either `input` (one row) or `inputs` (a list of rows)")
        return self


class Urls(BaseModel):
    self: str
    cancel: str
    events: str


class Accepted(BaseModel):
    """A job that the broker holds. Read it at `urls.self`."""

    id: str
    object: Literal["job"]
    status: JobStatus
    model: str
    created_at: datetime
    urls: Urls


class ErrorOfRow(BaseModel):
    type: str
    message: str


class Timings(BaseModel):
    """Milliseconds, but for `batch_size`: the most rows that ran together with one of this job's."""

    queue_ms: float
    preprocess_ms: float
    inference_ms: float
    postprocess_ms: float
    batch_size: int


class Usage(BaseModel):
    """Tokens of all rows together, as the model counts them (after truncation); rows for a handler that counts none."""

    input_tokens: int


class Progress(BaseModel):
    """Rows of a job."""

    done: int
    total: int


class Job(BaseModel):
    """A job as every reader sees it."""

    id: str
    object: Literal["job"]
    model: str
    version: str | None = Field(description="Which version of the model ran it.")
    status: JobStatus
    priority: PriorityName
    created_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    attempt: int
    queue_position: int | None = Field(description="Of a job that waits: about how many are served before it, plus 1.")
    progress: Progress | None = Field(description="Of a job of many rows that runs.")
    output: Any = Field(description="For `input`: the answer.")
    outputs: list[Any] | None = Field(description="For `inputs`: `{output}` or `{error}` for each row.")
    error: ErrorOfRow | None
    metadata: dict[str, Any]
    urls: Urls
    timings: Timings | None
    usage: Usage | None = Field(description="Of a job that ran.")


class ListedJob(BaseModel):
    """A job without its answer."""

    id: str
    object: Literal["job"]
    model: str
    version: str | None
    status: JobStatus
    priority: PriorityName
    created_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    attempt: int
    error: ErrorOfRow | None
    metadata: dict[str, Any]
    urls: Urls
    timings: Timings | None
    usage: Usage | None = Field(description="Of a job that ran.")


class JobList(BaseModel):
    """One page of a caller's jobs, the newest first. It may be empty and have a next one, where a filter is narrow."""

    object: Literal["list"]
    data: list[ListedJob]
    next_cursor: str | None = Field(description="For the next page; null on the last.")


class DeliveryAttempt(BaseModel):
    """One call; `status` is null where there was no answer, `error` where it was a success."""

    at: datetime
    duration_ms: float
    status: int | None
    error: str | None = Field(
        description="In words of this service. What the receiver or the system said is shown to operators alone."
    )


class DeliveryView(BaseModel):
    """One event's way to the job's webhook. `id` is its `webhook-id`."""

    id: str
    object: Literal["delivery"]
    event: JobEvent | BatchEvent
    url: str
    state: DeliveryState
    created_at: datetime
    next_attempt_at: datetime | None
    put_off: str | None = Field(
        description="Why a delivery that was due is not made before `next_attempt_at`, in words; counts as no attempt."
    )
    attempts: list[DeliveryAttempt]


class DeliveryList(BaseModel):
    object: Literal["list"]
    data: list[DeliveryView]


class ModelView(BaseModel):
    """One model of this service; `id`, `object`, `created` and `owned_by` are what OpenAI's clients look for."""

    id: str
    name: str
    object: Literal["model"]
    created: int = Field(description="Unix seconds of this process' start.")
    owned_by: Literal["sheaf"]
    version: str
    task: str | None
    queue: str = Field(description="The Celery queue that its jobs are sent to.")
    state: Literal["ready", "loading", "failed", "absent"] = Field(
        description="`ready` when at least one worker serves it; `absent` when no worker has told of it."
    )
    workers: int = Field(description="How many workers serve it.")
    precision: str
    error: str | None
    max_batch_size: int
    max_batch_tokens: int
    max_wait_ms: float
    preferred_batch_sizes: list[int]
    adaptive_wait: bool
    input_schema: dict[str, Any] = Field(description="JSON Schema of one row; empty where the handler checks it.")


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelView]


class Readiness(BaseModel):
    status: Literal["ready"]
    models: dict[str, str]


class ProblemBody(BaseModel):
    """RFC 9457. `type` is stable; `detail` is for people."""

    type: str
    title: str
    status: int
    detail: str
    request_id: str
    errors: list[dict[str, str]] | None = None
