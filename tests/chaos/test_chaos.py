"""The chaos run's short form: every kind of fault within 40 seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.accounting import Fate
from tests.chaos.ledger import Producer
from tests.chaos.run import run


@pytest.mark.timeout(240)
def test_every_accepted_job_is_settled_once_or_dead_lettered_whatever_breaks(tmp_path: Path) -> None:
    report = run(tmp_path / "run", minutes=2 / 3, seed=7, tell=print)
    print(report.as_table())
    account = report.account
    assert report.missing_faults == []
    assert all(account.accepted[producer] for producer in Producer)
    assert account.uncertain_and_accepted(Fate.LOST) == 0
    assert account.uncertain_and_accepted(Fate.TWICE) == 0
    assert account.uncertain_and_accepted(Fate.WRONG) == 0
    assert account.problems == []
    assert account.total == account.settled_once + account.dead
