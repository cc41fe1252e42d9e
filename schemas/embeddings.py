"""Embeddings as OpenAI's API has them: what is asked for, and the answer.

Source: OpenAI API reference, "Create embeddings".
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Literal, LiteralString

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from configs import ModelSettings

#: Most texts of one request.
MAX_TEXTS = 2048

_TOKENS: LiteralString = "lists of tokens are not taken, for only the model knows its tokens: send texts"
_EMPTY: LiteralString = "there must be at least one text, and none may be empty"
_NO_TEXT: LiteralString = "send a text, or a list of texts"


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
        if not isinstance(value, list):
            if fault := _fault(value):
                raise ValueError(fault)
            return value
        if value and all(_is_token(row) for row in value):
            raise ValueError(_TOKENS)
        if not value:
            raise ValueError(_EMPTY)
        if len(value) > MAX_TEXTS:
            raise ValueError(f"there may be {MAX_TEXTS} texts in a request, not {len(value)}")
        faults = [(index, row, fault) for index, row in enumerate(value) if (fault := _fault(row))]
        if faults:
            # Each under its own path.
            errors = [
                InitErrorDetails(type=PydanticCustomError("text", fault), loc=(index,), input=row)
                for index, row, fault in faults
            ]
            raise ValidationError.from_exception_data("input", errors)
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


def _fault(row: object) -> LiteralString | None:
    """Why this is no text that can be embedded; None for one that may be."""
    if _is_token(row):
        return _TOKENS
    if row == "":
        return _EMPTY
    return None if isinstance(row, str) else _NO_TEXT


def _is_token(row: object) -> bool:
    return isinstance(row, int | list) and not isinstance(row, bool)


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
