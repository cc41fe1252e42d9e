"""Every sort of problem that callers can meet: the one table of their types, statuses, causes and cures.

docs/PROBLEMS.md is this table as a page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from broker.errors import (
    BadMessage,
    BatchEnded,
    BrokerError,
    BrokerUnavailable,
    EmbeddedServerError,
    FileQuota,
    IdempotencyConflict,
    IdTaken,
    JobEnded,
    LeaseLost,
    QueueFull,
    TooFast,
    TooManyBatches,
    TooManyFiles,
    TooManyOpen,
    UnknownBatch,
    UnknownFile,
    UnsupportedServer,
)

TYPE_PREFIX = "urn:sheaf:error:"


@dataclass(frozen=True, slots=True)
class Kind:
    """One sort of problem: its HTTP status, the end of its `type`, its title, and what to do about it."""

    status: int
    slug: str
    title: str
    cure: str

    @property
    def type(self) -> str:
        return TYPE_PREFIX + self.slug


NOT_JSON = Kind(400, "not-json", "The body is not JSON", "Mend the body: `detail` says where reading it failed.")
BAD_REQUEST = Kind(400, "bad-request", "The request cannot be read", "Mend what `detail` names.")
UNAUTHENTICATED = Kind(
    401,
    "unauthenticated",
    "The request needs a key",
    "Send `Authorization: Bearer KEY`; `sheaf keys create` makes keys.",
)
FORBIDDEN = Kind(403, "missing-scope", "The key may not do this", "Use a key with the scope that `detail` names.")
PRIORITY_FORBIDDEN = Kind(
    403,
    "priority-forbidden",
    "The key may not submit with this priority",
    "Submit with a priority that `detail` names.",
)
CROSS_ORIGIN = Kind(
    403,
    "cross-origin",
    "A page of another origin may change nothing",
    "Send it from a program, or from a page that this server itself has served; or create a key.",
)
FILE_QUOTA = Kind(
    403,
    "file-quota",
    "The owner's files take all the room that they may",
    "Delete files that you need no more; `detail` says how much room there is.",
)
NOT_FOUND = Kind(404, "not-found", "There is no such page", "See /docs for the paths that there are.")
UNKNOWN_MODEL = Kind(404, "unknown-model", "There is no such model", "Name one that `GET /v1/models` lists.")
UNKNOWN_JOB = Kind(
    404,
    "unknown-job",
    "There is no such job",
    "Check the id and the key: results are kept for `api.result_ttl_s`, and jobs of other callers are not told of.",
)
UNKNOWN_BATCH = Kind(
    404,
    "unknown-batch",
    "There is no such batch",
    "Check the id and the key: batches of other callers are not told of.",
)
UNKNOWN_FILE = Kind(
    404,
    "unknown-file",
    "There is no such file",
    "Check the id and the key: files are kept until they expire or are deleted, and those of others are not told of.",
)
METHOD_NOT_ALLOWED = Kind(
    405, "method-not-allowed", "The page does not take this method", "Use one that the header `Allow` names."
)
JOB_ENDED = Kind(409, "job-ended", "The job has ended", "Nothing: it cannot be cancelled any more.")
BATCH_ENDED = Kind(409, "batch-ended", "The batch has ended", "Nothing: it cannot be cancelled any more.")
FILE_IN_USE = Kind(
    409, "file-in-use", "A batch reads the file", "Wait until the batch has ended, or cancel it: `detail` names it."
)
ID_TAKEN = Kind(409, "id-taken", "The id is another job's", "Choose a new UUID, or send the very same payload again.")
REQUEST_TIMEOUT = Kind(
    408,
    "request-timeout",
    "The request did not come in time",
    "Send it at once, and on a new connection; `detail` names the limit.",
)
PAYLOAD_TOO_LARGE = Kind(
    413, "payload-too-large", "The body is too large", "Send fewer rows at a time, or raise `api.max_payload_bytes`."
)
FILE_TOO_LARGE = Kind(413, "file-too-large", "The file is too large", "Split the file, or raise `files.max_bytes`.")
TARGET_TOO_LONG = Kind(414, "target-too-long", "The request's target is too long", "Send a shorter path and query.")
MEDIA_TYPE_REFUSED = Kind(
    415,
    "unsupported-media-type",
    "A body of this type is not taken",
    "Send `Content-Type: application/json`, or for a file multipart/form-data.",
)
MISDIRECTED = Kind(
    421,
    "misdirected",
    "The server does not answer to this name",
    "Without keys call it by its address, such as 127.0.0.1; or create a key.",
)
EXPECTATION_REFUSED = Kind(
    417, "expectation-refused", "The expectation cannot be met", "Send no `Expect`, or `Expect: 100-continue`."
)
INVALID_REQUEST = Kind(
    422,
    "invalid-request",
    "The request is not as it should be",
    "Mend the fields that `errors` names, each with its path.",
)
IDEMPOTENCY_CONFLICT = Kind(
    422,
    "idempotency-conflict",
    "The idempotency key belongs to another request",
    "Use a new key for a new request; repeat one with the same path, byte by byte.",
)
TOO_FAST = Kind(
    429, "too-fast", "The key's rate is used up", "Wait for `Retry-After` seconds; `RateLimit` tells ahead."
)
TOO_MANY_OPEN = Kind(
    429, "too-many-open", "Too many jobs of the key have not ended", "Wait for some of them, or cancel them."
)
TOO_MANY_BATCHES = Kind(
    429,
    "too-many-batches",
    "Too many batches of the owner have not ended",
    "Wait for one of them, cancel one, or raise `batches.max_open`.",
)
INTERNAL = Kind(
    500, "internal", "The server failed", "Tell whoever runs it the `request_id`: the log says under it what happened."
)
HEAD_TOO_LARGE = Kind(
    431,
    "head-too-large",
    "The request's head is too large",
    "Send fewer and shorter headers; `detail` names the bounds.",
)
TOO_MANY_CONNECTIONS = Kind(
    503,
    "too-many-connections",
    "The server has too many connections",
    "Keep connections open and use them again, or raise `api.max_connections` or `api.workers`.",
)
JOB_FAILED = Kind(
    502, "job-failed", "The model could not answer", "See `detail`, which is what a job's `error` would say."
)
NOT_IN_TIME = Kind(
    504,
    "not-in-time",
    "The answer was not there in time",
    "Send fewer texts at a time, or submit a job to `/v1/jobs`, which is kept.",
)
STORAGE_FULL = Kind(
    507,
    "storage-full",
    "There is no room for the file",
    "Tell whoever runs it: the storage of files (`files.storage`) is full.",
)
STORAGE_UNAVAILABLE = Kind(
    503,
    "storage-unavailable",
    "The storage of files does not serve now",
    "Try again later; the log says under the `request_id` what is wrong with `files.storage`.",
)
NOT_READY = Kind(503, "not-ready", "The service is not ready", "Wait: `detail` says for which models.")
MODEL_FAILED = Kind(
    503, "model-failed", "The model could not be loaded", "Tell whoever runs it: `detail` says why it did not load."
)
BROKER_UNAVAILABLE = Kind(
    503,
    "broker-unavailable",
    "The broker cannot take or give jobs now",
    "Try again after `Retry-After` seconds; the log says the cause, under the `request_id`.",
)
QUEUE_FULL = Kind(
    503,
    "queue-full",
    "The model's queue is full",
    "Try again after `Retry-After` seconds: by then, as fast as the queue is drained now, there is room.",
)
UNSUPPORTED_BROKER = Kind(
    503,
    "unsupported-broker",
    "The broker's version is too old",
    "Run a newer Valkey or Redis; the log says which, under the `request_id`.",
)

#: What each error of the broker is to a caller.
BROKER_PROBLEMS: Mapping[type[BrokerError], Kind] = {
    BrokerUnavailable: BROKER_UNAVAILABLE,
    QueueFull: QUEUE_FULL,
    UnsupportedServer: UNSUPPORTED_BROKER,
    TooFast: TOO_FAST,
    TooManyOpen: TOO_MANY_OPEN,
    IdTaken: ID_TAKEN,
    FileQuota: FILE_QUOTA,
    TooManyFiles: FILE_QUOTA,
    UnknownBatch: UNKNOWN_BATCH,
    UnknownFile: UNKNOWN_FILE,
    IdempotencyConflict: IDEMPOTENCY_CONFLICT,
    JobEnded: JOB_ENDED,
    BatchEnded: BATCH_ENDED,
    TooManyBatches: TOO_MANY_BATCHES,
    LeaseLost: INTERNAL,
    EmbeddedServerError: INTERNAL,
    BadMessage: INTERNAL,
    BrokerError: INTERNAL,
}


def all_kinds() -> list[Kind]:
    """By status, then by type."""
    found = {value for value in globals().values() if isinstance(value, Kind)}
    return sorted(found, key=lambda kind: (kind.status, kind.slug))
