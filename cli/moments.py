"""Times as commands print them."""

from __future__ import annotations

from datetime import UTC, datetime


def moment(at: float) -> str:
    """Unix seconds in ISO 8601, to the second, in UTC."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
