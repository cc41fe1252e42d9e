"""What a tuning found, as text for a person, as JSON for a program, and as YAML for the settings."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from batching import Limits
from tuning.measuring import Fit, Measured
from tuning.replay import Seen, limits_as_settings
from tuning.search import MOST_ROWS, Candidate, Service, quantile
from tuning.traffic import Traffic

#: A measured p99 that is off by a greater share than this tells of something that the simulator does not know.
FAR_OFF = 0.5
#: Most lines of the frontier that are printed.
MOST_LINES = 12


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the simulator says of just those rows that were replayed."""

    p50_s: float
    p99_s: float
    rows_per_s: float
    capacity: float


@dataclass(frozen=True)
class Report:
    """One tuning. `present` is None for settings that could not serve this traffic at all."""

    model: str
    device: str
    traffic: Traffic
    measured: Measured
    fit: Fit
    service: Service
    candidates: list[Candidate]
    frontier: list[Candidate]
    present: Candidate | None
    present_limits: Limits
    chosen: Candidate
    #: The p99 that was asked for, and whether the simulation keeps it.
    p99_s: float | None
    kept: bool
    predicted: Predicted | None = None
    seen: Seen | None = None
    plot: Path | None = None

    def with_plot(self, file: Path) -> Report:
        """The same, with its picture drawn."""
        return replace(self, plot=file)

    def settings(self) -> dict[str, Any]:
        """The settings to paste: what differs from the present ones, and the three bounds in any case."""
        chosen, present = limits_as_settings(self.chosen.limits), limits_as_settings(self.present_limits)
        always = ("max_batch_size", "max_batch_tokens", "max_wait_ms")
        return {name: value for name, value in chosen.items() if name in always or value != present[name]}

    def as_yaml(self) -> str:
        return yaml.safe_dump({"models": {self.model: self.settings()}}, sort_keys=False)

    def as_text(self) -> str:
        """All of it, in the order in which it was found."""
        parts = [self._device_text(), self._frontier_text(), self._choice_text()]
        if self.seen is not None:
            parts.append(self._seen_text())
        parts.append("Paste into your settings:\n\n" + self.as_yaml().rstrip())
        if self.plot is not None:
            parts.append(f"The picture: {self.plot}")
        return "\n\n".join(parts)

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "device": self.device,
            "traffic": {
                "source": self.traffic.source,
                "rows": len(self.traffic.arrivals),
                "rows_per_s": self.traffic.rate,
                "longest_tokens": self.traffic.lengths[-1],
            },
            "cost": {
                **asdict(self.fit.cost),
                "mean_error": self.fit.mean_error,
                "worst_error": self.fit.worst_error,
                "aside_s": self.measured.aside_s,
                "batches": [asdict(batch) for batch in self.measured.batches],
                "ended": self.measured.ended,
            },
            "service": {
                "batch_s": self.service.batch_s,
                "row_s": self.service.row_s,
                "p50_s": quantile(self.service.latencies_s, 0.5),
                "p99_s": quantile(self.service.latencies_s, 0.99),
            },
            "candidates": [_as_json(one) for one in self.candidates],
            "frontier": [_as_json(one) for one in self.frontier],
            "present": None if self.present is None else _as_json(self.present),
            "recommended": {**_as_json(self.chosen), "yaml": self.as_yaml()},
            "p99_asked_s": self.p99_s,
            "p99_kept": self.kept,
            "predicted": None if self.predicted is None else asdict(self.predicted),
            "measured": None if self.seen is None else _seen_as_json(self.seen),
            "plot": None if self.plot is None else str(self.plot),
        }

    def _device_text(self) -> str:
        cost, fit, measured = self.fit.cost, self.fit, self.measured
        lines = [
            f"{self.model} on {self.device}",
            f"Traffic: {self.traffic.source}; {self.traffic.rate:,.1f} rows/s, "
            f"tokens p50 {self.traffic.quantile(0.5)}, p99 {self.traffic.quantile(0.99)}",
            f"A batch takes {cost.overhead_s * 1e3:,.4g} ms + {cost.token_s * 1e6:,.4g} us a padded token "
            f"({len(measured.ran)} sizes; off by {fit.mean_error:.0%} on average, {fit.worst_error:.0%} at worst); "
            f"a row takes {measured.aside_s * 1e3:,.3g} ms more beside it",
            f"Queue and worker alone take {_ms(self.service.batch_s)} a batch + {_ms(self.service.row_s)} a row; "
            f"latency p50 {_ms(quantile(self.service.latencies_s, 0.5))}, "
            f"p99 {_ms(quantile(self.service.latencies_s, 0.99))}",
        ]
        if fit.poor:
            lines.append("WARNING: the times lie on no straight line, so take what is predicted with care")
        if measured.failed is not None:
            lines.append(f"{measured.failed}; what is recommended stays below")
        else:
            last = max(measured.ran, key=lambda batch: batch.padded_tokens)
            lines.append(f"The largest batch: {last.rows} x {last.tokens} tokens; {measured.ended}")
        return "\n".join(lines)

    def _frontier_text(self) -> str:
        shown = _thinned(self.frontier, MOST_LINES)
        extra = [one for one in (self.chosen, self.present) if one is not None and one not in shown]
        lines = ["  size   tokens  wait ms  adaptive    rows/s    p50 ms    p99 ms"]
        for one in sorted([*shown, *extra], key=lambda one: (one.capacity, one.p99_s)):
            mark = "  <- recommended" if one == self.chosen else ""
            mark += "  <- present" if one == self.present else ""
            lines.append(_line(one) + mark)
        head = f"The best of {len(self.candidates)} settings that keep up, simulated (rows/s: from a full queue"
        head += f"; p50, p99: of the busiest {MOST_ROWS:,} rows):" if len(self.traffic.arrivals) > MOST_ROWS else "):"
        if self.present is None:
            lines.append(f"The present settings cannot serve this traffic: {words(self.present_limits)}")
        return "\n".join([head, "", *lines])

    def _choice_text(self) -> str:
        told = f"Recommended: {words(self.chosen.limits)}\n"
        told += f"Predicted: p99 {_ms(self.chosen.p99_s)}, {self.chosen.capacity:,.1f} rows/s from a full queue"
        if not self.kept:
            assert self.p99_s is not None
            told += f"\nNO SETTING keeps a p99 of {_ms(self.p99_s)} at this traffic: this one comes closest"
        return told

    def _seen_text(self) -> str:
        seen, predicted = self.seen, self.predicted
        assert seen is not None
        assert predicted is not None
        lines = [
            f"Tried with a worker of its own, {seen.rows:,} rows at their times:",
            "",
            "                            predicted    measured  difference",
            _beside("p50, ms", predicted.p50_s * 1e3, seen.p50_s * 1e3),
            _beside("p99, ms", predicted.p99_s * 1e3, seen.p99_s * 1e3),
            _beside("rows/s of this traffic", predicted.rows_per_s, seen.rows_per_s),
            _beside("rows/s from a full queue", predicted.capacity, seen.capacity),
        ]
        if seen.failed:
            lines.append(f"WARNING: {seen.failed} rows FAILED; they count as ended")
        if abs(seen.p99_s / predicted.p99_s - 1) > FAR_OFF:
            lines.append(
                "WARNING: far from what was predicted; if anything else ran on this machine, tune again without it"
            )
        if self.p99_s is not None and seen.p99_s > self.p99_s:
            lines.append(f"MISSED: the measured p99 of {_ms(seen.p99_s)} is over the {_ms(self.p99_s)} asked for")
        elif self.p99_s is not None:
            lines.append(f"KEPT: the measured p99 of {_ms(seen.p99_s)} is within the {_ms(self.p99_s)} asked for")
        return "\n".join(lines)


