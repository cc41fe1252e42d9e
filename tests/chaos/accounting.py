"""Ledger against evidence: what became of each job. Pure, so that its own tests can show that it would notice.

A job is *settled once* when its one stored result is what its row has to give and at most one worker said that it
settled it. It is *dead-lettered* when one dead letter names it, with a reason, beside its stored failure. An accepted
job that is neither is lost. A settle whose answer was lost leaves a result without a worker's word: that is no fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from statistics import median

from tests.chaos.evidence import Evidence
from tests.chaos.ledger import Ledger, Outcome, Sent


class Fate(StrEnum):
    SUCCEEDED = "succeeded"
    FAILED = "failed, as its row had to"
    DEAD = "dead-lettered"
    LOST = "lost"
    TWICE = "settled twice"
    WRONG = "settled with something else"
    #: Only for those whose producer was told of a failure.
    NEVER_QUEUED = "never queued"


SETTLED_ONCE = (Fate.SUCCEEDED, Fate.FAILED)
GOOD = (*SETTLED_ONCE, Fate.DEAD, Fate.NEVER_QUEUED)


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that must not be. `job_id` is empty where it is about no job in particular."""

    what: str
    job_id: str = ""
    sent: Sent | None = None


@dataclass(frozen=True, slots=True)
class Account:
    """What became of all jobs. Counts are of accepted jobs, but for `uncertain`."""

    accepted: Counter[str] = field(default_factory=Counter)
    fates: Counter[Fate] = field(default_factory=Counter)
    #: Fates of the jobs whose producer was told of a failure.
    uncertain: Counter[Fate] = field(default_factory=Counter)
    dead_reasons: Counter[str] = field(default_factory=Counter)
    #: Jobs whose submit had to be repeated.
    repeated: int = 0
    #: Results stored by a worker that never heard that they were.
    settled_unheard: int = 0
    #: From accepted, or due, to settled, seconds.
    longest_s: float = 0.0
    median_s: float = 0.0
    problems: Sequence[Problem] = ()

    @property
    def total(self) -> int:
        return sum(self.accepted.values())

    @property
    def settled_once(self) -> int:
        return sum(self.fates[fate] for fate in SETTLED_ONCE)

    @property
    def dead(self) -> int:
        return self.fates[Fate.DEAD]

    def uncertain_and_accepted(self, fate: Fate) -> int:
        return self.fates[fate] + self.uncertain[fate]

    @property
    def balanced(self) -> bool:
        """accepted = settled once + dead-lettered, nothing was settled twice or wrongly, and nothing else is amiss."""
        return self.total == self.settled_once + self.dead and not self.problems


def account(ledger: Ledger, evidence: Evidence, complaints: Sequence[str]) -> Account:
    """Look up each job of the ledger in the evidence, and each job of the evidence in the ledger."""
    accepted: Counter[str] = Counter()
    fates: Counter[Fate] = Counter()
    uncertain: Counter[Fate] = Counter()
    reasons: Counter[str] = Counter()
    problems = [Problem(complaint) for complaint in (*ledger.complaints, *complaints)]
    problems += [Problem(f"{count} left in {key}") for key, count in evidence.leftovers.items()]
    waits_s: list[float] = []
    known: set[str] = set()
    unheard = 0
    for sent in ledger.sent:
        if sent.id in known:
            problems.append(Problem("two submits were given this id", sent.id, sent))
        known.add(sent.id)
        fate, remark = fate_of(sent, evidence)
        (uncertain if sent.accepted_at is None else fates)[fate] += 1
        if sent.accepted_at is not None:
            accepted[sent.producer] += 1
        if fate not in GOOD:
            problems.append(Problem(f"{fate}: {remark}", sent.id, sent))
        elif fate is Fate.DEAD:
            reasons[evidence.letters[sent.id][0].reason] += 1
        elif fate in SETTLED_ONCE:
            unheard += sent.id not in evidence.done_lines
            if sent.accepted_at is not None:
                waits_s.append(_settled_at(evidence, sent.id) - max(sent.accepted_at, sent.due_at))
    strangers = (evidence.done_lines.keys() | evidence.letters.keys()) - known
    problems += [Problem("a job that no submit was told of", stranger) for stranger in sorted(strangers)]
    return Account(
        accepted=accepted,
        fates=fates,
        uncertain=uncertain,
        dead_reasons=reasons,
        repeated=sum(sent.tries > 1 for sent in ledger.sent),
        settled_unheard=unheard,
        longest_s=max(waits_s, default=0.0),
        median_s=median(waits_s) if waits_s else 0.0,
        problems=problems,
    )


def fate_of(sent: Sent, evidence: Evidence) -> tuple[Fate, str]:
    """What became of one job, and a remark for when that is not good."""
    letters = evidence.letters.get(sent.id, ())
    result = evidence.results.get(sent.id)
    done = evidence.done_lines.get(sent.id, ())
    if len(done) + len(letters) > 1:
        workers = ", ".join(f"{line.worker} {line.status} at {line.timestamp}" for line in done)
        return Fate.TWICE, f"{len(letters)} dead letters and {len(done)} workers' word ({workers})"
    if letters:
        return _fate_of_dead(sent, letters[0].reason, result)
    if result is None:
        if sent.accepted_at is None and not done:
            return Fate.NEVER_QUEUED, ""
        return Fate.LOST, "no result and no dead letter" + (", though a worker settled it" if done else "")
    return _fate_of_settled(sent, result)


def _fate_of_dead(sent: Sent, reason: str, result: object) -> tuple[Fate, str]:
    if not reason:
        return Fate.WRONG, "a dead letter without a reason"
    if not isinstance(result, dict) or result.get("status") != "FAILURE":
        return Fate.WRONG, f"a dead letter ({reason}) whose stored result is {result!r}"
    if "its worker was lost" not in reason and (
        sent.expected.outcome is not Outcome.DEAD or str(sent.expected.value) not in reason
    ):
        return Fate.WRONG, f"it had to run, but is dead: {reason}"
    return Fate.DEAD, ""


def _fate_of_settled(sent: Sent, result: object) -> tuple[Fate, str]:
    expected = sent.expected
    match result:
        case {"status": "SUCCESS", "result": output}:
            if expected.outcome is Outcome.SUCCEEDS and output == expected.value:
                return Fate.SUCCEEDED, ""
        case {"status": "FAILURE", "result": {"exc_type": "ArithmeticError", "exc_message": [message]}}:
            if expected.outcome is Outcome.FAILS and str(expected.value) in str(message):
                return Fate.FAILED, ""
    return Fate.WRONG, f"{result!r} instead of {expected}"


def _settled_at(evidence: Evidence, job_id: str) -> float:
    return datetime.fromisoformat(str(evidence.results[job_id]["date_done"])).timestamp()
