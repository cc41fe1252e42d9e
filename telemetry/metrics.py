"""All metrics of all processes. Base units; no label holds a user's text or an id.

Clocks: a job's time starts when it was put on the queue (for plain Celery producers, whose messages do not say when:
when it was leased) and ends when its result was stored. A batch's three times are those of its three steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import Lock

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, start_http_server
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

#: Upper bounds, seconds.
SECONDS = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
    3600.0,
)
ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0)
TOKENS = (16.0, 64.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 131072.0)
RATIO = (0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

_BY_MODEL = ("model", "version")


class MetricsPortTaken(Exception):
    """Another process listens on the port meant for this process' metrics."""


def padding_ratio(tokens: int, padded_tokens: int) -> float:
    """Share of a batch that is padding; none for a handler that counts no tokens at all."""
    return 1 - tokens / padded_tokens if padded_tokens else 0.0


class Distribution(Collector):
    """A histogram that takes a batch's values at once; the stock one costs several microseconds a value."""

    def __init__(
        self, name: str, text: str, buckets: Sequence[float], labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(buckets)
        self._labels = labels
        self._lock = Lock()
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}
        registry.register(self)

    def add(self, labels: tuple[str, ...], values: Iterable[float]) -> None:
        """Count these values under these label values."""
        with self._lock:
            counts = self._counts.setdefault(labels, [0] * (len(self._bounds) + 1))
            total = self._sums.get(labels, 0.0)
            for value in values:
                counts[bisect_left(self._bounds, value)] += 1
                total += value
            self._sums[labels] = total

    def describe(self) -> Iterator[HistogramMetricFamily]:
        yield HistogramMetricFamily(self._name, self._text, labels=self._labels)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        with self._lock:
            for labels, counts in self._counts.items():
                running = 0
                buckets: list[tuple[str, float]] = []
                for bound, count in zip((*map(str, self._bounds), "+Inf"), counts, strict=True):
                    running += count
                    buckets.append((bound, running))
                family.add_metric(labels, buckets, self._sums[labels])
        yield family


class WorkerMetrics:
    """What a worker process tells."""

    def __init__(self, registry: CollectorRegistry) -> None:
        ProcessCollector(registry=registry)
        self._jobs = Counter(
            "sheaf_jobs",
            "Jobs that ended, counted when their result was stored.",
            (*_BY_MODEL, "status"),
            registry=registry,
        )
        self._latency = Distribution(
            "sheaf_job_latency_seconds", "From enqueued to result stored.", SECONDS, _BY_MODEL, registry
        )
        self._queue_wait = Distribution(
            "sheaf_queue_wait_seconds", "From enqueued to the start of the job's batch.", SECONDS, _BY_MODEL, registry
        )
        self._preprocess = Distribution(
            "sheaf_preprocess_seconds", "Encoding the rows that were leased together.", SECONDS, _BY_MODEL, registry
        )
        self._inference = Distribution(
            "sheaf_inference_seconds",
            "One batch on the device, from its hand-over to its outputs.",
            SECONDS,
            _BY_MODEL,
            registry,
        )
        self._postprocess = Distribution(
            "sheaf_postprocess_seconds",
            "Turning a batch's outputs into results, before they are stored.",
            SECONDS,
            _BY_MODEL,
            registry,
        )
        self._batch_size = Distribution("sheaf_batch_size", "Rows of a batch that ran.", ROWS, _BY_MODEL, registry)
        self._batch_tokens = Distribution(
            "sheaf_batch_tokens", "Tokens of a batch that ran, without padding.", TOKENS, _BY_MODEL, registry
        )
        self._padding = Distribution(
            "sheaf_padding_ratio", "Share of a batch's padded tokens that is padding.", RATIO, _BY_MODEL, registry
        )
        self._batches = Counter(
            "sheaf_batches", "Batches that ran, by what closed them.", (*_BY_MODEL, "closed_by"), registry=registry
        )
        self._leases = Gauge("sheaf_leases", "Jobs that this worker holds.", ("model",), registry=registry)
        self._buried = Counter(
            "sheaf_buried", "Messages that this worker put with the dead letters.", ("model",), registry=registry
        )
        self._lost_leases = Counter(
            "sheaf_lost_leases", "Jobs whose lease ran out while this worker had them.", ("model",), registry=registry
        )
        self._reclaimed = Counter(
            "sheaf_reclaimed", "Jobs of lost workers that this worker put back.", ("model",), registry=registry
        )
        self._ready = Gauge(
            "sheaf_model_ready", "1 while the model is loaded and serves.", (*_BY_MODEL, "device"), registry=registry
        )
        self._events_dropped = Counter(
            "sheaf_events_dropped", "Task events given up, since the broker took them too slowly.", registry=registry
        )

    def jobs_ended(
        self,
        model: str,
        version: str,
        *,
        statuses: Mapping[str, int],
        latencies_s: Sequence[float],
        queue_waits_s: Sequence[float],
    ) -> None:
        labels = (model, version)
        for status, count in statuses.items():
            self._jobs.labels(*labels, status).inc(count)
        self._latency.add(labels, latencies_s)
        self._queue_wait.add(labels, queue_waits_s)

    def batch_done(
        self,
        model: str,
        version: str,
        *,
        preprocess_s: float,
        inference_s: float,
        postprocess_s: float,
        rows: int,
        tokens: int,
        padded_tokens: int,
        closed_by: str,
    ) -> None:
        labels = (model, version)
        self._preprocess.add(labels, (preprocess_s,))
        self._inference.add(labels, (inference_s,))
        self._postprocess.add(labels, (postprocess_s,))
        self._batch_size.add(labels, (rows,))
        self._batch_tokens.add(labels, (tokens,))
        self._padding.add(labels, (padding_ratio(tokens, padded_tokens),))
        self._batches.labels(*labels, closed_by).inc()

    def buried(self, model: str, count: int) -> None:
        self._buried.labels(model).inc(count)

    def lost_leases(self, model: str, count: int) -> None:
        self._lost_leases.labels(model).inc(count)

    def reclaimed(self, model: str, count: int) -> None:
        self._reclaimed.labels(model).inc(count)

    def set_leases(self, model: str, count: int) -> None:
        self._leases.labels(model).set(count)

    def model_ready(self, model: str, version: str, device: str, ready: bool) -> None:
        self._ready.labels(model, version, device).set(ready)

    def events_dropped(self, count: int) -> None:
        self._events_dropped.inc(count)


