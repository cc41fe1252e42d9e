"""Every key that Sheaf touches on the server, in one place.

The queue lists and result keys are Celery's own; all the others begin with `sheaf:`. `prefix` is kombu's
`global_keyprefix` and stands before both.
"""

from __future__ import annotations

from dataclasses import dataclass

#: What kombu's Redis transport puts between a queue's name and its priority step.
PRIORITY_SEPARATOR = "\x06\x16"
#: kombu's default priority steps, served in this order. A list without a suffix is step 0.
PRIORITY_STEPS = (0, 3, 6, 9)
#: Seconds for which what a probe wrote is kept.
PROBE_TTL_S = 10
#: A prefix that ends in one of these is used for result keys as it is.
#: Source: `celery.backends.base`, `_add_global_keyprefix`.
RESULT_SEPARATORS = (":", "_", "-", ".")


@dataclass(frozen=True, slots=True)
class QueueKeys:
    """The keys of one queue. Tuples run over `PRIORITY_STEPS`."""

    name: str
    #: list: messages as Celery producers push them (left in, right out).
    waiting: tuple[str, ...]
    #: list: `attempt:message`, given back by `release`, `reclaim` or `due`; served before `waiting`.
    returned: tuple[str, ...]
    #: sorted set: lease holder (a worker's session) -> expiry, server milliseconds.
    holders: str
    #: string: counter that gives each lease its tag.
    lease_sequence: str
    #: sorted set: lease tag -> due time, server milliseconds.
    delayed: str
    #: hash: lease tag -> `level:attempt:message` of a delayed message.
    delayed_messages: str
    #: list: dead letters, JSON objects.
    dead: str
    #: list with TTL: rows that came lately, the newest first, `enqueued ms:tokens:level:rows that it stands for`.
    traffic: str
    #: prefix of the hashes of held messages; a session completes it.
    held_prefix: str
    #: prefixes of the owners' lists of messages, each as long as it holds any (left in, right out); an owner completes
    #: them. Served beside `waiting`, in equal shares.
    owned_prefixes: tuple[str, ...]
    #: hash: level (1 is the highest) -> how many messages the owners' lists of that level hold; no zeros.
    owned_depths: str
    #: list: owners who have a list and nothing in `waiting`, and "" for `waiting` itself; the next one to be served is
    #: left. As long as any owner has a list of this step.
    rotations: tuple[str, ...]
    #: sorted set: owner -> place of their last message in `waiting`; "" -> minus the number of places that were taken
    #: since. As long as an owner has a place; after `celery purge` until the next message is taken.
    places: tuple[str, ...]
    #: hash: level (1 is the highest) -> how many messages of the waiting and owners' lists were ever leased.
    served: str

    def held(self, session: str) -> str:
        """hash: lease tag -> `level:attempt:message`, what one worker holds."""
        return self.held_prefix + session

    def owned(self, step: int, owner: str) -> str:
        """list: messages of one owner that found `waiting` long."""
        return self.owned_prefixes[PRIORITY_STEPS.index(step)] + owner


