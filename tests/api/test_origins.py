"""Web pages of other origins, where no key is needed: a browser sends for them what it need not ask for first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from tests.api.front import Front, front
from tests.conftest import wait_until

JOB = {"model": "echo", "input": 1}
BATCH = {"endpoint": "/v1/jobs", "completion_window": "24h"}
FOREIGN: tuple[Mapping[str, str], ...] = (
    {"sec-fetch-site": "cross-site", "origin": "https://evil.example"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site", "origin": "http://127.0.0.1:1"},
    {"origin": "https://evil.example"},
    {"origin": "http://127.0.0.1:1"},
    {"origin": "null"},
)


@pytest.fixture(scope="module")
def unlocked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with front(tmp_path_factory.mktemp("unlocked")) as made:
        yield made


@pytest.fixture
def client(unlocked: Front) -> Iterator[httpx.Client]:
    with unlocked.client() as client:
        yield client


def submitted(client: httpx.Client) -> str:
    made: dict[str, str] = client.post("/v1/jobs", json=JOB).raise_for_status().json()
    return f"/v1/jobs/{made['id']}"


def begun(client: httpx.Client) -> tuple[str, str]:
    """A file, and a batch of it."""
    form = {"files": {"file": ("rows.jsonl", b"{}\n")}, "data": {"purpose": "batch"}}
    file_id = client.post("/v1/files", **form).raise_for_status().json()["id"]  # type: ignore[arg-type]  # of httpx
    batch = client.post("/v1/batches", json=BATCH | {"input_file_id": file_id}).raise_for_status().json()
    return f"/v1/files/{file_id}", f"/v1/batches/{batch['id']}"


@pytest.mark.parametrize("headers", FOREIGN)
def test_a_page_of_another_origin_changes_nothing(client: httpx.Client, headers: Mapping[str, str]) -> None:
    job, (file, batch) = submitted(client), begun(client)
    sent = [
        client.post(f"{job}/cancel", headers=headers),
        client.post(f"{batch}/cancel", headers=headers),
        client.delete(file, headers=headers),
        client.post("/v1/jobs", json=JOB, headers=headers),
        client.put("/v1/jobs/8f1c6c2e-9b0d-4f7a-9a6e-0c1d2b3a4f5e", json=JOB, headers=headers),
        client.post("/v1/embeddings", json={"model": "minilm", "input": "a"}, headers=headers),
        client.post("/v2/models/echo/infer", json={}, headers=headers),
    ]
    assert {(answer.status_code, answer.json()["type"]) for answer in sent} == {(403, "urn:sheaf:error:cross-origin")}
    assert client.get(job, headers=headers).json()["status"] == "queued"
    assert client.get(batch).json()["status"] == "validating"
    assert client.get(file).status_code == 200


@pytest.mark.parametrize("site", ["same-origin", "none", None])
def test_a_page_of_its_own_and_programs_may(unlocked: Front, client: httpx.Client, site: str | None) -> None:
    headers = {} if site is None else {"sec-fetch-site": site}
    assert client.post(f"{submitted(client)}/cancel", headers=headers).status_code == 200
    assert client.post(f"{submitted(client)}/cancel", headers=headers | {"origin": unlocked.base}).status_code == 200


def test_with_a_key_it_does_not_matter_which_page_sends_it(tmp_path: Path) -> None:
    with front(tmp_path) as locked, locked.client(locked.key("page")) as page, locked.client() as stranger:
        wait_until(lambda: stranger.get("/v1/jobs").status_code == 401, description="keys are in force")
        for headers in FOREIGN:
            assert page.post(f"{submitted(page)}/cancel", headers=headers).status_code == 200
            assert stranger.post("/v1/jobs/none/cancel", headers=headers).status_code == 401
