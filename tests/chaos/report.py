"""The outcome of a run, as a table for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from tests.chaos.accounting import Account, Fate, Problem
from tests.chaos.faults import Fault, FaultKind
from tests.chaos.ledger import Producer

WIDTH = 64
#: Problems that the table shows in full, with their trail; the JSON has the trails of so many too.
SHOWN = 10


@dataclass(frozen=True, slots=True)
class Trail:
    """A problem, and what was found about its job."""

    problem: Problem
    lines: Sequence[str]


@dataclass(frozen=True, slots=True)
class Report:
    seed: int
    minutes: float
    faults: Sequence[Fault]
    fault_counts: Mapping[FaultKind, int]
    account: Account
    warnings: Mapping[str, int]
    trails: Sequence[Trail]

    @property
    def missing_faults(self) -> list[FaultKind]:
        return [kind for kind, count in self.fault_counts.items() if not count]

    @property
    def passed(self) -> bool:
        """Everything is accounted for, and it was put to the test by every kind of fault."""
        return self.account.balanced and not self.missing_faults

    def as_json(self) -> dict[str, object]:
        account = self.account
        return {
            "passed": self.passed,
            "seed": self.seed,
            "minutes": self.minutes,
            "faults": self.fault_counts,
            "accepted": account.total,
            "accepted_by_producer": account.accepted,
            "settled_once": account.settled_once,
            "fates": {fate: account.fates[fate] for fate in Fate},
            "uncertain": {fate: account.uncertain[fate] for fate in Fate},
            "dead_reasons": account.dead_reasons,
            "repeated_submits": account.repeated,
            "settled_unheard": account.settled_unheard,
            "longest_s": round(account.longest_s, 3),
            "median_s": round(account.median_s, 3),
            "warnings": self.warnings,
            "problems": [asdict(problem) for problem in account.problems],
            "trails": [asdict(trail) for trail in self.trails],
            "timeline": [asdict(fault) for fault in self.faults],
        }

    def as_table(self) -> str:
        account = self.account
        uncertain = sum(account.uncertain.values())
        lines = [
            f"chaos for {self.minutes:g} minutes, seed {self.seed}",
            *_section("faults", {str(kind): count for kind, count in self.fault_counts.items()}),
            *_section("accepted", {producer: account.accepted[producer] for producer in Producer}),
            *_section("what became of them", {fate: account.fates[fate] for fate in Fate if fate != Fate.NEVER_QUEUED}),
            *_section(f"uncertain, of {uncertain:,}", {fate: account.uncertain[fate] for fate in Fate}),
            *_section("dead letters' reasons", account.dead_reasons),
            *_section("told by the logs", _most_frequent_last(self.warnings)),
            *_section(
                "and",
                {
                    "submits that had to be repeated": account.repeated,
                    "results stored whose worker never heard of it": account.settled_unheard,
                    "accepted to settled, median, ms": round(account.median_s * 1000),
                    "accepted to settled, longest, ms": round(account.longest_s * 1000),
                },
            ),
            "",
            *self._problems(),
            *self._verdict(),
        ]
        return "\n".join(lines)

    def _problems(self) -> Iterable[str]:
        for trail in self.trails:
            yield f"{trail.problem.job_id or 'PROBLEM'}: {trail.problem.what}"
            if trail.problem.sent is not None:
                yield f"    {trail.problem.sent}"
            yield from (f"    {line}" for line in trail.lines)
        untold = len(self.account.problems) - len(self.trails)
        if untold > 0:
            yield f"... and {untold} more"

    def _verdict(self) -> Iterable[str]:
        account = self.account
        sign = "=" if account.total == account.settled_once + account.dead else "!="
        yield (
            f"accepted {account.total:,} {sign} settled once {account.settled_once:,} + dead-lettered {account.dead:,}"
        )
        yield (
            f"lost {account.uncertain_and_accepted(Fate.LOST)}, settled twice "
            f"{account.uncertain_and_accepted(Fate.TWICE)}, problems {len(account.problems)}"
        )
        if self.missing_faults:
            yield f"this proves little: there was no {', no '.join(self.missing_faults)}"
        yield "passed" if self.passed else "FAILED"


def _section(title: str, counts: Mapping[str, int]) -> Iterable[str]:
    yield ""
    yield title
    yield from (f"  {name:<{WIDTH}}{count:>9,}" for name, count in counts.items())


def _most_frequent_last(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: item[1]))
