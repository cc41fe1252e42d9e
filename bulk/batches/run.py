"""One batch, from wherever an earlier holder of it stopped to its end.

The broker is waited for as long as it is away, the storage until the batch's time is over. After a kill, what came
after the last checkpoint is run again; where that is lost with its machine, all of it. Each line has one answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from broker import AsyncBroker, BatchFault, BatchRecord, BatchStatus, BatchWishes, BrokerUnavailable, FileRecord
from bulk.batches.files import BatchFiles, Places, discard
from bulk.batches.validating import Interrupted, validate
from bulk.driving import drive, undisturbed
from bulk.durable import failing_as_output
from bulk.engine import Engine
from bulk.errors import BulkError, NotResumable
from bulk.locations import Location, size_of
from bulk.patience import patiently
from bulk.store import FileStore
from configs import Settings

log = logging.getLogger(__name__)

#: Writes down how a batch is, and answers what is wanted of it. Raises `LeaseLost` where it is another's now, and
#: `BrokerUnavailable`.
Report = Callable[[BatchRecord], Awaitable[BatchWishes]]

#: Seconds between reports: so long a wish may go unheard.
REPORT_EVERY_S = 1.0
#: Longest pause between attempts to use a storage that fails, seconds.
MAX_PAUSE_S = 30.0
#: How long after a batch's time is over its storage is waited for, seconds.
PATIENCE_S = 600.0

_NAMESPACE = uuid.UUID("3a0b1f5c-7a36-5c55-8d4e-2f0c8a1b9e77")


@dataclass(frozen=True, slots=True)
class _Cut:
    """Why a batch ends before its lines do, and what those are told that were not run."""

    end: BatchStatus
    message: str

    @property
    def code(self) -> str:
        return f"batch_{self.end}"


_CANCELLED = _Cut(BatchStatus.CANCELLED, "the batch was cancelled before this request was run")
_EXPIRED = _Cut(BatchStatus.EXPIRED, "the batch's completion window was over before this request was run")


class BatchRunner:
    """What all batches of a process share."""

    def __init__(self, broker: AsyncBroker, store: FileStore, settings: Settings) -> None:
        self.broker = broker
        self.store = store
        self.settings = settings

    async def run(self, batch: BatchRecord, report: Report) -> BatchRecord:
        """Take a batch to its end, or until it is to pause, and return it as it is then.

        Raises:
            LeaseLost: somebody else has it.
            asyncio.CancelledError: whoever leases it next goes on.
        """
        return await _Run(self, batch, report).run()


class _Run:
    def __init__(self, shared: BatchRunner, batch: BatchRecord, report: Report) -> None:
        self._shared = shared
        self._batch = batch
        self._report = report
        self._reporting = asyncio.Lock()
        self._cut: _Cut | None = None
        #: It is to pause. Then it is left as for another worker, which may be this one; so nobody waits for it, and a
        #: paused batch takes no place and no memory.
        self._pausing = False
        self._interrupted = asyncio.Event()
        self._leaving = False
        self._driving: asyncio.Task[None] | None = None
        folder = shared.settings.batches.work_dir.absolute()
        self._output_ids = tuple(f"file-{uuid.uuid5(_NAMESPACE, f'{batch.id}/{kind}').hex}" for kind in ("out", "err"))
        requests, answers, errors = (shared.store.location(name) for name in (batch.input_file_id, *self._output_ids))
        self._places = Places(requests, answers, errors, folder)

    async def run(self) -> BatchRecord:
        working = asyncio.ensure_future(self._work())
        watching = asyncio.ensure_future(self._watch())
        try:
            await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
            await working
        finally:
            self._leaving = True
            for task in (working, watching):
                task.cancel()
            await asyncio.wait((working, watching))
        return self._batch

    async def _watch(self) -> None:
        """Report now and then, and see when the batch is to end early."""
        while True:
            try:
                await self._tell()
            except BrokerUnavailable as error:
                log.debug("The broker is away; the batch goes on.", extra={"cause": str(error)})
                self._heed()
            await asyncio.sleep(REPORT_EVERY_S)

    async def _tell(self) -> None:
        async with self._reporting:
            wishes = await self._report(self._batch)
        self._batch = self._batch.wished(wishes)
        self._heed()

    def _heed(self) -> None:
        """See whether the batch is to end early, or to pause."""
        if self._cut is not None:
            return
        if self._batch.cancelling_at is not None:
            self._cut = _CANCELLED
        elif time.time() >= self._batch.expires_at:
            self._cut = _EXPIRED
        self._pausing = self._cut is None and (self._pausing or self._batch.paused)
        if (self._cut is not None or self._pausing) and not self._interrupted.is_set():
            self._interrupted.set()
            if self._driving is not None:
                self._driving.cancel()

    async def _work(self) -> None:
        # A batch that was cancelled or paused while it waited is not begun.
        await patiently(self._tell)
        pause_s = 0.5
        while not (self._batch.ended or self._leaving or self._pausing):
            self._batch = replace(self._batch, held=True)
            try:
                await undisturbed(_make, self._places.folder)
                if self._batch.status is BatchStatus.VALIDATING:
                    await self._validate()
                else:
                    await self._serve()
            except NotResumable as error:
                log.warning("A batch begins anew.", extra=self._fields(cause=str(error)))
                await undisturbed(discard, self._batch.id, self._places)
            except BulkError as error:
                if await self._storage_failed(error):
                    return
                await self._pause(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
        if not self._batch.ended:
            self._batch = replace(self._batch, held=False)
            await patiently(self._tell)

    async def _storage_failed(self, error: BulkError) -> bool:
        """Whether that ended the batch."""
        if await patiently(lambda: self._shared.broker.files.get(self._batch.input_file_id)) is None:
            await self._fail([BatchFault("file_not_found", "the input file was deleted, or has expired")])
            return True
        # What the storage says may name places that are nobody's business but the log's.
        log.error("The storage of a batch fails; it is tried again.", extra=self._fields(cause=str(error)))
        if time.time() < self._batch.expires_at + PATIENCE_S:
            return False
        await self._fail(
            [BatchFault("storage_failed", "the files could not be read or written until its time was over")]
        )
        return True

    async def _pause(self, seconds: float) -> None:
        if self._cut is not None:
            await asyncio.sleep(seconds)
            return
        try:
            async with asyncio.timeout(seconds):
                await self._interrupted.wait()
        except TimeoutError:
            return

    async def _validate(self) -> None:
        shared, batch = self._shared, self._batch
        try:
            found = await undisturbed(
                lambda: validate(
                    self._places.requests,
                    batch.endpoint,
                    shared.settings.models,
                    max_lines=shared.settings.batches.max_lines,
                    given_up=lambda: self._leaving or self._interrupted.is_set(),
                )
            )
        except Interrupted:
            if self._cut is not None:
                await self._end(self._cut.end)
            return
        if isinstance(found, list):
            await self._fail(found)
            return
        begun = replace(self._batch, model=found.model, total=found.lines)
        self._batch = begun.become(BatchStatus.IN_PROGRESS)
        await patiently(self._tell)
        log.info("A batch was begun.", extra=self._fields(lines=found.lines))

    async def _serve(self) -> None:
        files = await undisturbed(BatchFiles, self._batch, self._places, self._shared.settings.models)
        try:
            self._count(files)
            if not files.complete:
                await self._drive(files)
                if self._batch.total > files.completed + files.failed:
                    if self._cut is None:
                        return
                    await undisturbed(files.cut_short, self._cut.code, self._cut.message)
                    self._count(files)
            if not files.cut:
                self._batch = self._batch.become(BatchStatus.FINALIZING)
                await patiently(self._tell)
            await undisturbed(files.commit)
        finally:
            await asyncio.to_thread(files.close)
        answers, errors = self._output_ids
        output_file_id = await self._keep(answers, self._places.answers, "output") if files.completed else None
        error_file_id = await self._keep(errors, self._places.errors, "errors") if files.failed else None
        self._batch = replace(self._batch, output_file_id=output_file_id, error_file_id=error_file_id)
        cut = _CANCELLED if self._batch.cancelling_at is not None else _EXPIRED
        await self._end(cut.end if files.cut else BatchStatus.COMPLETED)

    async def _drive(self, files: BatchFiles) -> None:
        """Have all lines run, or those for which there is time; returns early when it is interrupted."""
        if self._interrupted.is_set():
            return
        shared, batch = self._shared, self._batch
        assert batch.model is not None
        # No owner of keys has a colon in its name. Owners' batches share what is left to the lowest priority.
        engine = Engine(shared.broker, batch.model, owner=f"batch:{batch.owner}", window=shared.settings.batches.window)
        self._driving = asyncio.ensure_future(drive(engine, files, lambda: self._count(files)))
        try:
            await self._driving
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._interrupted.is_set() or (task is not None and task.cancelling()):
                raise
        finally:
            self._driving = None

    def _count(self, files: BatchFiles) -> None:
        self._batch = replace(self._batch, completed=files.completed, failed=files.failed)

    async def _keep(self, file_id: str, place: Location, kind: str) -> str:
        """The output's name for callers: from now on it is a file as any other."""
        size = await undisturbed(size_of, place)
        now = time.time()
        record = FileRecord(
            id=file_id,
            owner=self._batch.owner,
            filename=f"{self._batch.id}_{kind}.jsonl",
            purpose="batch_output",
            bytes=size,
            created_at=now,
            expires_at=now + (self._batch.output_ttl_s or self._shared.settings.files.ttl_s),
        )
        await patiently(lambda: self._shared.broker.files.add(record))
        return file_id

    async def _fail(self, faults: Sequence[BatchFault]) -> None:
        self._batch = replace(self._batch, errors=tuple(faults))
        await self._end(BatchStatus.FAILED)

    async def _end(self, status: BatchStatus) -> None:
        self._batch = replace(self._batch.become(status), held=False)
        await patiently(self._tell)
        await undisturbed(discard, self._batch.id, self._places)
        counts = {"completed": self._batch.completed, "failed": self._batch.failed}
        log.info("A batch has ended.", extra=self._fields(status=status.value, **counts))

    def _fields(self, **more: object) -> dict[str, object]:
        return {"batch_id": self._batch.id, "request_id": self._batch.request_id, **more}


def _make(folder: Path) -> None:
    with failing_as_output(str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
