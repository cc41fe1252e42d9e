"""Everything that touches Redis: keys, scripts, the queue's verbs, job records, results, the embedded server."""

from broker.aio import AsyncBroker
from broker.errors import (
    BadMessage,
    BrokerError,
    BrokerUnavailable,
    EmbeddedServerError,
    IdempotencyConflict,
    JobEnded,
    QueueFull,
    UnsupportedServer,
)
from broker.jobs import (
    JobEvent,
    JobFailure,
    JobState,
    JobStatus,
    ModelInfo,
    NewJob,
    Priority,
    QueueDepth,
    Webhook,
    WorkerInfo,
    queue_name,
)
from broker.leases import Delayed, FollowUp, Lease, Leased, Reclaimed, SettleAnswer, Settlement, Start, StartAnswer
from broker.sync import Broker
from broker.traffic import TrafficRow

__all__ = [
    "AsyncBroker",
    "BadMessage",
    "Broker",
    "BrokerError",
    "BrokerUnavailable",
    "Delayed",
    "EmbeddedServerError",
    "FollowUp",
    "IdempotencyConflict",
    "JobEnded",
    "JobEvent",
    "JobFailure",
    "JobState",
    "JobStatus",
    "Lease",
    "Leased",
    "ModelInfo",
    "NewJob",
    "Priority",
    "QueueDepth",
    "QueueFull",
    "Reclaimed",
    "SettleAnswer",
    "Settlement",
    "Start",
    "StartAnswer",
    "TrafficRow",
    "UnsupportedServer",
    "Webhook",
    "WorkerInfo",
    "queue_name",
]
