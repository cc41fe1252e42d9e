"""Takes a file: from a caller's connection to the storage as it comes, within the bounds of one file and of its owner.

It is reserved before anything of it is stored, its reservation grows with it, and it becomes known when it is whole.
What breaks off is taken back here, or, where this process dies, by whoever removes what has expired.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import replace
from typing import TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request

from api import kinds, problems
from api.auth import Caller
from api.body import discard
from api.headers import header
from api.multipart import MAX_FRAMING_BYTES, UploadForm
from api.problems import Problem, shown, wrong
from api.state import ApiState
from broker import BrokerError, FileRecord
from bulk.durable import Sink
from bulk.errors import BulkError, InputFailed, OutputFailed

log = logging.getLogger(__name__)

T = TypeVar("T")

#: The purpose that uploads may have.
PURPOSE = "batch"
#: How long a caller may ask for a file to be kept, seconds. Source: OpenAI API reference, "Upload file".
MIN_TTL_S = 3600
MAX_TTL_S = 2_592_000
#: Seconds for which a reservation holds unless it grows; by then a file is stored, or its process is gone.
RESERVED_S = 3600
#: What is written together, bytes: each write is a turn of another thread.
WRITE_BYTES = 1 << 20
#: After so many bytes more a reservation is made to fit; what is not reserved of an upload is less.
RESERVE_BYTES = 16 << 20

_SECONDS = re.compile(r"[0-9]{1,9}", re.ASCII)

assert WRITE_BYTES <= RESERVE_BYTES


async def take(request: Request, shared: ApiState, caller: Caller) -> FileRecord:
    """The file that a form brings, once it is stored.

    Raises `Problem`, `BrokerError`, and `ClientDisconnect` when the caller goes away before all of it is there.
    """
    form = UploadForm.of(request)
    max_bytes = shared.settings.files.max_bytes
    allow_body: Callable[[int], None] = request.state.allow_body
    allow_body(max_bytes + MAX_FRAMING_BYTES)
    upload = _Upload(request, shared, caller, form)
    declared = header(request, b"content-length") or ""
    try:
        if declared.isdecimal() and int(declared) > max_bytes + MAX_FRAMING_BYTES:
            raise _too_large(max_bytes)
        return await upload.take()
    except (Problem, BrokerError) as error:
        if upload.ended:
            raise
        await discard(request, begun=upload.begun)
        # What is still to come of the body is not read, so the connection cannot be used again.
        problem = problems.of(error)
        raise replace(problem, headers={**problem.headers, "connection": "close"}) from error


class _Upload:
    """One file on its way."""

    def __init__(self, request: Request, shared: ApiState, caller: Caller, form: UploadForm) -> None:
        self._request = request
        self._shared = shared
        self._settings = shared.settings.files
        self._form = form
        self._record = FileRecord(
            id=f"file-{secrets.token_hex(16)}",
            owner=caller.owner,
            filename="",
            purpose=PURPOSE,
            bytes=0,
            created_at=time.time(),
            expires_at=None,
        )
        #: Whether the body has begun, and has ended.
        self.begun = False
        self.ended = False

    async def take(self) -> FileRecord:
        await self._reserve(0)
        try:
            try:
                async with _on_threads(self._shared.store.receive(self._record.id)) as sink:
                    whole = await self._receive(sink)
                    # Two uploads at once do not pass the quota together: whichever is reserved last does not fit.
                    await self._reserve(whole.bytes)
            except OutputFailed as error:
                raise storage_problem(error, self._record.id) from error
            await self._shared.broker.files.add(whole)
        except BaseException:
            await self._take_back()
            raise
        return whole

    async def _receive(self, sink: Sink) -> FileRecord:
        """The record of the file, of which all is written."""
        came = size = reserved = held = 0
        parts: list[bytes] = []
        async for data in self._body():
            came += len(data)
            for part in self._form.feed(data):
                parts.append(part)
                size += len(part)
                held += len(part)
            if size > self._settings.max_bytes:
                raise _too_large(self._settings.max_bytes)
            if came - size > MAX_FRAMING_BYTES:
                raise Problem(kinds.BAD_REQUEST, f"the form has over {MAX_FRAMING_BYTES} bytes besides its file")
            # As soon as it is known, and not after gigabytes.
            _check_fields(self._form.fields)
            if size >= reserved + RESERVE_BYTES:
                await self._reserve(size)
                reserved = size
            if held >= WRITE_BYTES:
                await run_in_threadpool(sink.write, b"".join(parts))
                parts, held = [], 0
        filename = self._form.finish()
        await run_in_threadpool(sink.write, b"".join(parts))
        kept_s = _kept_s(self._form.fields) or self._settings.ttl_s
        return replace(self._record, filename=filename, bytes=size, expires_at=self._record.created_at + kept_s)

    async def _body(self) -> AsyncIterator[bytes]:
        while not self.ended:
            message = await self._request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            self.begun = True
            self.ended = not message.get("more_body")
            yield message.get("body", b"")

    async def _reserve(self, size: int) -> None:
        reserved = replace(self._record, bytes=size, expires_at=time.time() + RESERVED_S)
        await self._shared.broker.files.reserve(reserved, self._settings.quota_bytes, self._settings.quota_files)

    async def _take_back(self) -> None:
        """Leave nothing behind; what cannot be removed now expires with the reservation."""
        try:
            await remove(self._shared, self._record.id)
        except (Problem, BrokerError) as error:
            log.debug("An upload that broke off is removed later.", extra={"cause": _cause(error)})


def _cause(error: Problem | BrokerError) -> str:
    problem = problems.of(error)
    return problem.cause or problem.detail


async def remove(shared: ApiState, file_id: str) -> None:
    """Remove a file, its content first: what is left in between is found, and finished, when it expires."""
    try:
        await run_in_threadpool(shared.store.remove, file_id)
    except OutputFailed as error:
        raise storage_problem(error, file_id) from error
    await shared.broker.files.remove(file_id)


def storage_problem(error: BulkError, file_id: str) -> Problem:
    """What a caller is told of a storage that fails; where it is, and as whom it is reached, is for the log alone."""
    assert isinstance(error, InputFailed | OutputFailed)
    cause = f"the storage of files fails with {file_id}: {error.reason}"
    if isinstance(error, OutputFailed) and error.is_full:
        return Problem(kinds.STORAGE_FULL, "the storage of files is full; nothing was kept of this one", cause=cause)
    return Problem(
        kinds.STORAGE_UNAVAILABLE, "the storage of files cannot be reached, or refuses", headers=_RETRY, cause=cause
    )


_RETRY = {"retry-after": "5"}


@asynccontextmanager
async def _on_threads(manager: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enter and leave a context that blocks on other threads."""
    value = await run_in_threadpool(manager.__enter__)
    try:
        yield value
    except BaseException as error:
        if not await run_in_threadpool(manager.__exit__, type(error), error, error.__traceback__):
            raise
    else:
        await run_in_threadpool(manager.__exit__, None, None, None)


def _check_fields(fields: dict[str, str]) -> None:
    purpose = fields.get("purpose", PURPOSE)
    if purpose != PURPOSE:
        raise wrong("purpose", f"{shown(purpose)} is not taken: files are for batches, so send `{PURPOSE}`")


def _kept_s(fields: dict[str, str]) -> int | None:
    """How long the caller wants the file to be kept, seconds; None when they do not say."""
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise wrong("expires_after.anchor", "it must be `created_at`")
    if seconds is None or not _SECONDS.fullmatch(seconds) or not MIN_TTL_S <= int(seconds) <= MAX_TTL_S:
        raise wrong("expires_after.seconds", f"it must be a whole number from {MIN_TTL_S} to {MAX_TTL_S}")
    return int(seconds)


def _too_large(max_bytes: int) -> Problem:
    return Problem(kinds.FILE_TOO_LARGE, f"a file may have {max_bytes} bytes (files.max_bytes): split it")
