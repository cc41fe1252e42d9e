"""What the documents name has to be there."""

from __future__ import annotations

import re

import pytest

from tests.services import REPOSITORY

DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(f"docs/{one.name}" for one in REPOSITORY.glob("docs/*.md")),
]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_test_that_a_document_names_exists(document: str) -> None:
    written = "\n".join(path.read_text() for path in (REPOSITORY / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", (REPOSITORY / document).read_text()))
    assert {name for name in named if f"def {name}(" not in written} == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_document_that_a_document_links_exists(document: str) -> None:
    path = REPOSITORY / document
    links = re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []
