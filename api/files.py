"""Files as OpenAI's API has them: the inputs of batches, which callers upload, and the outputs, which they fetch.

Source: OpenAI API reference, "Files".
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Annotated, Any, Literal
from urllib.parse import quote

import orjson
from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api import kinds, state, uploads, views
from api.auth import Caller
from api.dialects import OpenAIRoute
from api.openapi import form_body
from api.problems import Problem, described, shown, wrong
from api.uploads import MAX_TTL_S, MIN_TTL_S
from broker import FileRecord, UnknownFile, is_file_id
from broker import Scope as KeyScope
from bulk.errors import InputFailed

log = logging.getLogger(__name__)

#: Most files of one page. Source: OpenAI API reference, "List files".
MAX_PAGE = 10_000

router = APIRouter(tags=["files"], route_class=OpenAIRoute)

FileId = Annotated[str, Path(description="`file-` and 32 hex digits, as the upload answered it.")]


class FileUpload(BaseModel):
    """A file, and what it is for; the parts may come in any order."""

    file: str = Field(json_schema_extra={"format": "binary"}, description="The content; the part needs a `filename`.")
    purpose: Literal["batch"]
    anchor: Literal["created_at"] | None = Field(default=None, alias="expires_after[anchor]")
    seconds: int | None = Field(
        default=None,
        alias="expires_after[seconds]",
        ge=MIN_TTL_S,
        le=MAX_TTL_S,
        description="How long it is kept; `files.ttl_s` when left out.",
    )


class FileView(BaseModel):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int = Field(description="Unix seconds.")
    expires_at: int | None = Field(description="Unix seconds; null for never.")
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]


class FileList(BaseModel):
    object: Literal["list"]
    data: list[FileView]
    first_id: str | None
    last_id: str | None = Field(description="What to send as `after` for the next page.")
    has_more: bool


class FileDeleted(BaseModel):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


@router.post(
    "/v1/files",
    summary="Upload a file (OpenAI)",
    response_class=Response,
    responses={
        200: {"model": FileView},
        **described(
            kinds.BAD_REQUEST,
            kinds.FILE_QUOTA,
            kinds.FILE_TOO_LARGE,
            kinds.MEDIA_TYPE_REFUSED,
            kinds.INVALID_REQUEST,
            kinds.STORAGE_UNAVAILABLE,
            kinds.STORAGE_FULL,
        ),
    },
    openapi_extra={"requestBody": form_body(FileUpload)},
)
async def upload(request: Request) -> Response:
    """Keeps a file for a batch, of any size up to `files.max_bytes`. It is stored as it comes."""
    shared = state.of(request)
    caller = await shared.gate.caller(request, KeyScope.SUBMIT)
    return _json(_view(await uploads.take(request, shared, caller)))


@router.get(
    "/v1/files",
    summary="List files (OpenAI)",
    response_class=Response,
    responses={200: {"model": FileList}, **described(kinds.INVALID_REQUEST)},
)
async def list_files(
    request: Request,
    purpose: Annotated[str | None, Query(description="Only files of this purpose.", max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = MAX_PAGE,
    after: Annotated[str | None, Query(description="`last_id` of the page before.", max_length=64)] = None,
    order: Annotated[Literal["asc", "desc"], Query(description="By `created_at`.")] = "desc",
) -> Response:
    """The caller's own files."""
    shared = state.of(request)
    caller = await shared.gate.caller(request, KeyScope.READ)
    try:
        found = await shared.broker.files.listed(
            caller.owner, after=after, limit=limit + 1, newest_first=order == "desc", purpose=purpose
        )
    except UnknownFile as error:
        raise wrong("after", str(error)) from None
    return _json(views.page([_view(record) for record in found], limit))


@router.get(
    "/v1/files/{file_id}",
    summary="Read what is known of a file (OpenAI)",
    response_class=Response,
    responses={200: {"model": FileView}, **described(kinds.UNKNOWN_FILE)},
)
async def read(request: Request, file_id: FileId) -> Response:
    """Its name, size and end; the content has a page of its own."""
    shared = state.of(request)
    return _json(_view(await _own_file(shared, await shared.gate.caller(request, KeyScope.READ), file_id)))


