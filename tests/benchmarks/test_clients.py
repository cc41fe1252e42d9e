"""What the benchmarks send, and how they count what comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import redis

from benchmarks.efficiency import Drained
from benchmarks.open_loop import poisson, send_all
from benchmarks.preload import preload, preload_texts
from benchmarks.processes import BenchmarkError
from broker.embedded import EmbeddedServer
from broker.message import decode

QUEUE = "infer.minilm"
ANSWER_S = 0.2

Serve = Callable[[int], int]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server that answers every request after a while, with this status."""
    servers: list[ThreadingHTTPServer] = []

    def start(status: int) -> int:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                time.sleep(ANSWER_S)
                self.send_response(status)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
                """Say nothing."""

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return servers[-1].server_port

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_latency_counts_from_when_a_request_was_to_be_sent(serve: Serve) -> None:
    taken = send_all(serve(200), "/", ["{}"] * 4, [0.0, 0.0, 0.0, 0.5], "Prefer: wait=1")
    assert all(milliseconds >= ANSWER_S * 1e3 for milliseconds in taken)


def test_an_answer_that_is_no_success_fails_the_benchmark(serve: Serve) -> None:
    with pytest.raises(BenchmarkError, match="not answered with its result"):
        send_all(serve(202), "/", ["{}"], [0.0], "Prefer: wait=1")


def test_moments_are_random_and_the_same_in_every_run() -> None:
    moments = poisson(50.0, 5000, seed=1)
    assert moments == sorted(poisson(50.0, 5000, seed=1))
    assert moments[-1] == pytest.approx(100, rel=0.1)


def test_preloaded_messages_are_those_of_a_producer(valkey_server: EmbeddedServer) -> None:
    with redis.Redis.from_url(valkey_server.url) as client:
        client.flushall()
        preload_texts(client, valkey_server.url, QUEUE, ["one", "zwei \u00e4"])
        preload(client, valkey_server.url, QUEUE, 1)
        messages = [decode(message) for message in reversed(client.lrange(QUEUE, 0, -1))]
        client.flushall()
    assert [message.id for message in messages] == ["job-0", "job-1", "job-0"]
    assert [message.args[0] for message in messages] == ["one", "zwei \u00e4", "a text of some length"]


def test_a_rate_leaves_out_the_batches_that_warmed_up() -> None:
    drained = Drained([[0], [1], [2, 3], [4, 5, 6]], [9.0, 10.0, 11.0, 12.0])
    assert drained.rate == pytest.approx(2.5)
