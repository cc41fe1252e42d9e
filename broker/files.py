"""What is known of files that callers upload and batches make: owner, size, end. Their content lies elsewhere.

An upload is reserved before its content is stored, and added once that is whole. What is between the two, or was left
there by a process that died, is found by nobody but `expired`, so whoever removes what has expired leaves no orphans.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import orjson
import redis.asyncio

from broker.errors import FileQuota, TooManyFiles, UnknownFile
from broker.faults import translated_async, tried_twice
from broker.keys import Keys
from broker.lua import script_text

#: Records that one command reads.
AT_A_TIME = 500

#: What the script answers, beside a number of bytes.
_KEPT = -1
_TOO_MANY = -2
_ID = re.compile(r"file-[0-9a-f]{32}")


def is_file_id(text: str) -> bool:
    """Whether this has the form of a file's id; nothing else may become a part of a path."""
    return _ID.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file. Times are Unix seconds."""

    #: `file-` and 32 hex digits.
    id: str
    #: "" for nobody in particular.
    owner: str
    filename: str
    #: `batch` for what was uploaded, `batch_output` for what a batch made.
    purpose: str
    bytes: int
    created_at: float
    expires_at: float | None

    def expired(self, now: float) -> bool:
        return self.expires_at is not None and self.expires_at <= now


class Files:
    """One process' view of all files. Each verb raises `BrokerUnavailable`."""

    def __init__(self, client: redis.asyncio.Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self._add = client.register_script(script_text("file_add"))
        self._remove = client.register_script(script_text("file_remove"))

    async def reserve(self, record: FileRecord, quota_bytes: int | None = None, quota_files: int | None = None) -> None:
        """Count a file whose content is still coming, again whenever it has grown; nobody finds it before `add`.

        It ends at `expires_at` like any other, unless it is added or removed before. Raises `FileQuota`, and then what
        was reserved before stays; or `TooManyFiles`, when the owner has `quota_files` or more already.
        """
        await self._keep(record, quota_bytes, quota_files, stored=False)

    async def add(self, record: FileRecord, quota_bytes: int | None = None) -> None:
        """Make a file known whose content is stored. The same id again replaces what was known, and counts once.

        `quota_bytes` is how much the owner's files may take together; None or 0 for no limit. Raises `FileQuota`.
        """
        await self._keep(record, quota_bytes, None, stored=True)

    async def get(self, file_id: str) -> FileRecord | None:
        """A file; None for an unknown id, and for a file whose time is over."""
        raw: bytes | None = await self._read(lambda: self._client.get(self._keys.file(file_id)))
        return next(iter(_found([raw])), None)

    async def listed(
        self, owner: str, *, after: str | None, limit: int, newest_first: bool, purpose: str | None
    ) -> list[FileRecord]:
        """At most `limit` of an owner's files, those that come after the file `after`; of one purpose, or of any.

        Raises `UnknownFile` when `after` is none of them.
        """
        key = self._keys.files(owner)
        first = 0
        if after is not None:
            rank = self._client.zrevrank if newest_first else self._client.zrank
            place: int | None = await self._read(lambda: rank(key, after))
            if place is None:
                raise UnknownFile(after)
            first = place + 1
        found: list[FileRecord] = []
        while len(found) < limit:
            ids: list[bytes] = await self._ids(key, first, newest_first)
            if not ids:
                break
            names = [self._keys.file(file_id.decode()) for file_id in ids]
            page = _found(await self._records(names))
            found += [record for record in page if purpose in (None, record.purpose)]
            first += len(ids)
        return found[:limit]

    async def remove(self, file_id: str) -> bool:
        """Forget a file, whose content is gone; False when there was none."""
        keys = self._keys
        names = [keys.file(file_id), keys.expiring_files, keys.file_bytes]
        return bool(await self._read(lambda: self._remove(keys=names, args=[file_id, keys.files("")])))

    async def used_bytes(self, owner: str) -> int:
        """What an owner's files take together, with those that are still coming."""
        return int(await self._read(lambda: self._client.hget(self._keys.file_bytes, owner)) or 0)

    async def expired(self, now: float, most: int) -> list[FileRecord]:
        """At most `most` files whose time is over at `now`, Unix seconds, also such as never came whole."""
        expiring = self._keys.expiring_files
        ids: list[bytes] = await self._read(
            lambda: self._client.zrangebyscore(expiring, "-inf", int(now * 1000), 0, most)
        )
        found = await self._records([self._keys.file(file_id.decode()) for file_id in ids])
        return [_decoded(raw)[0] for raw in found if raw is not None]

    async def _keep(
        self, record: FileRecord, quota_bytes: int | None, quota_files: int | None, *, stored: bool
    ) -> None:
        keys = self._keys
        names = [keys.file(record.id), keys.files(record.owner), keys.expiring_files, keys.file_bytes]
        args: list[bytes | str | int] = [record.id, _encoded(record, stored=stored), record.owner, record.bytes]
        args += [int(record.created_at * 1000), "" if record.expires_at is None else int(record.expires_at * 1000)]
        args += [quota_bytes or 0, int(stored), quota_files or 0]
        answer: int = await self._read(lambda: self._add(keys=names, args=args))
        if answer == _TOO_MANY:
            raise TooManyFiles(quota_files or 0)
        if answer != _KEPT:
            raise FileQuota(answer, quota_bytes or 0)

    async def _ids(self, key: str, first: int, newest_first: bool) -> list[bytes]:
        pages = self._client.zrevrange if newest_first else self._client.zrange
        ids: list[bytes] = await self._read(lambda: pages(key, first, first + AT_A_TIME - 1))
        return ids

    async def _records(self, names: Sequence[str]) -> list[bytes | None]:
        if not names:
            return []
        found: list[bytes | None] = await self._read(lambda: self._client.mget(names))
        return found

    async def _read(self, command: Callable[[], Awaitable[Any]]) -> Any:
        """Run a command that may be run twice."""
        async with translated_async(self._client):
            return await tried_twice(command)


def _encoded(record: FileRecord, *, stored: bool) -> bytes:
    return orjson.dumps(asdict(record) | {"stored": stored})


def _decoded(raw: bytes) -> tuple[FileRecord, bool]:
    """The record, and whether the file's content is stored."""
    fields: dict[str, Any] = orjson.loads(raw)
    stored: bool = fields.pop("stored")
    return FileRecord(**fields), stored


def _found(records: Sequence[bytes | None]) -> list[FileRecord]:
    """Those that callers may find: stored, and not over."""
    now = time.time()
    decoded = [_decoded(raw) for raw in records if raw is not None]
    return [record for record, stored in decoded if stored and not record.expired(now)]
