"""The settings of batches: files of requests that are run at the lowest priority."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class BatchSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    #: Lines of one batch.
    max_lines: Annotated[int, Field(ge=1)] = 1_000_000
    #: Batches of one owner that have not ended.
    max_open: Annotated[int, Field(ge=1)] = 100
    #: Batches that one io worker runs at a time; further ones wait. An owner alone has half of these places, and less
    #: beside others (`workers.portions`).
    max_running: Annotated[int, Field(ge=1, le=256)] = 16
    #: Rows of each that are under way at a time.
    window: Annotated[int, Field(ge=1)] = 2000
    #: Longest `completion_window`.
    max_window_s: Annotated[int, Field(ge=60)] = 7 * 86_400
    #: Where the io worker keeps how far each batch is, relative to the working directory. What is lost with it is done
    #: again.
    work_dir: Path = Path("var/batches")
