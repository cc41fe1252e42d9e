"""What a benchmark says: ratios first, then the numbers they were made of."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Self


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ours beside one peer's, from one run. `reached` compares the ratio with its target."""

    name: str
    ratio: float
    target: float
    ours: float
    peer: float
    unit: str
    #: True when a smaller ratio is better, as for times.
    lower_is_better: bool = False

    @classmethod
    def of_rates(cls, name: str, ours: Sequence[float], peer: Sequence[float], target: float, unit: str) -> Self:
        """Two rates, a number a round; `target` is the least ratio to reach.

        The ratio is the median of the rounds' own ratios: the two of a round run one after the other, so a machine
        whose speed drifts slows both.
        """
        ratio = median(our / theirs for our, theirs in zip(ours, peer, strict=True))
        return cls(name, ratio, target, median(ours), median(peer), unit)

    @classmethod
    def of_times(cls, name: str, ours_ms: float, peer_ms: float, target: float) -> Self:
        """Two times; `target` is the largest ratio to stay within."""
        return cls(name, ours_ms / peer_ms, target, ours_ms, peer_ms, "ms", lower_is_better=True)

    @property
    def reached(self) -> bool:
        return self.ratio <= self.target if self.lower_is_better else self.ratio >= self.target


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one benchmark. `details` holds whatever else was measured, `table` what of it a person reads."""

    benchmark: str
    ratios: Sequence[Ratio]
    details: dict[str, object]
    table: Sequence[str] = ()

    def as_json(self) -> dict[str, object]:
        return {
            "benchmark": self.benchmark,
            "ratios": [asdict(ratio) | {"reached": ratio.reached} for ratio in self.ratios],
            "details": self.details,
            "machine": {"cores": os.cpu_count(), "cpu": platform.machine(), "python": platform.python_version()},
        }

    def as_table(self) -> str:
        title = f"{self.benchmark}, {os.cpu_count()} cores"
        lines = [f"{'ratio':>8}  {'target':>9}  {'ours':>12}  {'peer':>12}  unit     {title}"]
        for ratio in self.ratios:
            bound = f"{'<=' if ratio.lower_is_better else '>='} {ratio.target:>5.2f}x"
            numbers = f"{ratio.ratio:>7.2f}x  {bound}  {ratio.ours:>12,.2f}  {ratio.peer:>12,.2f}  {ratio.unit:<7}"
            lines.append(f"{numbers}  {ratio.name}{'' if ratio.reached else '  (not reached)'}")
        return "\n".join([*lines, *self.table])


def write(reports: Sequence[Report], path: Path) -> None:
    """All reports as one JSON file."""
    path.write_text(json.dumps([report.as_json() for report in reports], indent=2) + "\n")
