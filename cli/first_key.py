"""An API that had to listen on loopback, for want of keys, is told to stop when there is one, and started again."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

from api import binding
from configs import Settings


class FirstKey:
    """Looks for it from a thread of its own; then `came` is true, and this process gets a SIGTERM."""

    def __init__(self, settings: Settings) -> None:
        self.came = False
        self._settings = settings
        threading.Thread(target=self._look, name="first key", daemon=True).start()

    def _look(self) -> None:
        asyncio.run(binding.first_key(self._settings))
        self.came = True
        os.kill(os.getpid(), signal.SIGTERM)
