"""The Open Inference Protocol, version 2."""

from __future__ import annotations

import json

import httpx
import pytest

from api.open_inference import InferAnswer, ModelMetadata
from tests.api.conftest import RunningApi


def tensor(*data: object, name: str = "input", datatype: str = "BYTES", **more: object) -> dict[str, object]:
    return {"name": name, "shape": [len(data)], "datatype": datatype, "data": list(data), **more}


def infer(client: httpx.Client, model: str, *inputs: dict[str, object], **fields: object) -> httpx.Response:
    return client.post(f"/v2/models/{model}/infer", json={"inputs": list(inputs), **fields})


def test_the_server_tells_of_itself_and_its_health(client: httpx.Client) -> None:
    assert client.get("/v2").json()["name"] == "sheaf"
    assert client.get("/v2/health/live").json() == {"live": True}
    assert client.get("/v2/health/ready").json() == {"ready": True}


def test_a_model_tells_its_tensors(client: httpx.Client) -> None:
    echo = ModelMetadata.model_validate_json(client.get("/v2/models/echo").content)
    assert (echo.versions, echo.inputs[0].name, echo.outputs[0].name) == (["1"], "input", "output")
    assert client.get("/v2/models/echo/versions/1").json() == echo.model_dump()
    assert client.get("/v2/models/echo/ready").json() == {"name": "echo", "ready": True}
    failed = client.get("/v2/models/broken/ready")
    assert (failed.status_code, failed.json()["ready"]) == (503, False)


def test_rows_are_documents_in_and_out(client: httpx.Client) -> None:
    rows = [json.dumps(row) for row in ({"deep": [1, "ü"]}, None, 7)]
    answer = infer(client, "echo", tensor(*rows), id="call-7", outputs=[{"name": "output"}])
    told = InferAnswer.model_validate_json(answer.content)
    assert (told.model_name, told.model_version, told.id) == ("echo", "1", "call-7")
    [output] = told.outputs
    assert (output.name, output.datatype, output.shape) == ("output", "BYTES", [3])
    assert [json.loads(row) for row in output.data] == [{"deep": [1, "ü"]}, None, 7]
    assert "inference;dur=" in answer.headers["server-timing"]


def test_a_version_is_the_models_own(client: httpx.Client) -> None:
    body = {"inputs": [tensor("1")]}
    assert client.post("/v2/models/echo/versions/1/infer", json=body).status_code == 200
    assert client.post("/v2/models/echo/versions/2/infer", json=body).status_code == 404


def test_parameters_are_those_of_a_job(client: httpx.Client) -> None:
    assert infer(client, "echo", tensor("1"), parameters={"priority": "high", "timeout_s": 5}).status_code == 200
    assert infer(client, "echo", tensor("1"), parameters={"priority": "soon"}).status_code == 422
    assert infer(client, "echo", tensor("1"), parameters={"inputs": [2]}).status_code == 422


@pytest.mark.parametrize(
    ("inputs", "fields", "said"),
    [
        ([tensor("1", name="text")], {}, "inputs.0.name: the model takes 'input'"),
        ([tensor("1", datatype="FP32")], {}, "inputs.0.datatype: it is BYTES"),
        ([tensor("1") | {"shape": [2]}], {}, "inputs.0.shape: [2] does not fit 1 elements"),
        ([tensor()], {}, "inputs.0.shape"),
        ([tensor("1") | {"shape": []}], {}, "inputs.0.shape"),
        ([tensor("1") | {"shape": [True]}], {}, "inputs.0.shape.0"),
        ([tensor(7)], {}, "inputs.0.data.0: it must be a string"),
        ([tensor("{")], {}, "inputs.0.data.0: the model takes JSON documents"),
        ([tensor("1", parameters={"binary_data_size": 3})], {}, "binary tensors"),
        ([], {}, "inputs"),
        ([tensor("1"), tensor("2")], {}, "inputs"),
        ([tensor("1")], {"outputs": [{"name": "logits"}]}, "echo gives 'output'"),
    ],
)
def test_what_cannot_be_served_is_told(
    client: httpx.Client, inputs: list[dict[str, object]], fields: dict[str, object], said: str
) -> None:
    answer = infer(client, "echo", *inputs, **fields)
    assert answer.status_code == 422
    assert said in answer.json()["detail"]
    assert answer.json()["error"] == answer.json()["detail"]


@pytest.mark.parametrize("depth", [*range(246, 258), 1030])
def test_a_document_is_served_or_refused_however_deep(client: httpx.Client, depth: int) -> None:
    answer = infer(client, "echo", tensor("[" * depth + "]" * depth))
    assert answer.status_code in (200, 422, 502), answer.text


def test_the_binary_extension_is_refused(client: httpx.Client) -> None:
    headers = {"Inference-Header-Content-Length": "10", "content-type": "application/octet-stream"}
    answer = client.post("/v2/models/echo/infer", content=b"x" * 20, headers=headers)
    assert answer.status_code == 415
    assert "binary tensors" in answer.json()["error"]


def test_a_row_that_fails_fails_the_request_and_is_named(client: httpx.Client) -> None:
    answer = infer(client, "picky", tensor("1", "-1"))
    assert (answer.status_code, answer.json()["type"]) == (502, "urn:sheaf:error:job-failed")
    assert "inputs.0.data.1: ArithmeticError: minus one cannot be served" in answer.json()["error"]


def test_an_unknown_model_is_told_as_the_protocol_wants(api: RunningApi, client: httpx.Client) -> None:
    for path in ("/v2/models/none", "/v2/models/none/ready"):
        answer = client.get(path)
        assert answer.status_code == 404
        assert "there is no model 'none'" in answer.json()["error"]
