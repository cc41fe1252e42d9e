"""What tells one state of an input from another without reading all of it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

from bulk.errors import InputFailed, NotResumable
from bulk.locations import Location, describe

#: How much of either end of a local file is looked at, bytes.
_END_BYTES = 64 << 10

# Under these names the file systems of fsspec tell a content's digest and its time of change.
_DIGESTS = ("ETag", "etag", "md5Hash", "content_md5", "crc32c", "checksum")
_TIMES = ("LastModified", "last_modified", "updated", "mtime", "modified", "created")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """One state of an input: its size in bytes, when it was written, and a digest; empty where the place tells none."""

    size: int | None
    modified: str
    digest: str
    #: Whether the digest is of all of the content: then it alone decides.
    whole: bool = False

    @classmethod
    def of(cls, location: Location) -> Fingerprint:
        """Look at the file: a local one's two ends are read, of a remote one only what the store tells.

        Raises:
            NotResumable: standard input has no state that could be compared later.
            InputFailed: the file cannot be looked at.
        """
        if location.is_standard:
            raise NotResumable("standard input is gone once read: give the input a name to be able to resume")
        if location.path is None:
            return _of_remote(describe(location))
        try:
            with location.path.open("rb") as file:
                status = os.fstat(file.fileno())
                digest = hashlib.sha256(file.read(_END_BYTES))
                file.seek(max(0, status.st_size - _END_BYTES))
                digest.update(file.read(_END_BYTES))
        except OSError as error:
            raise InputFailed(location.url, error.strerror or str(error)) from error
        whole = status.st_size <= 2 * _END_BYTES
        return cls(status.st_size, str(status.st_mtime_ns), digest.hexdigest(), whole)

    def difference(self, now: Fingerprint) -> str | None:
        """The first thing in which `now` differs, in words; None when nothing does."""
        if self.size != now.size:
            return f"it had {self.size} bytes and has {now.size} now"
        if self.digest != now.digest:
            return "its content is another"
        if (self.whole and now.whole) or self.modified == now.modified:
            return None
        again = f": touch -d @{_seconds(self.modified)}" if self.modified.isdecimal() else ""
        return (
            "it was written to after the run began, and it is not looked at as a whole; where its content is the same, "
            f"restore its modification time too{again}"
        )


def _of_remote(told: dict[str, object]) -> Fingerprint:
    def first(names: tuple[str, ...]) -> str:
        return next((str(told[name]) for name in names if told.get(name)), "")

    size = told.get("size")
    digest = first(_DIGESTS)
    return Fingerprint(size if isinstance(size, int) else None, first(_TIMES), digest, bool(digest))


def _seconds(modified_ns: str) -> str:
    return f"{int(modified_ns) // 10**9}.{int(modified_ns) % 10**9:09}"
