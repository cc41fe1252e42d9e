"""Loading, isolating bad rows, keeping every outcome in its place; with handlers as a user would write them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

from inference import Encoded, Handler, InvalidInput, Model, ModelLoadError, ModelSpec, RowError


class Numbers(Handler):
    """Doubles numbers; knows all ways to go wrong."""

    uses_torch = False

    def load(self, spec: ModelSpec, device: str, dtype: object) -> None:
        if spec.options.get("broken"):
            raise OSError("the disk is on fire")
        self.batches: list[int] = []

    def preprocess(self, rows: Sequence[object]) -> list[Encoded | RowError]:
        if "bad" in rows:
            raise InvalidInput("bad is no number")
        return [Encoded(row) for row in rows]

    def infer(self, batch: Sequence[Encoded]) -> object:
        self.batches.append(len(batch))
        values = [row.data for row in batch]
        if 13 in values:
            raise ZeroDivisionError("thirteen")
        return values

    def postprocess(self, raw: object) -> Sequence[object]:
        assert isinstance(raw, list)
        return raw[:-1] if 99 in raw else [2 * value for value in raw]


def model(**changes: object) -> Model:
    fields: dict[str, object] = {"name": "numbers", "handler": f"{__name__}:Numbers"}
    return Model.load(ModelSpec(**(fields | changes)), "cpu")  # type: ignore[arg-type]  # a test's shorthand


def run(loaded: Model, rows: Sequence[object]) -> list[object | RowError]:
    encoded = [row for row in loaded.encode(rows) if isinstance(row, Encoded)]
    return loaded.finish(loaded.infer(encoded))


def test_rows_come_out_in_their_order() -> None:
    assert run(model(), [1, 2, 3]) == [2, 4, 6]


def test_a_batch_that_was_split_says_what_split_it() -> None:
    loaded = model()
    encoded = [row for row in loaded.encode([1, 2, 13, 4]) if isinstance(row, Encoded)]
    assert loaded.infer(encoded).split_by == "ZeroDivisionError"
    assert loaded.infer(encoded[:2]).split_by is None
    assert loaded.infer(encoded[2:3]).split_by is None


@pytest.mark.parametrize("position", range(8))
def test_a_row_that_makes_its_batch_raise_fails_alone(position: int) -> None:
    rows = [1] * 8
    rows[position] = 13
    outcomes = run(model(), rows)
    error = outcomes.pop(position)
    assert outcomes == [2] * 7
    assert isinstance(error, RowError)
    assert (error.type, error.message, error.module) == ("ZeroDivisionError", "thirteen", "builtins")
    assert "ZeroDivisionError" in str(error.traceback)


def test_several_bad_rows_are_all_found() -> None:
    outcomes = run(model(), [13, 1, 13, 2])
    assert [isinstance(outcome, RowError) for outcome in outcomes] == [True, False, True, False]


def test_a_row_that_cannot_be_encoded_fails_alone() -> None:
    encoded = model().encode([1, "bad", 2])
    assert [isinstance(row, RowError) for row in encoded] == [False, True, False]
    assert encoded[1] == RowError("InvalidInput", "bad is no number", "inference.errors")


def test_a_wrong_number_of_outputs_fails_its_batch_and_shifts_nothing() -> None:
    outcomes = run(model(), [1, 99, 2])
    assert [outcome.type for outcome in outcomes if isinstance(outcome, RowError)] == ["WrongOutputCount"] * 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"handler": "no.such:Class"}, "cannot be imported"),
        ({"handler": f"{__name__}:Nothing"}, "cannot be imported"),
        ({"handler": "builtins:dict"}, r"no subclass of inference\.Handler"),
        ({"handler": "inference:Handler"}, "cannot be made"),
        ({"handler": None, "task": "poetry"}, "task 'poetry' is unknown: it is one of embedding"),
        ({"options": {"broken": True}}, "OSError: the disk is on fire"),
    ],
)
def test_a_model_that_cannot_be_loaded_says_why(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=f"model numbers: .*{reason}"):
        model(**changes)


def test_a_handler_without_torch_does_not_import_it() -> None:
    program = (
        "import sys; from inference import Model, ModelSpec;"
        "Model.load(ModelSpec('echo', handler='inference.handlers.echo:Echo'), 'cpu');"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
