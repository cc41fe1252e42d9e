"""What can go wrong between us and the server that keeps the jobs.

BrokerError
├── BrokerUnavailable    no answer, refused, loading, read-only, out of memory: try again later
├── QueueFull            admission refused the job: nothing was stored
├── IdempotencyConflict  the same key came before with another request
├── IdTaken              the id that a caller chose is another job's
├── TooManyOpen          the caller has as many jobs that have not ended as they may
├── TooFast              the caller submits faster than they may
├── JobEnded             a job that has ended cannot be cancelled
├── BatchEnded           neither can a batch
├── TooManyBatches       the owner has as many batches that have not ended as they may
├── LeaseLost            somebody else holds now what was to be written of
├── FileQuota            the owner's files may not take so much room: the file was not kept
├── TooManyFiles         the owner has as many files as they may: the file was not kept
├── UnknownBatch         there is no batch of this id among the owner's
├── UnknownFile          there is no file of this id among the owner's
├── UnsupportedServer    the server is too old for the scripts
├── EmbeddedServerError  the embedded server did not start
└── BadMessage           a queued message that no job can be made of
"""

from __future__ import annotations

from broker.jobs import Rate, RateState


class BrokerError(Exception):
    """Base of everything this room raises on purpose."""

    #: Of a refused submit: the rate of its caller's key, and where the caller stands; None without a rate.
    standing: tuple[Rate, RateState] | None = None


class BrokerUnavailable(BrokerError):
    """The server cannot take or give jobs now; nothing is known to be lost."""

    def __init__(self, cause: str, *, retry_after_s: float = 2.0) -> None:
        super().__init__(f"the broker does not answer as it should: {cause}")
        self.retry_after_s = retry_after_s


class QueueFull(BrokerError):
    """The queue holds `limit` jobs or more; the job was not stored."""

    def __init__(self, queue: str, depth: int, limit: int, *, retry_after_s: float = 5.0) -> None:
        super().__init__(f"queue {queue} holds {depth} jobs, its limit is {limit}: try again later")
        self.queue = queue
        self.depth = depth
        self.limit = limit
        self.retry_after_s = retry_after_s


class IdempotencyConflict(BrokerError):
    """An idempotency key was used before for another request: another path, or another payload."""

    def __init__(self, key: str, job_id: str) -> None:
        super().__init__(
            f"idempotency key {key!r} was used for another request, with another path or payload: that of job {job_id}"
        )
        self.job_id = job_id


class IdTaken(BrokerError):
    """The id that a caller chose belongs to a job with another payload, or to somebody else's."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"the id {job_id} is taken by another job: choose a new one")


class TooManyOpen(BrokerError):
    """The job was not stored: the caller's key allows no more jobs that have not ended."""

    def __init__(self, count: int, limit: int, *, retry_after_s: float = 5.0) -> None:
        super().__init__(f"{count} jobs of this key have not ended, {limit} may be open: wait for some of them")
        self.retry_after_s = retry_after_s


class TooFast(BrokerError):
    """The job was not stored: the caller's key allows fewer submits in that time."""

    def __init__(self, rate: Rate, *, retry_after_s: float) -> None:
        super().__init__(f"this key may submit {rate.count} jobs in {rate.period_s:g} s: slow down")
        # Told of the same moment as `Retry-After`, as the draft has it: the one at which another is taken.
        self.standing = (rate, RateState(0, retry_after_s))
        self.retry_after_s = retry_after_s


class JobEnded(BrokerError):
    """What was asked of a job makes sense only before it has ended."""

    def __init__(self, job_id: str, status: str) -> None:
        super().__init__(f"job {job_id} has ended: it {_ENDINGS.get(status, status)}; nothing was changed")


_ENDINGS = {"cancelled": "was cancelled"}


class BatchEnded(BrokerError):
    """What was asked of a batch makes sense only before it has ended."""

    def __init__(self, batch_id: str, status: str) -> None:
        super().__init__(f"batch {batch_id} has ended: it {_ENDINGS.get(status, status)}; nothing was changed")


class TooManyBatches(BrokerError):
    """The batch was not stored: `limit` of its owner's have not ended."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} of your batches have not ended, as many as may be: wait for one, or cancel one")


class LeaseLost(BrokerError):
    """The lease ran out, and whoever holds it now writes of it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the lease of {name} was lost")


class FileQuota(BrokerError):
    """The file was not kept: with it the owner's files would take more than they may."""

    def __init__(self, used_bytes: int, quota_bytes: int) -> None:
        super().__init__(
            f"your other files take {used_bytes} bytes, and all together may take {quota_bytes} (files.quota_bytes): "
            "delete some that you need no more"
        )
        self.used_bytes = used_bytes
        self.quota_bytes = quota_bytes


class TooManyFiles(BrokerError):
    """The file was not kept: the owner has as many as they may."""

    def __init__(self, quota_files: int) -> None:
        super().__init__(
            f"you have the {quota_files} files that you may have (files.quota_files): delete some that you need no more"
        )


class UnknownBatch(BrokerError):
    """No batch of this id is known, or it is another owner's."""

    def __init__(self, batch_id: str) -> None:
        super().__init__(f"there is no batch {batch_id!r}: its id is wrong, or it is no longer kept")


class UnknownFile(BrokerError):
    """No file of this id is known, or it is another owner's."""

    def __init__(self, file_id: str) -> None:
        super().__init__(f"there is no file {file_id!r}: its id is wrong, its time is over, or it was deleted")


class UnsupportedServer(BrokerError):
    """The server lacks what the scripts need."""


class EmbeddedServerError(BrokerError):
    """The embedded server did not come up."""


class BadMessage(BrokerError):
    """A queued message that cannot become a job; `job_id` is set where it could be read."""

    def __init__(self, reason: str, *, job_id: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.job_id = job_id
