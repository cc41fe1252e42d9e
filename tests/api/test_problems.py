"""Every error has its place in the one table, and each problem type is one thing."""

from __future__ import annotations

import inspect

import broker.errors
from api import problems
from api.problems import BROKER_PROBLEMS, Kind
from broker.errors import BrokerError


def test_every_broker_error_has_a_status() -> None:
    classes = {
        found for _, found in inspect.getmembers(broker.errors, inspect.isclass) if issubclass(found, BrokerError)
    }
    assert classes == set(BROKER_PROBLEMS)


def test_no_two_kinds_share_a_slug() -> None:
    kinds = [found for _, found in inspect.getmembers(problems) if isinstance(found, Kind)] + list(
        BROKER_PROBLEMS.values()
    )
    slugs = {kind.slug: kind for kind in kinds}
    assert len(slugs) == len(set(kinds))
