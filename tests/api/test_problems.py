"""Every error has its place in the one table, and each problem type is one thing."""

from __future__ import annotations

import inspect

import broker.errors
from api import problems
from api.kinds import BROKER_PROBLEMS, all_kinds
from broker.errors import BrokerError, BrokerUnavailable, LeaseLost, UnsupportedServer
from tests.services import REPOSITORY


def test_every_broker_error_has_a_status() -> None:
    classes = {
        found for _, found in inspect.getmembers(broker.errors, inspect.isclass) if issubclass(found, BrokerError)
    }
    assert classes == set(BROKER_PROBLEMS)


def test_no_two_kinds_share_a_type() -> None:
    kinds = all_kinds()
    assert len({kind.type for kind in kinds}) == len(kinds)
    assert set(BROKER_PROBLEMS.values()) <= set(kinds)


def test_the_page_of_problems_tells_of_each_with_its_cure() -> None:
    page = (REPOSITORY / "docs" / "PROBLEMS.md").read_text()
    rows = [f"| {kind.status} | `{kind.type}` | {kind.title} | {kind.cure} |" for kind in all_kinds()]
    assert [line for line in page.splitlines() if line.startswith("| ") and "urn:" in line] == rows


def test_what_the_broker_says_of_itself_is_told_to_the_log_alone() -> None:
    said = "Redis 6.0.16 on 10.0.0.7:6379"
    for error in (BrokerUnavailable(said), UnsupportedServer(said), LeaseLost(said), BrokerError(said)):
        told = problems.of(error)
        assert said not in told.detail
        assert said in (told.cause or "")
