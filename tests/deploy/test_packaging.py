"""pyproject.toml, the lock files, the Makefile and continuous integration agree with one another."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib.metadata import version

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.services import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
LOCKS = [f"requirements/{name}.lock" for name in ("runtime", "dev", "model")]
PEER_LOCKS = [f"benchmarks/peers/{name}.lock" for name in ("celery-batches", "servers")]


def locked(name: str) -> dict[str, str]:
    text = (REPOSITORY / "requirements" / name).read_text()
    return {canonicalize_name(found[0]): found[1] for found in re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)}


def requirements(texts: list[str]) -> list[Requirement]:
    return [Requirement(text) for text in texts]


def test_the_lock_holds_every_dependency_in_its_range() -> None:
    versions = locked("runtime.lock") | locked("torch.lock")
    for requirement in requirements(PROJECT["dependencies"]):
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement


@pytest.mark.parametrize("extra", ["gpu", "dev", "bench"])
def test_the_lock_holds_every_extra_in_its_range(extra: str) -> None:
    versions = locked("dev.lock")
    for requirement in requirements(PROJECT["optional-dependencies"][extra]):
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement


def test_what_both_locks_hold_has_one_version() -> None:
    runtime, dev = locked("runtime.lock"), locked("dev.lock")
    assert {name: dev[name] for name in runtime} == runtime


@pytest.mark.parametrize("name", LOCKS + PEER_LOCKS)
def test_every_line_of_a_lock_has_a_hash_and_names_no_place(name: str) -> None:
    text = (REPOSITORY / name).read_text()
    pinned = re.split(r"^(?=[\w.-]+==)", text, flags=re.MULTILINE)[1:]
    assert pinned
    assert all("--hash=sha256:" in entry for entry in pinned)
    assert not re.search(r"--index-url|--find-links|--extra-index|file:|https?://|(^|[ =])/", text)


def test_torch_is_locked_alone_and_its_own_dependencies_with_the_others() -> None:
    assert locked("torch.lock").keys() == {"torch"}
    assert "torch" not in locked("runtime.lock") | locked("dev.lock")
    assert not [name for name in locked("runtime.lock") if name.startswith(("nvidia-c", "triton"))]


def test_the_packages_that_were_asked_for_are_dependencies() -> None:
    names = {canonicalize_name(requirement.name) for requirement in requirements(PROJECT["dependencies"])}
    assert names >= {"celery", "redis", "torch", "transformers", "fastapi", "uvicorn", "flower", "prometheus-client"}
    assert "pytest" in {requirement.name for requirement in requirements(PROJECT["optional-dependencies"]["dev"])}


def test_the_installed_version_is_the_one_in_the_changelog() -> None:
    assert version("sheaf") == PROJECT["version"]
    assert f"## [{PROJECT['version']}]" in (REPOSITORY / "CHANGELOG.md").read_text()


def test_make_lists_its_targets_with_a_line_each() -> None:
    command = ["make", "--no-print-directory", "help"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=30)
    listed = [line.split()[0] for line in done.stdout.splitlines()]
    assert listed == ["help", "setup", "serve", "test", "lint", "format", "bench", "chaos", "openapi", "lock", "clean"]


def test_continuous_integration_calls_what_the_readme_says() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    for line in ("make lint", "make test"):
        assert line in (REPOSITORY / ".ci/run").read_text()
        assert line in readme
