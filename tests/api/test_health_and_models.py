"""Probes, metrics, and the list of models."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from api.schemas import ModelList, ModelView
from tests.api.conftest import RunningApi

ROUTES = {
    "/v1/jobs",
    "/v1/jobs/{job_id}",
    "/v1/jobs/{job_id}/cancel",
    "/v1/jobs/{job_id}/deliveries",
    "/v1/jobs/{job_id}/events",
    "/v1/models",
    "/v1/models/{name}",
    "/v1/embeddings",
    "/v1/files",
    "/v1/files/{file_id}",
    "/v1/files/{file_id}/content",
    "/v1/batches",
    "/v1/batches/{batch_id}",
    "/v1/batches/{batch_id}/cancel",
    "/v1/batches/{batch_id}/deliveries",
    "/v2",
    "/v2/health/live",
    "/v2/health/ready",
    "/v2/models/{name}",
    "/v2/models/{name}/ready",
    "/v2/models/{name}/infer",
    "/v2/models/{name}/versions/{version}",
    "/v2/models/{name}/versions/{version}/ready",
    "/v2/models/{name}/versions/{version}/infer",
    "/livez",
    "/readyz",
    "/metrics",
}


def test_models_are_listed_with_their_state(client: httpx.Client) -> None:
    listed = ModelList.model_validate_json(client.get("/v1/models").content)
    states = {model.name: (model.state, model.workers) for model in listed.data}
    assert states == {"echo": ("ready", 1), "slow": ("ready", 1), "picky": ("ready", 1), "broken": ("failed", 0)}
    assert [model.queue for model in listed.data if model.name == "echo"] == ["infer.echo"]


def test_one_model_can_be_read(client: httpx.Client) -> None:
    broken = ModelView.model_validate_json(client.get("/v1/models/broken").content)
    assert "no.such.module" in str(broken.error)
    answer = client.get("/v1/models/none")
    assert answer.status_code == 404
    assert answer.json()["type"] == "urn:sheaf:error:unknown-model"


def test_a_model_that_failed_does_not_make_the_service_unready(client: httpx.Client) -> None:
    answer = client.get("/readyz")
    assert answer.status_code == 200
    assert answer.json()["models"]["broken"] == "failed"


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/metrics"])
def test_probes_may_ask_for_the_head_alone(client: httpx.Client, path: str) -> None:
    answer = client.head(path)
    assert (answer.status_code, answer.content) == (200, b"")


def test_the_root_leads_to_the_docs(client: httpx.Client) -> None:
    assert client.get("/").headers["location"] == "/docs"


def test_metrics_can_be_parsed_and_hold_what_was_asked(api: RunningApi, client: httpx.Client) -> None:
    client.post("/v1/jobs", json={"model": "echo", "input": 1}, headers={"prefer": "wait=5"})
    client.get("/no/such/page")
    families = {family.name: family for family in text_string_to_metric_families(client.get("/metrics").text)}
    requests = families["sheaf_http_requests"].samples
    assert any(
        sample.labels == {"method": "POST", "route": "/v1/jobs", "status": "200"} and sample.value >= 1
        for sample in requests
    )
    assert {sample.labels["route"] for sample in requests} <= ROUTES | {"/", "other"}
    depths = families["sheaf_queue_depth"].samples
    assert {(sample.labels["queue"], sample.labels["priority"]) for sample in depths} >= {
        ("infer.echo", step) for step in "0369"
    }


def test_the_docs_page_names_every_route(client: httpx.Client) -> None:
    assert "swagger" in client.get("/docs").text
    paths = client.get("/openapi.json").json()["paths"]
    assert set(paths) == ROUTES
    for path, methods in paths.items():
        for operation in methods.values():
            assert operation.get("summary"), path
            assert operation.get("description"), path
