"""Removes files whose time is over, and what uploads that broke off have left: content first, then what is known of it.

When it is killed in between, the next look finds the file again, and finishes. Several io workers may look at once:
removing twice is removing once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time

from bulk.client import open_broker
from bulk.errors import OutputFailed
from bulk.store import FileStore
from configs import Settings
from workers.duty import Duty, perform_until
from workers.threads import core_thread

log = logging.getLogger(__name__)

#: Seconds between looks.
SWEEP_EVERY_S = 60.0
#: Files that are removed between looks whether to stop.
AT_A_TIME = 100
#: Seconds after which a writer that has written nothing counts as dead. Callers may pause for seconds only.
STALE_S = 3600.0


class FileSweeper:
    """A thread of the io worker."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._store = FileStore(settings.files.storage)
        self._stopping = threading.Event()
        self._duties = (
            Duty("remove files that have expired", SWEEP_EVERY_S, self._remove_expired),
            Duty("remove what broken-off uploads left", SWEEP_EVERY_S, self._sweep),
        )
        self._thread = core_thread("file sweeper", self._run, in_background=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, grace_s: float) -> None:
        """Ends after the file that is being removed, within `grace_s`; whatever remains is found at the next start."""
        self._stopping.set()
        self._thread.join(grace_s)

    def hurry(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        perform_until(self._stopping, self._duties)

    def _remove_expired(self) -> bool:
        return asyncio.run(self._remove_some())

    async def _remove_some(self) -> bool:
        """Whether there may be more that can be removed now."""
        async with open_broker(self._settings) as broker:
            expired = await broker.files.expired(time.time(), AT_A_TIME)
            removed = 0
            for record in expired:
                if self._stopping.is_set():
                    break
                try:
                    self._store.remove(record.id)
                except OutputFailed as error:
                    log.error(
                        "An expired file cannot be removed; it is tried again.",
                        extra={"file_id": record.id, "cause": error.reason},
                    )
                    break
                await broker.files.remove(record.id)
                removed += 1
        if removed:
            log.info("Removed expired files.", extra={"count": removed})
        return removed == AT_A_TIME

    def _sweep(self) -> None:
        removed = self._store.sweep(STALE_S)
        if removed:
            log.info("Removed what broken-off uploads left.", extra={"count": removed})
