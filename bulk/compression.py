"""Compressed text: whole members one after another, so that a file cut between two of them is still a whole file."""

from __future__ import annotations

import gzip
import io
import zlib
from enum import StrEnum
from typing import BinaryIO, cast


class Compression(StrEnum):
    """How the bytes of a text file are packed, named by the suffix."""

    NONE = ""
    GZIP = ".gz"
    ZSTD = ".zst"


#: What unpacking raises on damaged bytes. A file that ends too early is an EOFError or an OSError.
DAMAGED = (OSError, EOFError, zlib.error)

_MAGIC = {b"\x1f\x8b": Compression.GZIP, b"\x28\xb5\x2f\xfd": Compression.ZSTD}


def member(compression: Compression, data: bytes) -> bytes:
    """`data` as one gzip member or zstd frame, the same for the same data; as it is without compression."""
    match compression:
        case Compression.NONE:
            return data
        case Compression.GZIP:
            return gzip.compress(data, mtime=0)
        case Compression.ZSTD:
            import pyarrow as pa

            return pa.Codec("zstd", 3).compress(data, asbytes=True)


def unpacked(compression: Compression, stream: BinaryIO) -> BinaryIO:
    """`stream` as it was before it was packed; reading raises one of `DAMAGED` where it cannot be unpacked."""
    match compression:
        case Compression.NONE:
            return stream
        case Compression.GZIP:
            return cast("BinaryIO", gzip.GzipFile(fileobj=stream))
        case Compression.ZSTD:
            import pyarrow as pa

            return cast(
                "BinaryIO", pa.CompressedInputStream(pa.PythonFile(cast("io.IOBase", stream), mode="r"), "zstd")
            )


def packed_after_all(beginning: bytes) -> Compression:
    """How a file is packed of which nobody said so."""
    return next((kind for magic, kind in _MAGIC.items() if beginning.startswith(magic)), Compression.NONE)
