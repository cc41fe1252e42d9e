"""The page that Prometheus scrapes: of one process, or of several that serve as one.

Several keep a folder: each writes what it counts to a file of its own, every second or so, and whoever is scraped adds
the others' up. A file goes on from what its process' predecessors have counted, so that no counter falls when one dies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

#: Seconds between writes.
WRITE_EVERY_S = 1.0
#: What a process leaves behind when it dies; all else is its state, which ends with it.
_KEPT_TYPES = frozenset({"counter", "histogram"})
#: Told by the process that is scraped alone: they are the broker's, or make no sense as a sum.
_NOT_ADDED = frozenset({"sheaf_queue_depth", "sheaf_dead_letters", "process_start_time_seconds", "process_max_fds"})


@dataclass(frozen=True, slots=True)
class Place:
    """Where one of several processes is among them: its number, and the folder that they share."""

    folder: Path
    number: int


class MetricsPage:
    """Of the process that has this registry, and of those that share its place's folder."""

    def __init__(self, registry: CollectorRegistry, place: Place | None = None) -> None:
        self._registry = registry
        self._place = place
        self._own = None if place is None else place.folder / f"{place.number}.prom"
        before = [] if self._own is None or not self._own.exists() else _families(self._own)
        self._inherited = [family for family in before if family.type in _KEPT_TYPES]

    def text(self) -> bytes:
        """The page; what the others counted is as old as their last `write`."""
        if self._place is None:
            return generate_latest(self._registry)
        others = [_families(path) for path in sorted(self._place.folder.glob("*.prom")) if path != self._own]
        return _text(self._registry.collect(), self._inherited, *others)

    def write(self) -> None:
        """Let the others know; nothing for a process that has none."""
        if self._own is not None:
            fresh = self._own.with_suffix(".new")
            fresh.write_bytes(_text(self._registry.collect(), self._inherited))
            fresh.replace(self._own)


def _families(path: Path) -> list[Metric]:
    return list(text_string_to_metric_families(path.read_text()))


def _text(own: Iterable[Metric], *others: Iterable[Metric]) -> bytes:
    sums = _Sums()
    sums.add(own)
    for families in others:
        sums.add(family for family in families if family.name not in _NOT_ADDED)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(sums)
    return generate_latest(registry)


class _Sums(Collector):
    """Samples of the same name and labels, added up."""

    def __init__(self) -> None:
        self._families: dict[str, Metric] = {}
        self._values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}

    def add(self, families: Iterable[Metric]) -> None:
        for family in families:
            # When a series began is each process' own.
            if family.name.endswith("_created"):
                continue
            self._families.setdefault(family.name, family)
            values = self._values.setdefault(family.name, {})
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    key = (sample.name, tuple(sorted(sample.labels.items())))
                    values[key] = values.get(key, 0.0) + sample.value

    def collect(self) -> Iterator[Metric]:
        for name, family in self._families.items():
            summed = Metric(name, family.documentation, family.type, family.unit)
            summed.samples = [Sample(of, dict(labels), value) for (of, labels), value in self._values[name].items()]
            yield summed
