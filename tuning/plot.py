"""The picture of a tuning: p99 over rows/s for every setting, and the ones that matter by name."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from tuning.report import Report, words
from tuning.search import Candidate

_DOTS_PER_INCH = 144
#: What lies above all that was found by more than this factor is not drawn.
_FAR = 1.5


def draw(report: Report, file: Path) -> None:
    """Write the picture as PNG."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.scatter(*_places(report.candidates), s=14, color="0.75", label=f"{len(report.candidates)} settings, simulated")
    axes.plot(*_places(report.frontier), marker=".", color="tab:blue", label="the best of them")
    if report.p99_s is not None:
        # Far above all that was found it would only press the rest together.
        seen = report.p99_s <= _FAR * max(one.p99_s for one in report.candidates)
        told = f"p99 asked for: {report.p99_s * 1e3:g} ms" + ("" if seen else ", far above")
        places = [report.p99_s * 1e3] if seen else []
        axes.hlines(places, 0, 1, transform=axes.get_yaxis_transform(), color="tab:red", linestyle="--", label=told)
    if report.present is not None:
        told = f"present: {words(report.present.limits)}"
        axes.scatter(*_places([report.present]), marker="s", s=70, color="tab:orange", label=told, zorder=3)
    told = f"recommended: {words(report.chosen.limits)}"
    axes.scatter(*_places([report.chosen]), marker="*", s=190, color="tab:green", label=told, zorder=4)
    if report.seen is not None:
        told = "recommended, measured"
        place = ([report.seen.capacity], [report.seen.p99_s * 1e3])
        axes.scatter(*place, marker="X", s=90, color="black", label=told, zorder=5)
    axes.set_title(f"{report.model} on {report.device}\n{report.traffic.source}", fontsize="medium")
    axes.set_xlabel("rows/s from a full queue")
    axes.set_ylabel(f"p99 at {report.traffic.rate:,.3g} rows/s, ms")
    axes.set_yscale("log")
    for formatted in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatted(ScalarFormatter())
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small")
    figure.savefig(file, dpi=_DOTS_PER_INCH, format="png")


def _places(candidates: list[Candidate]) -> tuple[list[float], list[float]]:
    return [one.capacity for one in candidates], [one.p99_s * 1e3 for one in candidates]
