"""Our histogram against the stock one, and what a process serves."""

from __future__ import annotations

import socket
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from telemetry.metrics import SECONDS, ApiMetrics, Distribution, MetricsPortTaken, WorkerMetrics, serve


def samples(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels.get("le", "")): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@given(st.lists(st.floats(0, 5000, allow_nan=False)))
def test_a_distribution_counts_like_the_stock_histogram(values: list[float]) -> None:
    ours, stock = CollectorRegistry(), CollectorRegistry()
    distribution = Distribution("x_seconds", "Text.", SECONDS, ("model",), ours)
    distribution.add(("m",), values)
    histogram = Histogram("x_seconds", "Text.", ("model",), buckets=SECONDS, registry=stock).labels("m")
    for value in values:
        histogram.observe(value)
    assert samples(ours) == pytest.approx(samples(stock))


def help_texts(metrics: Iterable[str]) -> list[str]:
    return [line for line in metrics if line.startswith("# HELP sheaf_")]


@pytest.mark.parametrize("kind", [WorkerMetrics, ApiMetrics])
def test_every_metric_says_what_it_is(kind: type[WorkerMetrics] | type[ApiMetrics]) -> None:
    registry = CollectorRegistry()
    kind(registry)
    texts = help_texts(generate_latest(registry).decode().splitlines())
    assert texts
    assert all(len(text.split()) > 4 for text in texts)


def test_a_taken_port_is_told_in_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(MetricsPortTaken, match=f"127.0.0.1:{port}: Address already in use"):
            serve(CollectorRegistry(), "127.0.0.1", port)