@router.delete(
    "/v1/files/{file_id}",
    summary="Delete a file (OpenAI)",
    response_class=Response,
    responses={
        200: {"model": FileDeleted},
        **described(kinds.UNKNOWN_FILE, kinds.FILE_IN_USE, kinds.STORAGE_UNAVAILABLE),
    },
)
async def delete(request: Request, file_id: FileId) -> Response:
    """Removes the content, and what is known of it; not while a batch that has not ended reads it."""
    shared = state.of(request)
    caller = await shared.gate.caller(request, KeyScope.SUBMIT)
    record = await _own_file(shared, caller, file_id)
    if readers := await shared.broker.batches.reading(record.id, (record.owner, caller.owner)):
        raise Problem(kinds.FILE_IN_USE, f"{readers[0].id} reads it, and is {readers[0].shown}")
    await uploads.remove(shared, record.id)
    return _json({"id": record.id, "object": "file", "deleted": True})


@router.get(
    "/v1/files/{file_id}/content",
    summary="Fetch a file's content (OpenAI)",
    response_class=Response,
    responses={
        200: {
            "description": "The bytes as they were uploaded, or as the batch made them.",
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        },
        **described(kinds.UNKNOWN_FILE, kinds.STORAGE_UNAVAILABLE),
    },
)
async def content(request: Request, file_id: FileId) -> Response:
    """The content, sent as it is read."""
    shared = state.of(request)
    record = await _own_file(shared, await shared.gate.caller(request, KeyScope.READ), file_id)
    reading = shared.store.read(record.id)
    try:
        parts, size = await run_in_threadpool(reading.__enter__)
    except InputFailed as error:
        if error.is_missing:
            log.warning("A file's content is not in the storage.", extra={"file_id": record.id})
            raise Problem(kinds.UNKNOWN_FILE, f"the content of {record.id} is not in the storage any more") from None
        raise uploads.storage_problem(error, record.id) from error
    return _Content(record, reading, parts, record.bytes if size is None else size)


class _Content(Response):
    """A file's bytes, read as they are sent, and no further when the caller has gone."""

    media_type = "application/octet-stream"

    def __init__(
        self,
        record: FileRecord,
        reading: AbstractContextManager[object],
        parts: Iterator[bytes],
        size: int,
    ) -> None:
        headers = {
            "content-length": str(size),
            "content-disposition": _disposition(record.filename),
            "cache-control": "no-store",
            # Nothing that a caller uploaded is shown as a page of this server's.
            "x-content-type-options": "nosniff",
        }
        super().__init__(headers=headers)
        self._record = record
        self._reading = reading
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone: list[bool] = []
        when_gone = scope["state"]["when_gone"]
        when_gone(lambda: gone.append(True))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": list(self.raw_headers)})
            if "head" not in scope["state"]:
                while not gone and (part := await run_in_threadpool(next, self._parts, b"")):
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            if not gone:
                await send({"type": "http.response.body", "body": b""})
        except InputFailed as error:
            # The answer is left incomplete: the server closes the connection, so the caller sees that.
            log.error("The storage failed within a file.", extra={"file_id": self._record.id, "cause": error.reason})
        finally:
            when_gone(None)
            await run_in_threadpool(self._reading.__exit__, None, None, None)


async def _own_file(shared: state.ApiState, caller: Caller, file_id: str) -> FileRecord:
    """A file that the caller may know of. Raises `Problem` for any other."""
    found = await file_of(shared, caller, file_id)
    if found is None:
        raise Problem(
            kinds.UNKNOWN_FILE, f"no file {shown(file_id)}: its id is wrong, its time is over, or it was deleted"
        )
    return found


async def file_of(shared: state.ApiState, caller: Caller, file_id: str) -> FileRecord | None:
    """A file that this caller may know of; None for any other."""
    found = await shared.broker.files.get(file_id) if is_file_id(file_id) else None
    return found if found is not None and caller.may_see(found.owner) else None


def _view(record: FileRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.bytes,
        "created_at": int(record.created_at),
        "expires_at": None if record.expires_at is None else int(record.expires_at),
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
    }


def _disposition(filename: str) -> str:
    """As RFC 6266 has it: a name for any reader, and where that says less than all, the whole one."""
    plain = "".join(char if " " <= char <= "~" and char not in '"\\%' else "_" for char in filename)
    told = f'attachment; filename="{plain}"'
    return told if plain == filename else f"{told}; filename*=UTF-8''{quote(filename, safe='')}"


def _json(content: object) -> Response:
    return views.response(orjson.dumps(content), 200)
