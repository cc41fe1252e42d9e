"""An API process without workers, on a broker of its own, and keys for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from broker import KeyRegistry, Rate, Scope
from broker.access import issue
from broker.embedded import EmbeddedServer
from tests.conftest import free_port, wait_until
from tests.services import Service, answers, run_sheaf

ECHO: Mapping[str, object] = {"handler": "inference.handlers.echo:Echo", "max_batch_size": 16, "max_wait_ms": 0}


@dataclass
class Front:
    """What a test needs of it. `service` runs the API."""

    base: str
    service: Service
    broker: EmbeddedServer
    config: dict[str, Any]
    folder: Path

    def sheaf(self, *arguments: str) -> str:
        """Run a command with the same settings; returns what it printed."""
        file = self.folder / "command.yaml"
        file.write_text(yaml.safe_dump(self.config))
        done = run_sheaf("--config", str(file), *arguments, folder=self.folder)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def key(
        self,
        owner: str,
        *scopes: Scope,
        priorities: Sequence[str] = ("high", "normal", "low"),
        rate: Rate | None = None,
        max_in_flight: int | None = None,
        expires_at: float | None = None,
    ) -> str:
        """A new key of this owner, made as `sheaf keys create` makes it."""
        text, known = issue(
            owner,
            scopes=scopes or (Scope.SUBMIT, Scope.READ),
            priorities=priorities,
            rate=rate,
            max_in_flight=max_in_flight,
            expires_at=expires_at,
        )
        with KeyRegistry(self.broker.url) as keys:
            keys.add(known)
        return text

    def client(self, key: str | None = None, **headers: str) -> httpx.Client:
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        return httpx.Client(base_url=self.base, timeout=20, headers=headers)


@contextmanager
def front(
    folder: Path, *, host: str = "127.0.0.1", api: Mapping[str, object] | None = None, **sections: object
) -> Iterator[Front]:
    """`api` and `sections` are more settings."""
    port = free_port()
    with EmbeddedServer(free_port(), folder / "valkey") as broker:
        config: dict[str, Any] = {
            "broker": {"url": broker.url},
            "models": {"minilm": {"max_batch_size": 16}, "echo": dict(ECHO)},
            "workers": {"metrics_port": free_port()},
        } | sections
        config["broker"] |= {"url": broker.url}
        config["api"] = {"host": host, "port": port, "max_wait_s": 5} | dict(api or {})
        with Service("api", config=config, folder=folder / "api") as service:
            base = f"http://127.0.0.1:{port}"
            wait_until(lambda: answers(f"{base}/livez"), description=f"alive: {service.log_path}", timeout_s=60)
            yield Front(base, service, broker, config, folder)


@contextmanager
def served(made: Front) -> Iterator[Service]:
    """A worker for it."""
    with Service("device", "--device", "cpu", config=made.config, folder=made.folder / "worker") as worker:
        wait_until(lambda: answers(f"{made.base}/readyz"), description=f"ready: {worker.log_path}", timeout_s=60)
        yield worker
