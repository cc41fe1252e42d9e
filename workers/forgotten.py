"""Leases that the server gave to this process in an answer that never arrived."""

from __future__ import annotations


class Forgotten:
    """Tells them from leases whose answer is on its way: those are known at the next look, which comes later than an
    answer may.
    """

    def __init__(self) -> None:
        self._unknown: set[bytes] = set()

    def among(self, unknown: set[bytes]) -> set[bytes]:
        """Of the tags that the process does not know of now, those that it did not know of at the last look either."""
        forgotten = unknown & self._unknown
        self._unknown = unknown - forgotten
        return forgotten
