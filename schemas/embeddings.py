"""Embeddings as OpenAI's API has them: what is asked for, and the answer.

Source: OpenAI API reference, "Create embeddings".
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from configs import ModelSettings

#: Most texts of one request.
MAX_TEXTS = 2048


class EmbeddingsRequest(BaseModel):
    """One text, or up to 2048."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"model": "minilm", "input": ["a text", "another one"]}]},
    )

    model: str
    input: str | list[str] = Field(min_length=1, max_length=None, description="A text, or a list of 1 to 2048 texts.")
    encoding_format: Literal["float", "base64"] = Field(
        default="float", description="base64: little-endian 32-bit floats."
    )
    dimensions: int | None = Field(
        default=None,
        strict=True,
        ge=1,
        description="Cut vectors to this length, where `matryoshka_dimensions` allows it.",
    )
    user: str | None = Field(default=None, description="Taken, and not looked at.")

    @field_validator("input", mode="before")
    @classmethod
    def _texts(cls, value: object) -> object:
        rows = value if isinstance(value, list) else [value]
        if any(isinstance(row, int | list) and not isinstance(row, bool) for row in rows):
            raise ValueError("lists of tokens are not taken, for only the model knows its tokens: send texts")
        if not rows or any(row == "" for row in rows):
            raise ValueError("there must be at least one text, and none may be empty")
        if len(rows) > MAX_TEXTS:
            raise ValueError(f"there may be {MAX_TEXTS} texts in a request, not {len(rows)}")
        if not all(isinstance(row, str) for row in rows):
            raise ValueError("send a text, or a list of texts")
        return value

    @property
    def texts(self) -> list[str]:
        return self.input if isinstance(self.input, list) else [self.input]

    def misfit(self, models: Mapping[str, ModelSettings]) -> tuple[str, str] | None:
        """The field for which its model, one of these, cannot serve it, and why; None when it can."""
        model = models[self.model]
        if model.task != "embedding":
            fit = ", ".join(name for name, other in models.items() if other.task == "embedding")
            return "model", f"{self.model} makes no embeddings; those that do: {fit or 'none'}"
        allowed = model.matryoshka_dimensions
        if self.dimensions is None or self.dimensions in allowed:
            return None
        if not allowed:
            return "dimensions", f"vectors of {self.model} cannot be cut: leave it out"
        return "dimensions", f"vectors of {self.model} can be cut to {', '.join(map(str, allowed))}"

    def answer(self, vectors: Sequence[Sequence[float]], tokens: int) -> dict[str, object]:
        """The answer, for as many vectors as there are texts."""
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": self._encoded(vector)}
                for index, vector in enumerate(vectors)
            ],
            "model": self.model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    def _encoded(self, vector: Sequence[float]) -> Sequence[float] | str:
        if self.dimensions is not None:
            vector = vector[: self.dimensions]
            # Of unit length again, as Kusupati et al., "Matryoshka Representation Learning", 2022, use them.
            length = math.hypot(*vector) or 1.0
            vector = [value / length for value in vector]
        if self.encoding_format == "float":
            return vector
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


class EmbeddingView(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class UsageView(BaseModel):
    prompt_tokens: int
    total_tokens: int


class Embeddings(BaseModel):
    object: Literal["list"]
    data: list[EmbeddingView]
    model: str
    usage: UsageView
