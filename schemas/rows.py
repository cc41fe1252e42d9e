"""What a row of each task has to look like; handlers check their rows themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ConfigDict, TypeAdapter

#: The type of a row's error that is the caller's fault.
INVALID_INPUT = "InvalidInput"

_STRICT = ConfigDict(strict=True)
_INPUT: dict[str | None, TypeAdapter[Any]] = {"embedding": TypeAdapter(str, config=_STRICT)}
_INPUTS: dict[str | None, TypeAdapter[Any]] = {"embedding": TypeAdapter(list[str], config=_STRICT)}


def check_input(task: str | None, row: object) -> None:
    """Raises `pydantic.ValidationError`."""
    if (adapter := _INPUT.get(task)) is not None:
        adapter.validate_python(row)


def check_inputs(task: str | None, rows: Sequence[object]) -> None:
    """Raises `pydantic.ValidationError` that names the rows that are wrong."""
    if (adapter := _INPUTS.get(task)) is not None:
        adapter.validate_python(rows)


def input_schema(task: str | None) -> dict[str, Any]:
    """JSON Schema of one row; `{}` takes anything."""
    adapter = _INPUT.get(task)
    return {} if adapter is None else adapter.json_schema()
