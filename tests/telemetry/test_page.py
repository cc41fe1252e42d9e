"""The metrics of several processes as one page."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from telemetry.metrics import ApiMetrics
from telemetry.page import MetricsPage, Place


def page(place: Place | None, requests: int = 0, waiters: int = 0) -> MetricsPage:
    """Of a process that has answered so many requests, and has so many that wait."""
    registry = CollectorRegistry()
    metrics = ApiMetrics(registry)
    if requests:
        metrics.requests_done("GET", "/livez", 200, [0.02] * requests)
    metrics.count_waiters(lambda: waiters)
    metrics.set_queue_depth("infer.echo", 0, 7)
    return MetricsPage(registry, place)


def told(of: MetricsPage, name: str) -> dict[str, float]:
    """Values of one name, by their bucket."""
    return {
        sample.labels.get("le", ""): sample.value
        for family in text_string_to_metric_families(of.text().decode())
        for sample in family.samples
        if sample.name == name
    }


def test_counts_and_waiters_are_added_up_and_what_is_the_brokers_is_not(tmp_path: Path) -> None:
    others = [page(Place(tmp_path, number), requests=number, waiters=10) for number in (1, 2)]
    for other in others:
        other.write()
    own = page(Place(tmp_path, 0), requests=4, waiters=1)
    assert told(own, "sheaf_http_requests_total") == {"": 7}
    buckets = told(own, "sheaf_http_request_seconds_bucket")
    assert (buckets["0.01"], buckets["0.025"], buckets["+Inf"]) == (0, 7, 7)
    assert told(own, "sheaf_http_request_seconds_sum")[""] == pytest.approx(0.14)
    assert told(own, "sheaf_waiters") == {"": 21}
    assert told(own, "sheaf_queue_depth") == {"": 7}


def test_a_process_goes_on_from_what_the_one_before_it_counted_and_not_from_its_state(tmp_path: Path) -> None:
    page(Place(tmp_path, 0), requests=3, waiters=5).write()
    after = page(Place(tmp_path, 0), requests=1)
    after.write()
    for reader in (after, page(Place(tmp_path, 1))):
        assert told(reader, "sheaf_http_requests_total") == {"": 4}
        assert told(reader, "sheaf_waiters") == {"": 0}


def test_alone_a_process_tells_its_own_page_and_writes_nothing(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    ApiMetrics(registry)
    own = MetricsPage(registry)
    own.write()
    names = {line.split()[2] for line in own.text().decode().splitlines() if line.startswith("# TYPE")}
    assert names == {line.split()[2] for line in generate_latest(registry).decode().splitlines() if "# TYPE" in line}
    assert not list(tmp_path.iterdir())
