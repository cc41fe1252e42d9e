"""That the accounting would notice: each kind of fault, as evidence made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker.dead import DeadLetter
from tests.chaos.accounting import Account, Fate, account
from tests.chaos.evidence import DoneLine, Evidence
from tests.chaos.ledger import Expectation, Ledger, Outcome, Producer, Sent

ID = "a-job"
SENT = Sent(ID, Producer.CELERY, "infer.echo", Expectation(Outcome.SUCCEEDS, "mine"), accepted_at=1000.0)
UNCERTAIN = replace(SENT, accepted_at=None)
SUCCESS = {"status": "SUCCESS", "result": "mine", "date_done": "1970-01-01T00:16:42+00:00"}
FAILURE = {"status": "FAILURE", "result": {"exc_type": "worker_lost", "exc_message": ["its worker was lost 5 times"]}}
DONE = DoneLine("worker-0", "then", "succeeded")
LETTER = DeadLetter("1", "infer.echo", "its worker was lost 5 times", ID, 0, 5, 0.0, b"", b"")
CLEAN = Evidence(results={ID: SUCCESS}, letters={}, done_lines={ID: [DONE]}, leftovers={}, warnings={})


def accounted(sent: Sent, evidence: Evidence) -> Account:
    ledger = Ledger()
    ledger.note(sent)
    return account(ledger, evidence, complaints=())


def test_a_job_with_its_own_output_and_one_workers_word_is_settled_once() -> None:
    result = accounted(SENT, CLEAN)
    assert result.balanced
    assert result.fates == {Fate.SUCCEEDED: 1}
    assert result.longest_s == 2.0


def test_a_result_whose_worker_never_heard_that_it_was_stored_is_no_fault() -> None:
    result = accounted(SENT, replace(CLEAN, done_lines={}))
    assert result.balanced
    assert result.settled_unheard == 1


def test_a_letter_with_a_reason_beside_its_stored_failure_is_accounted_for() -> None:
    result = accounted(SENT, replace(CLEAN, results={ID: FAILURE}, letters={ID: [LETTER]}, done_lines={}))
    assert result.balanced
    assert result.dead == 1


def test_a_job_that_its_row_makes_fail_has_to_fail_with_that_rows_mark() -> None:
    fails = replace(SENT, expected=Expectation(Outcome.FAILS, "my-mark"))
    stored = {"exc_type": "ArithmeticError", "exc_message": ["my-mark cannot be served"]}
    failed = {"status": "FAILURE", "result": stored, "date_done": SUCCESS["date_done"]}
    assert accounted(fails, replace(CLEAN, results={ID: failed})).fates == {Fate.FAILED: 1}
    stored["exc_message"] = ["another-mark cannot be served"]
    assert accounted(fails, replace(CLEAN, results={ID: failed})).fates == {Fate.WRONG: 1}


@pytest.mark.parametrize(
    ("changes", "fate"),
    [
        ({"results": {}, "done_lines": {}}, Fate.LOST),
        ({"results": {}}, Fate.LOST),
        ({"done_lines": {ID: [DONE, DONE]}}, Fate.TWICE),
        ({"letters": {ID: [LETTER]}}, Fate.TWICE),
        ({"results": {ID: FAILURE}, "letters": {ID: [LETTER, LETTER]}, "done_lines": {}}, Fate.TWICE),
        ({"results": {ID: SUCCESS | {"result": "another's"}}}, Fate.WRONG),
        ({"results": {ID: FAILURE}}, Fate.WRONG),
        ({"letters": {ID: [LETTER]}, "done_lines": {}}, Fate.WRONG),
        ({"letters": {ID: [replace(LETTER, reason="")]}, "done_lines": {}}, Fate.WRONG),
        (
            {
                "results": {ID: FAILURE},
                "letters": {ID: [replace(LETTER, reason="the message is not JSON")]},
                "done_lines": {},
            },
            Fate.WRONG,
        ),
    ],
)
def test_what_must_not_be_is_noticed(changes: dict[str, object], fate: Fate) -> None:
    result = accounted(SENT, replace(CLEAN, **changes))  # type: ignore[arg-type]  # each names a field of it
    assert result.fates == {fate: 1}
    assert [problem.job_id for problem in result.problems] == [ID]
    assert not result.balanced


def test_a_job_whose_submit_raised_need_not_exist() -> None:
    result = accounted(UNCERTAIN, replace(CLEAN, results={}, done_lines={}))
    assert result.balanced
    assert (result.total, result.uncertain) == (0, {Fate.NEVER_QUEUED: 1})


def test_a_job_whose_submit_raised_must_not_be_settled_twice_either() -> None:
    assert not accounted(UNCERTAIN, replace(CLEAN, done_lines={ID: [DONE, DONE]})).balanced


def test_a_job_that_nobody_was_told_of_is_noticed() -> None:
    result = accounted(SENT, replace(CLEAN, done_lines={ID: [DONE], "a-stranger": [DONE]}))
    assert [problem.job_id for problem in result.problems] == ["a-stranger"]
    assert not result.balanced


def test_leftovers_and_complaints_are_problems() -> None:
    assert not accounted(SENT, replace(CLEAN, leftovers={"sheaf:held:infer.echo:s": 2})).balanced
    ledger = Ledger()
    ledger.complain("a submit was answered 500")
    assert not account(ledger, CLEAN, complaints=()).balanced
    assert not account(Ledger(), CLEAN, complaints=["a worker ended by itself"]).balanced