class CourierMetrics:
    """What an io worker tells of webhooks."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._deliveries = Counter(
            "sheaf_webhook_deliveries",
            "Deliveries that came to an end: delivered, or failed for good.",
            ("outcome",),
            registry=registry,
        )
        self._seconds = Distribution(
            "sheaf_webhook_call_seconds",
            "One call, from the look-up of its host to the head of its answer, or to its failure.",
            SECONDS,
            ("outcome",),
            registry,
        )
        self._in_flight = Gauge(
            "sheaf_webhooks_in_flight", "Deliveries that are in hand: called now, or about to be.", registry=registry
        )
        self._breakers_open = Gauge(
            "sheaf_webhook_breakers_open",
            "Hosts that are left alone after failures in a row, each counted for each owner whose calls failed.",
            registry=registry,
        )

    def called(self, *, succeeded: bool, seconds: float) -> None:
        self._seconds.add(("succeeded" if succeeded else "failed",), (seconds,))

    def ended(self, outcome: str) -> None:
        self._deliveries.labels(outcome).inc()

    def set_in_flight(self, count: int) -> None:
        self._in_flight.set(count)

    def set_breakers_open(self, count: int) -> None:
        self._breakers_open.set(count)


class ApiMetrics:
    """What an API process tells."""

    def __init__(self, registry: CollectorRegistry) -> None:
        ProcessCollector(registry=registry)
        self._requests = Counter(
            "sheaf_http_requests", "Requests answered, by route.", ("method", "route", "status"), registry=registry
        )
        self._seconds = Distribution(
            "sheaf_http_request_seconds",
            "From a request's head to the head of its answer; waits that the caller asked for are in it.",
            SECONDS,
            ("method", "route"),
            registry,
        )
        self._depth = Gauge(
            "sheaf_queue_depth",
            "Jobs that wait, not yet leased, at the time of the scrape.",
            ("queue", "priority"),
            registry=registry,
        )
        self._dead_letters = Gauge(
            "sheaf_dead_letters",
            "Dead letters at the time of the scrape.",
            ("queue",),
            registry=registry,
        )
        self._refused = Counter(
            "sheaf_http_refused",
            "Connections closed before there was a request to answer, by the problem that they were told.",
            ("type",),
            registry=registry,
        )
        self._waiters = Gauge("sheaf_waiters", "Requests that wait for a result now.", registry=registry)

    def requests_done(self, method: str, route: str, status: int, seconds: Sequence[float]) -> None:
        self._requests.labels(method, route, str(status)).inc(len(seconds))
        self._seconds.add((method, route), seconds)

    def connection_refused(self, kind: str) -> None:
        self._refused.labels(kind).inc()

    def set_queue_depth(self, queue: str, priority: int, depth: int) -> None:
        self._depth.labels(queue, str(priority)).set(depth)

    def set_dead_letters(self, queue: str, count: int) -> None:
        self._dead_letters.labels(queue).set(count)

    def forget_queues(self) -> None:
        """They cannot be asked for now, and old numbers would look like truth."""
        self._depth.clear()
        self._dead_letters.clear()

    def count_waiters(self, count: Callable[[], int]) -> None:
        """Ask this for their number whenever it is to be told."""
        self._waiters.set_function(count)


def serve(registry: CollectorRegistry, host: str, port: int) -> None:
    """Answer `GET /metrics` from a thread of its own. Raises `MetricsPortTaken`."""
    try:
        start_http_server(port, host, registry)
    except OSError as error:
        raise MetricsPortTaken(f"metrics cannot be served on {host}:{port}: {error.strerror}") from None