class Keys:
    """Builds key names under one `global_keyprefix`."""

    __slots__ = ("_own", "_results", "prefix")

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix
        self._own = prefix + "sheaf:"
        # Celery's result backend sets a prefix off that does not end in a separator; kombu's transport does not.
        separator = "" if not prefix or prefix.endswith(RESULT_SEPARATORS) else "_"
        self._results = f"{prefix}{separator}celery-task-meta-"

    def queue(self, name: str) -> QueueKeys:
        own = self._own
        return QueueKeys(
            name=name,
            waiting=tuple(
                f"{self.prefix}{name}{PRIORITY_SEPARATOR}{step}" if step else self.prefix + name
                for step in PRIORITY_STEPS
            ),
            returned=tuple(f"{own}returned:{name}:{step}" for step in PRIORITY_STEPS),
            holders=f"{own}holders:{name}",
            lease_sequence=f"{own}lease-sequence:{name}",
            delayed=f"{own}delayed:{name}",
            delayed_messages=f"{own}delayed-messages:{name}",
            dead=f"{own}dead:{name}",
            traffic=f"{own}traffic:{name}",
            held_prefix=f"{own}held:{name}:",
            owned_prefixes=tuple(f"{own}owned:{name}:{step}:" for step in PRIORITY_STEPS),
            owned_depths=f"{own}owned-depths:{name}",
            rotations=tuple(f"{own}rotation:{name}:{step}" for step in PRIORITY_STEPS),
            places=tuple(f"{own}places:{name}:{step}" for step in PRIORITY_STEPS),
            served=f"{own}served:{name}",
        )

    def result(self, job_id: str) -> str:
        """string with TTL, and the channel of the same name: Celery's result."""
        return self._results + job_id

    @property
    def news(self) -> str:
        """channel: result keys of the jobs of which there is news, a line each: they have ended, or are further."""
        return self._own + "news"

    @property
    def watched(self) -> str:
        """sorted set with TTL: id of a job whose start is to be told on `news` -> Unix seconds until when."""
        return self._own + "watched"

    @property
    def revoked(self) -> str:
        """sorted set with TTL: id of a job that must not start -> Unix seconds of the cancel or revoke."""
        return self._own + "revoked"

    @property
    def probe(self) -> str:
        """string with TTL: written by whoever asks whether the server takes jobs."""
        return self._own + "probe"

    def record(self, job_id: str) -> str:
        """string with TTL: what the API knew at submit, JSON."""
        return f"{self._own}job:{job_id}"

    def started(self, job_id: str) -> str:
        """string with TTL: `attempt:unix seconds` of the last start; of many rows also `:rows done:rows`."""
        return f"{self._own}started:{job_id}"

    @property
    def expiring(self) -> str:
        """sorted set with TTL: id of a job with a timeout -> when it ends if it has not begun, Unix milliseconds."""
        return self._own + "expiring"

    def idempotency(self, owner: str, key: str) -> str:
        """string with TTL: `fingerprint:unix milliseconds:job id` of the first submit with this key."""
        return f"{self._own}idempotency:{owner}:{key}"

    def listed(self, owner: str) -> str:
        """sorted set with TTL: id of an owner's job -> Unix milliseconds of its submit; the newest ones only."""
        return f"{self._own}jobs:{owner}"

    def open_jobs(self, key_id: str) -> str:
        """set with TTL: ids of the jobs that count against an access key's in-flight quota."""
        return f"{self._own}open:{key_id}"

    def rate(self, key_id: str) -> str:
        """string with TTL: theoretical arrival time of an access key's next submit, server microseconds."""
        return f"{self._own}rate:{key_id}"

    @property
    def access_keys(self) -> str:
        """hash: id of an access key -> what is known of it, JSON; never the key itself."""
        return self._own + "keys"

    def batch(self, batch_id: str) -> str:
        """hash with TTL: `record`, JSON; `fingerprint` of its request; what is wanted of it: `cancelling_at`, Unix
        seconds, if it is to end; `paused`, 1, if it is to pause."""
        return f"{self._own}batch:{batch_id}"

    @property
    def all_batches(self) -> str:
        """sorted set with TTL: id of any owner's batch -> Unix milliseconds of its making; the newest ones only."""
        return self._own + "all-batches"

    def batches(self, owner: str) -> str:
        """sorted set with TTL: id of an owner's batch -> Unix milliseconds of its making; the newest ones only."""
        return f"{self._own}batches:{owner}"

    def open_batches(self, owner: str) -> str:
        """set with TTL: ids of an owner's batches that have not ended."""
        return f"{self._own}open-batches:{owner}"

    def delivery(self, delivery_id: str) -> str:
        """hash with TTL: `round`, and `record`, JSON, of one event's way to a webhook; see `broker.deliveries`."""
        return f"{self._own}delivery:{delivery_id}"

    def put_off(self, delivery_id: str) -> str:
        """string with TTL: `unix milliseconds:lease tag:reason`, until when and why a delivery is not made."""
        return f"{self._own}put-off:{delivery_id}"

    @property
    def deliveries(self) -> str:
        """sorted set with TTL: id of a delivery -> Unix milliseconds of its event; the newest ones only."""
        return self._own + "deliveries"

    def webhook_secrets(self, owner: str) -> str:
        """string: the secrets that sign the webhooks of an owner's jobs, JSON."""
        return f"{self._own}webhook-secrets:{owner}"

    def bulk_run(self, run_id: str) -> str:
        """hash with TTL: `record`, JSON, of a bulk run, and `wanted` of it: run, pause or cancel."""
        return f"{self._own}bulk-run:{run_id}"

    @property
    def bulk_runs(self) -> str:
        """sorted set with TTL: id of a bulk run -> Unix seconds of its last report; the newest ones only."""
        return self._own + "bulk-runs"

    def file(self, file_id: str) -> str:
        """string: what is known of a file, JSON; until it is removed, at its end or before."""
        return f"{self._own}file:{file_id}"

    def files(self, owner: str) -> str:
        """sorted set: id of an owner's file -> Unix milliseconds of its making; until the files are removed."""
        return f"{self._own}files:{owner}"

    @property
    def expiring_files(self) -> str:
        """sorted set: id of a file -> its end, Unix milliseconds; until the files are removed."""
        return self._own + "expiring-files"

    @property
    def file_bytes(self) -> str:
        """hash: owner -> bytes of all their files, of those that are still coming too; no zeros."""
        return self._own + "file-bytes"

    @property
    def workers(self) -> str:
        """sorted set: worker session -> time of its last announcement."""
        return self._own + "workers"

    def worker(self, session: str) -> str:
        """string with TTL: a worker's announcement, JSON."""
        return f"{self._own}worker:{session}"
