"""A store that is a dictionary."""

from __future__ import annotations

from collections.abc import Iterator

import fsspec
import pytest


@pytest.fixture
def memory() -> Iterator[str]:
    """The URL of an empty folder in fsspec's memory."""
    yield "memory://rows"
    fsspec.filesystem("memory").store.clear()
