"""The name that an output gets when it is whole: by a rename on this machine, by one upload elsewhere."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from bulk.durable import failing_as_output, rename
from bulk.errors import OutputExists, OutputFailed
from bulk.locations import Location, exists, upload

_COPY_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Destination:
    """Where the whole output goes. Until then it grows in files of this machine, called `location` and a suffix."""

    location: Location
    overwrite: bool = False
    #: Where those files lie for a remote output; the working directory when None.
    folder: Path | None = None

    @property
    def partial(self) -> Path:
        """The file that becomes the output: text grows in it, Parquet is joined in it."""
        return self.location.beside(".partial", self.folder)

    @property
    def parts(self) -> Path:
        """The folder of the parts that Parquet is joined from."""
        return self.location.beside(".parts", self.folder)

    def check(self) -> None:
        """See that the output may have its name.

        Raises:
            OutputExists: it is taken, and was not to be overwritten.
            OutputFailed: no file can be there.
        """
        place, spool = self.location.url, self.partial.parent
        if not spool.is_dir():
            raise OutputFailed(place, f"there is no folder {spool}")
        path = self.location.path
        if path is not None and path.exists() and not stat.S_ISREG(path.stat().st_mode):
            raise OutputFailed(place, "it is there and no regular file; `-` is standard output")
        if not self.overwrite and exists(self.location):
            raise OutputExists(place, "it is there already: choose another name, or replace it with --overwrite")

    def deliver(self) -> None:
        """Give the partial file, which is whole and on disk, the output's name.

        Raises:
            OutputExists, OutputFailed: as in `check`, or the file cannot be moved there.
        """
        self.check()
        with failing_as_output(self.location.url):
            if self.location.path is not None:
                rename(self.partial, self.location.path)
                return
            with self.partial.open("rb") as file, upload(self.location, self.partial.stat().st_size) as stream:
                while data := file.read(_COPY_BYTES):
                    stream.write(data)
            self.partial.unlink()

    @contextmanager
    def receive(self, size: int) -> Iterator[BinaryIO]:
        """A stream whose bytes, about `size` of them, become the output at the end, or after an exception nothing.

        Raises:
            OutputExists, OutputFailed: as in `deliver`.
        """
        self.check()
        with failing_as_output(self.location.url):
            if self.location.path is None:
                with upload(self.location, size) as stream:
                    yield stream
                return
            with self.partial.open("wb") as file:
                yield cast("BinaryIO", file)
                file.flush()
                os.fsync(file.fileno())
            self.check()
            rename(self.partial, self.location.path)
