"""What a line's body asks for, by endpoint: the rows that the model gets, and the answer that their outcomes make.

An answer is what the endpoint would have given over HTTP. Pure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from broker import JobFailure
from bulk.chunks import Outcome
from bulk.formats.jsonl import json_text
from configs import ModelSettings
from schemas import rows
from schemas.embeddings import EmbeddingsRequest

#: The service's models, by name.
Models = Mapping[str, ModelSettings]


@dataclass(frozen=True, slots=True)
class Answer:
    """One line's answer: an HTTP status and a body."""

    status: int
    body: dict[str, object]

    @property
    def succeeded(self) -> bool:
        return self.status == 200


def refusal(message: str, param: str | None, *, kind: str = "invalid-request", status: int = 422) -> Answer:
    """An answer in the words of OpenAI's errors."""
    error = {"message": message, "type": kind, "param": param, "code": kind}
    return Answer(status, {"error": error})


class Call(ABC):
    """One body that can be served."""

    @abstractmethod
    def rows(self) -> list[bytes]:
        """The model's inputs, JSON; at least one."""

    @abstractmethod
    def answer(self, outcomes: Sequence[Outcome]) -> Answer:
        """Of one outcome a row, in their order."""


@dataclass(frozen=True, slots=True)
class EmbeddingsCall(Call):
    request: EmbeddingsRequest

    @classmethod
    def of(cls, body: object, models: Models) -> Call | Answer:
        request = EmbeddingsRequest.model_validate(body)
        misfit = request.misfit(models)
        return cls(request) if misfit is None else refusal(misfit[1], misfit[0])

    def rows(self) -> list[bytes]:
        return [json_text(text) for text in self.request.texts]

    def answer(self, outcomes: Sequence[Outcome]) -> Answer:
        vectors: list[Any] = []
        for index, outcome in enumerate(outcomes):
            if outcome.failure is not None:
                many = isinstance(self.request.input, list)
                return _failed(outcome.failure, f"input.{index}" if many else "input")
            vectors.append(outcome.output)
        return Answer(200, self.request.answer(vectors, sum(outcome.tokens for outcome in outcomes)))


class JobBody(BaseModel):
    """What a line may say of a job; priority, timeout and webhook are the batch's."""

    model_config = ConfigDict(extra="forbid")

    model: str
    input: Any = None
    inputs: list[Any] | None = Field(default=None, min_length=1)
    metadata: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_of(self) -> JobBody:
        if ("input" in self.model_fields_set) == (self.inputs is not None):
            raise ValueError("give either `input` (one row) or `inputs` (a list of rows)")
        return self


@dataclass(frozen=True, slots=True)
class JobCall(Call):
    body: JobBody

    @classmethod
    def of(cls, body: object, models: Models) -> Call | Answer:
        wanted = JobBody.model_validate(body)
        task = models[wanted.model].task
        name = "input" if wanted.inputs is None else "inputs"
        try:
            if wanted.inputs is not None:
                rows.check_inputs(task, wanted.inputs)
            else:
                rows.check_input(task, wanted.input)
        except ValidationError as error:
            return _invalid(error, name)
        return cls(wanted)

    def rows(self) -> list[bytes]:
        return [json_text(row) for row in ([self.body.input] if self.body.inputs is None else self.body.inputs)]

    def answer(self, outcomes: Sequence[Outcome]) -> Answer:
        told: dict[str, object]
        if self.body.inputs is None:
            if outcomes[0].failure is not None:
                return _failed(outcomes[0].failure, "input")
            told = {"output": outcomes[0].output}
        else:
            told = {"outputs": [_row(outcome) for outcome in outcomes]}
        usage = {"input_tokens": sum(outcome.tokens for outcome in outcomes)}
        body = {"object": "job", "model": self.body.model, "status": "succeeded", **told}
        return Answer(200, {**body, "metadata": self.body.metadata, "usage": usage})


#: Path -> what makes a call of a body, or says at once how it is answered. Raises `ValidationError`.
ENDPOINTS: Mapping[str, Callable[[object, Models], Call | Answer]] = {
    "/v1/embeddings": EmbeddingsCall.of,
    "/v1/jobs": JobCall.of,
}


def call_of(endpoint: str, body: object, models: Models) -> Call | Answer:
    """The call that a body stands for, or the answer to one that cannot be served."""
    try:
        return ENDPOINTS[endpoint](body, models)
    except ValidationError as error:
        return _invalid(error)


def _invalid(error: ValidationError, *above: str) -> Answer:
    """`above` is the path of what was looked at."""
    first = error.errors(include_url=False)[0]
    param = ".".join(map(str, (*above, *first["loc"]))) or None
    message = first["msg"].removeprefix("Value error, ")
    return refusal(f"{param}: {message}" if param else message, param)


def _failed(failure: JobFailure, param: str) -> Answer:
    if failure.type == rows.INVALID_INPUT:
        return refusal(failure.message, param)
    return refusal(f"{failure.type}: {failure.message}", param, kind="job-failed", status=502)


def _row(outcome: Outcome) -> dict[str, object]:
    if outcome.failure is None:
        return {"output": outcome.output}
    return {"error": {"type": outcome.failure.type, "message": outcome.failure.message}}
