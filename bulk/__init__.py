"""Rows through a model at the lowest priority: files of any size (`bulk.run`), iterators of a program (`bulk.map`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bulk.mapping import Failure, RowFailed, amap, map  # noqa: A004  # as in `bulk.mapping`

__all__ = ["Failure", "RowFailed", "amap", "map"]


def __getattr__(name: str) -> Any:
    """Whoever reads files alone need not load what talks to the broker."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from bulk import mapping

    return getattr(mapping, name)
