"""Which room may import which: arrows point down only, and a pure room stays pure at run time too."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services import REPOSITORY

#: Room -> the rooms that it may import.
ARROWS: dict[str, set[str]] = {
    "batching": set(),
    "broker": set(),
    "bulk": {"broker", "configs", "schemas"},
    "configs": {"webhooks"},
    "inference": set(),
    "schemas": {"configs"},
    "telemetry": set(),
    "webhooks": set(),
    "api": {"broker", "bulk", "configs", "schemas", "telemetry", "webhooks"},
    "workers": {"batching", "broker", "bulk", "configs", "inference", "telemetry", "webhooks"},
    "benchmarks": {"broker", "cli", "configs", "inference"},
    "tuning": {"batching", "broker", "configs", "inference"},
    "cli": {"api", "benchmarks", "broker", "bulk", "configs", "telemetry", "tuning", "webhooks", "workers"},
}

#: Room -> what importing it must not pull in, directly or through others.
ABSENT: dict[str, set[str]] = {
    "batching": {"torch", "celery", "redis", "pydantic"},
    "broker": {"torch", "celery", "kombu"},
    "bulk.reading": {"torch", "celery", "redis", "pyarrow", "s3fs"},
    "bulk.writing": {"torch", "celery", "redis", "pyarrow", "s3fs"},
    "configs": {"torch", "celery", "redis"},
    "inference": {"torch", "celery", "redis", "transformers"},
    "schemas": {"torch", "celery", "redis"},
    "telemetry": {"torch", "celery", "redis"},
    "webhooks": {"torch", "celery", "redis", "aiohttp"},
    "api.app": {"aiohttp", "torch", "celery", "kombu", "transformers"},
    "cli.main": {"torch", "transformers", "matplotlib"},
    "workers.device": {"torch", "transformers"},
    "tuning.run": {"torch", "celery", "matplotlib"},
}


def imported(path: Path) -> set[str]:
    """Top-level names that a module imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{path}: a relative import"
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("room", ARROWS)
def test_a_room_imports_only_what_lies_below_it(room: str) -> None:
    for path in (REPOSITORY / room).rglob("*.py"):
        beyond = imported(path) & ARROWS.keys() - ARROWS[room] - {room}
        assert not beyond, f"{path.relative_to(REPOSITORY)} imports {beyond}"


def test_every_room_has_its_arrows() -> None:
    assert {path.parent.name for path in REPOSITORY.glob("*/__init__.py")} - {"tests"} == set(ARROWS)


def test_only_inference_knows_torch_and_only_workers_and_benchmarks_know_celery() -> None:
    for room in ARROWS:
        # The peers are other people's servers: they run torch, and we only talk to them.
        files = [path for path in (REPOSITORY / room).rglob("*.py") if "peers" not in path.parts]
        names = set[str]().union(*(imported(path) for path in files))
        assert room == "inference" or not names & {"torch", "transformers"}, room
        assert room in ("workers", "benchmarks") or not names & {"celery", "kombu"}, room


@pytest.mark.parametrize("module", ABSENT)
def test_importing_a_room_does_not_pull_in_what_it_must_not_know(module: str) -> None:
    program = f"import {module}, sys; print(*sorted(sys.modules.keys() & {ABSENT[module]!r}))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60, cwd=REPOSITORY
    )
    assert done.stdout.split() == []


def test_no_room_but_the_entry_points_reads_the_environment() -> None:
    """Settings are parsed once; `workers.app` is the entry point of Celery's own commands."""
    allowed = {"configs/layers.py", "workers/app.py", "workers/device.py"}
    for room in ARROWS.keys() - {"cli", "benchmarks"}:
        for path in (REPOSITORY / room).rglob("*.py"):
            if str(path.relative_to(REPOSITORY)) not in allowed:
                assert "os.environ" not in path.read_text(), path
                assert "getenv" not in path.read_text(), path