def words(limits: Limits) -> str:
    """Settings in a few words."""
    wait = f"{'at most ' if limits.adaptive_wait else ''}{limits.max_wait_s * 1e3:g} ms"
    adaptive = ", adaptive" if limits.adaptive_wait else ""
    return f"{limits.max_batch_size} rows, {limits.max_batch_tokens} tokens, {wait}{adaptive}"


def _line(one: Candidate) -> str:
    limits = one.limits
    return (
        f"{limits.max_batch_size:>6} {limits.max_batch_tokens:>8} {limits.max_wait_s * 1e3:>8g} "
        f"{'yes' if limits.adaptive_wait else 'no':>9} {one.capacity:>9,.1f} {one.p50_s * 1e3:>9,.2f} "
        f"{one.p99_s * 1e3:>9,.2f}"
    )


def _beside(name: str, predicted: float, measured: float) -> str:
    difference = f"{measured / predicted - 1:+.0%}" if predicted else ""
    return f"{name:<25} {predicted:>11,.2f} {measured:>11,.2f} {difference:>11}"


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:,.4g} ms" if milliseconds < 1000 else f"{milliseconds:,.0f} ms"


def _thinned(candidates: list[Candidate], most: int) -> list[Candidate]:
    """Both ends, and of what lies between them as many as there is room for."""
    if len(candidates) <= most:
        return candidates
    return [candidates[round(place * (len(candidates) - 1) / (most - 1))] for place in range(most)]


def _as_json(one: Candidate) -> dict[str, Any]:
    return {
        **limits_as_settings(one.limits),
        "rows_per_s": one.capacity,
        "p50_s": one.p50_s,
        "p99_s": one.p99_s,
    }


def _seen_as_json(seen: Seen) -> dict[str, Any]:
    names = ("rows", "failed", "p50_s", "p99_s", "rows_per_s", "capacity")
    return {name: getattr(seen, name) for name in names}
