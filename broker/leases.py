"""What passes between a worker and the queue.

Values, never changed once made. Those that every job needs are not frozen all the same: making a frozen one takes four
times as long, and there are several a job.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


@dataclass(slots=True)
class Lease:
    """One message that this worker holds. `tag` names the lease, not the job: the same job may be queued twice."""

    tag: bytes
    attempt: int
    #: The priority step of the list that the message came from (0, 3, 6, 9).
    step: int
    message: bytes


@dataclass(frozen=True, slots=True)
class Leased:
    """The answer to a lease: what is held now, and how many messages of each priority step still wait in the queue."""

    leases: list[Lease]
    #: Over `PRIORITY_STEPS`; owners' lists and returned messages count.
    waiting: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Delayed:
    """A message that waits for its time. `due_at` is Unix seconds."""

    due_at: float
    step: int
    message: bytes


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """What a reclaim moved: `returned` to the queue; `exhausted` to the caller, who must settle them as failed."""

    returned: int
    exhausted: list[Lease]


@dataclass(slots=True)
class Start:
    """A job about to run."""

    tag: bytes
    job_id: str
    #: Note the start for pollers: the job has a record.
    recorded: bool
    attempt: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job of many rows is. `started_at` is Unix seconds; `done` and `total` count rows."""

    tag: bytes
    job_id: str
    attempt: int
    started_at: float
    done: int
    total: int


class StartAnswer(IntEnum):
    LOST = 0
    RUN = 1
    ENDED = 2
    #: Still held: to be settled as dropped.
    REVOKED = 3


@dataclass(frozen=True, slots=True)
class FollowUp:
    """A message that is queued together with a result, or not at all."""

    list_key: str
    message: bytes


@dataclass(slots=True)
class Settlement:
    """The end of one job. `result` None stores nothing (Celery's `ignore_result`)."""

    tag: bytes
    job_id: str
    result: bytes | None
    recorded: bool
    follow_ups: tuple[FollowUp, ...] = ()
    #: Queued instead when the job turns out to have been revoked: its result is stored, and nothing was queued.
    if_revoked: tuple[FollowUp, ...] = ()
    #: Id of the access key whose in-flight quota the job counts against; "" for none.
    counted_by: str = ""


class SettleAnswer(IntEnum):
    LOST = 0
    SETTLED = 1
    ENDED_BEFORE = 2
    #: Somebody revoked it, and that is its result.
    REVOKED = 3
