"""The OpenAPI document is complete and true, and a change of it shows in review."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker import Scope
from tests.api.front import Front, front, served
from tests.services import REPOSITORY, run_sheaf

SNAPSHOT = REPOSITORY / "docs" / "openapi.json"
MODELS: dict[str, object] = {
    "minilm": None,
    "echo": {"handler": "inference.handlers.echo:Echo", "max_batch_size": 16, "max_wait_ms": 0},
}


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with front(tmp_path_factory.mktemp("described"), models=MODELS, api={"max_wait_s": 2}) as made, served(made):
        made.key("somebody")
        yield made


def test_the_snapshot_is_the_document(tmp_path: Path) -> None:
    assert json.loads(run_sheaf("openapi", folder=tmp_path).stdout) == json.loads(SNAPSHOT.read_text()), (
        "the HTTP API has changed: look at the difference that `make openapi` makes in docs/openapi.json"
    )


def test_every_reference_leads_somewhere() -> None:
    text = SNAPSHOT.read_text()
    schemas = json.loads(text)["components"]["schemas"]
    named = re.findall(r'"\$ref": "(.*?)"', text)
    assert {name.removeprefix("#/components/schemas/") for name in named} == schemas.keys()


def test_every_operation_is_described_with_its_errors_and_its_key() -> None:
    document = json.loads(SNAPSHOT.read_text())
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            where = f"{method} {path}"
            assert operation["summary"], where
            assert operation["description"], where
            assert operation["tags"], where
            open_to_all = path in ("/livez", "/readyz", "/v2/health/live", "/v2/health/ready")
            assert ("security" in operation) is not open_to_all, where
            for status, response in operation["responses"].items():
                assert response["description"], where
                if status >= "400":
                    assert set(response["content"]) == {"application/problem+json"}, where
                    assert response["content"]["application/problem+json"]["examples"], where
            if "requestBody" in operation:
                assert "413" in operation["responses"], where


def test_what_is_promised_holds_for_whatever_is_sent(described: Front, tmp_path: Path) -> None:
    """schemathesis, with all its checks."""
    # What a schema cannot say (a cursor of another list, an address that may not be called) is refused with 422.
    (tmp_path / "schemathesis.toml").write_text(
        '[checks.positive_data_acceptance]\nexpected-statuses = ["2xx", "3xx", 401, 403, 404, 409, 422, 429, "5xx"]\n'
    )
    key = described.key("schemathesis", Scope.SUBMIT, Scope.READ, Scope.METRICS)
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{described.base}/openapi.json"]
    command += ["--header", f"Authorization: Bearer {key}", "--checks", "all", "--max-examples", "10", "--seed", "1"]
    command += ["--phases", "examples,coverage,fuzzing", "--no-color"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        cwd=tmp_path,
        env=os.environ | {"COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) generated", done.stdout)
    assert passed is not None, done.stdout[-2000:]
    assert int(passed[1]) > 300
    assert "Traceback" not in described.service.log()
