"""The settings of `/v1/files`: where content is kept, how much of it, and for how long."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator


class FileSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    #: A folder, relative to the working directory, or a URL that fsspec opens, such as s3://bucket/prefix. The API
    #: stores and reads files, the io worker removes them: both must reach the same storage.
    storage: str = "var/files"
    #: Of one file.
    max_bytes: Annotated[int, Field(ge=1)] = 536_870_912
    #: Of an owner's files together; 0 for no limit.
    quota_bytes: Annotated[int, Field(ge=0)] = 10_737_418_240
    #: How many files an owner may have; 0 for no limit.
    quota_files: Annotated[int, Field(ge=0)] = 100_000
    #: How long a file is kept unless its upload says otherwise.
    ttl_s: Annotated[int, Field(ge=1)] = 2_592_000

    @field_validator("storage")
    @classmethod
    def _can_hold_files(cls, value: str) -> str:
        if not value or value == "-" or "\0" in value:
            raise ValueError("it must be a folder, or a URL such as s3://bucket/prefix")
        if re.match(r"https?://", value):
            raise ValueError("files cannot be stored by http: use a folder, or a URL such as s3://bucket/prefix")
        return value
