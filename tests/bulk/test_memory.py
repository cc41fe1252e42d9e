"""A hundred times the rows take about the same memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.services import REPOSITORY

#: What may be held more for many rows than for few: parts and row groups of Parquet, buffers, what malloc keeps.
ALLOWED_MIB = {"jsonl": 24, "csv": 24, "jsonl.gz": 24, "jsonl.zst": 24, "parquet": 120}
ROWS = 50_000
#: A row's text, characters: all rows are 40 MB, far above what is allowed for text.
LENGTH = 800

#: Makes a file of rows, reads it into another, and tells the peak of its memory, MiB.
COPY = f"""
import resource, sys
from itertools import islice
from bulk.reading import read_rows
from bulk.rows import OutRow, Row
from bulk.writing import open_writer
from tests.bulk.files import at

suffix, folder, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
source, target = at(f"{{folder}}/in{{count}}.{{suffix}}"), at(f"{{folder}}/out{{count}}.{{suffix}}")
with open_writer(source) as writer:
    for first in range(0, count, 500):
        rows = [Row(n, n + 1, {{"text": str(n) * {LENGTH // 5}}}) for n in range(first, first + 500)]
        writer.write([OutRow(row, {{}}) for row in rows])
    writer.commit()
with read_rows(source) as rows, open_writer(target, head=rows.head) as writer:
    while window := list(islice(rows, 500)):
        writer.write([OutRow(row, {{"label": row.number}}) for row in window])
    writer.commit()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def peak_mib(suffix: str, folder: Path, rows: int) -> int:
    command = [sys.executable, "-c", COPY, suffix, str(folder), str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100, cwd=REPOSITORY)
    return int(done.stdout)


@pytest.mark.parametrize("suffix", ALLOWED_MIB)
def test_memory_does_not_grow_with_the_rows(suffix: str, tmp_path: Path) -> None:
    assert peak_mib(suffix, tmp_path, ROWS) - peak_mib(suffix, tmp_path, ROWS // 100) < ALLOWED_MIB[suffix]
