"""What callers may do to the API, and what they get: a clear 4xx or a closed connection, while others are served."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Receive, Scope, Send

from api.envelope import Envelope
from broker.embedded import EmbeddedServer
from telemetry.logs import LineWriter
from telemetry.metrics import ApiMetrics
from tests.api.front import front
from tests.api.raw import HOST, Answer, answer_of, answers_of, ask, connect, post, request
from tests.conftest import free_port, wait_until
from tests.services import Service, answers, metric

TIMEOUT_S = 1.0
#: What a process may have grown by after an attack: buffers that Python keeps, not what was sent.
MAX_GROWTH_BYTES = 48 * 2**20

GET = request("GET", "/livez")
#: As it, on a connection that stays open.
KEPT = b"GET /livez HTTP/1.1\r\nhost: a\r\n\r\n"
#: A request whose body does not come.
HALF = request("POST", "/v1/jobs", "content-type: application/json", "content-length: 100") + b'{"model":'
CHUNKED = request("POST", "/v1/jobs", "content-type: application/json", "transfer-encoding: chunked")
JOB = b'{"model": "echo", "input": 1}'


@dataclass(frozen=True)
class Target:
    port: int
    service: Service

    def ask(self, *parts: bytes) -> Answer:
        return ask(self.port, *parts)

    @property
    def memory(self) -> int:
        return int(psutil.Process(self.service.pid).memory_info().rss)

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Whatever happens within: others are served meanwhile, nothing fails inside, and memory stays."""
        before, stop, served = self.memory, threading.Event(), 0

        def other() -> None:
            nonlocal served
            while not stop.is_set():
                assert self.ask(post(JOB)).status == 202
                served += 1

        caller = threading.Thread(target=other)
        caller.start()
        try:
            yield
        finally:
            done = served
            wait_until(lambda: served > done or not caller.is_alive(), description="another caller is served")
            stop.set()
            caller.join()
        assert served > done
        assert self.memory - before < MAX_GROWTH_BYTES
        assert '"ERROR"' not in self.service.log()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("hardening")
    port = free_port()
    with EmbeddedServer(free_port(), folder / "valkey") as broker:
        config: dict[str, object] = {
            "broker": {"url": broker.url, "max_message_bytes": 67_108_864},
            "api": {
                "port": port,
                "head_timeout_s": TIMEOUT_S,
                "body_timeout_s": TIMEOUT_S,
                "send_timeout_s": TIMEOUT_S,
                "max_payload_bytes": 16 * 2**20,
            },
            "models": {"echo": {"handler": "inference.handlers.echo:Echo"}},
        }
        with Service("api", config=config, folder=folder / "api") as service:
            wait_until(lambda: answers(f"http://127.0.0.1:{port}/livez"), description="alive", timeout_s=60)
            yield Target(port, service)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", "method"),
        (b"BREW /pot HTTP/1.1\r\n\r\n", "method"),
        (b"CONNECT inside:443 HTTP/1.1\r\nhost: inside\r\n\r\n", "target"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "HTTP/1.1"),
        (b"GET / HTTP/9.9\r\n\r\n", "version"),
        (request("GET", b"http://127.0.0.1"), "target"),
        (request("GET", "/v1/jobs/ü"), "url"),
        (request("GET", b"/v1/jobs/\x00"), "url"),
        (request("GET", b"/livez", "x-name: a\x00b"), "header"),
        (request("GET", b"/livez", "x-name : b"), "header"),
        (request("GET", b"/livez", "x-name: a\r\n folded"), "header"),
        (post(JOB, "transfer-encoding: chunked"), "Content-Length"),
        (post(JOB, "content-length: 3"), "Content-Length"),
        (request("POST", "/v1/jobs", "content-length: -1"), "Content-Length"),
        (request("POST", "/v1/jobs", "content-length: 99999999999999999999999"), "Content-Length"),
        (CHUNKED + b"xyz\r\n", "chunk size"),
        (CHUNKED + b"fffffffffffffffff\r\n", "hunk size"),
        (request("POST", "/v1/jobs", "transfer-encoding: xchunked"), "Transfer-Encoding"),
        (post(JOB, "connection: upgrade", "upgrade: h2c"), "Upgrade"),
        (b"GET /livez HTTP/1.1\r\n\r\n", "Host"),
        (request("GET", "/livez", "host: a"), "host is there 2 times"),
        (post(JOB, "authorization: Bearer a", "authorization: Bearer b"), "authorization is there 2 times"),
        (b"GET /livez HTTP/2.0\r\nhost: a\r\n\r\n", "HTTP/2.0"),
        (CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"0\r\n\r\n", "Transfer-Encoding"),
    ],
)
def test_what_is_no_proper_request_is_told_so_and_closed(target: Target, sent: bytes, said: str) -> None:
    answer = target.ask(sent)
    assert answer.status == 400
    assert answer.headers["connection"] == "close"
    found = answer.problem()
    assert found["type"] == "urn:sheaf:error:bad-request"
    assert said in str(found["detail"])
    # The parser's own words are for whoever knows its source.
    assert not re.search("nvalid|xpected|allback|overflow", str(found["detail"]))


@pytest.mark.parametrize("expected", ["100-continue-please", "something", "100-continue, something"])
def test_an_expectation_that_cannot_be_met_is_refused(target: Target, expected: str) -> None:
    answer = target.ask(post(JOB, f"expect: {expected}"))
    assert answer.status == 417
    assert answer.problem()["type"] == "urn:sheaf:error:expectation-refused"


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
def test_an_expectation_that_is_met_or_means_nothing_is_no_fault(target: Target, version: bytes) -> None:
    expected = "100-Continue" if version == b"HTTP/1.1" else "something"
    assert target.ask(post(JOB, f"expect: {expected}").replace(b"HTTP/1.1", version)).status == 202


@pytest.mark.parametrize(
    ("authority", "status"),
    [("127.0.0.1", 200), ("localhost:80", 200), ("evil.example", 421), ("a@127.0.0.1", 421), ("evil.example:80", 421)],
)
def test_the_authority_of_a_whole_target_counts_and_not_the_host(target: Target, authority: str, status: int) -> None:
    assert target.ask(request("GET", f"http://{authority}/v1/jobs")).status == status


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (request("GET", "/v1/jobs/" + "x" * 9_000), 414),
        (request("GET", "/v1/jobs?" + "x" * 900_000), 414),
        (request("GET", "/livez", *(f"x-{n}: 1" for n in range(101))), 431),
        (request("GET", "/livez", *(f"x-{n}: 1" for n in range(50_000))), 431),
        (request("GET", "/livez", "x-long: " + "x" * 70_000), 431),
        (request("GET", "/livez", "x-endless: " + "x" * 5_000_000)[:-4], 431),
        (CHUNKED + b"1;" + b"x" * 300_000, 400),
        (CHUNKED + b"1\r\n{\r\n0\r\nx-trailer: " + b"x" * 300_000, 400),
        (post(JOB, "expect: 100-continue", "content-encoding: gzip"), 415),
        (CHUNKED.replace(b": chunked", b": gzip, chunked") + b"1\r\n{\r\n0\r\n\r\n", 415),
        (request("POST", "/v1/jobs", "content-type: application/json", "content-length: 9999999999"), 413),
        (post(b"[" * (20 * 2**20)), 413),
        (CHUNKED + (b"%x\r\n" % 2**20 + b"x" * 2**20 + b"\r\n") * 20, 413),
    ],
)
def test_what_is_too_much_is_refused_before_it_is_held(target: Target, sent: bytes, status: int) -> None:
    before = target.memory
    answer = target.ask(sent)
    assert answer.status == status
    assert answer.problem()["detail"]
    assert target.memory - before < MAX_GROWTH_BYTES


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b'{"model": "echo", "input": ' + b"[" * 5_000_000 + b"]" * 5_000_000 + b"}", 400, "depth"),
        (b'{"a":' * 2_000_000 + b"1" + b"}" * 2_000_000, 400, "depth"),
        (b'{"model": "echo", "input": NaN}', 400, "JSON"),
        (b'{"model": "echo", "input": [Infinity, -Infinity]}', 400, "JSON"),
        (b'{"model": "echo", "input": 1e999}', 400, "infinity"),
        (b'{"model": "echo", "input": ' + b"9" * 1_000_000 + b"}", 400, "infinity"),
        (rb'{"model": "echo", "input": "\ud800"}', 400, "surrogate"),
        (rb'{"model": "echo", "\udfff": 1}', 400, "surrogate"),
        (b'{"model": "echo", "input": "\x00"}', 400, "control character"),
        (b'{"model": "echo", "input": "\xff\xfe"}', 400, "UTF-8"),
        (b"\xef\xbb\xbf" + JOB, 400, "BOM"),
        (JOB.decode().encode("utf-16"), 400, "JSON"),
        (b"\x1f\x8b\x08\x00" + b"\x00" * 100, 400, "JSON"),
        (rb'{"model": "e\u0000cho", "input": 1}', 404, "no model"),
        (rb'{"model": "../echo", "input": 1}', 404, "no model"),
        (b"{" + b",".join(b'"k%d":1' % n for n in range(500_000)) + b"}", 422, "fields"),
        (b'{"' + b"k" * 5_000_000 + b'": 1}', 422, "no such field"),
        (b'{"model": "none", "input": 1, "model": "echo"}', 422, "model: it is there 2 times"),
        (rb'{"mo\u0064el": "none", "input": 1, "model": "echo"}', 422, "model: it is there 2 times"),
        (b'{"model": "echo", "input": ' + b"[" * 1_000 + rb'"\u00e4"' + b"]" * 1_000 + b"}", 400, "nested"),
        (b'{"model": "minilm", "inputs": [' + b"1," * 4_000 + b"1]}", 422, "more"),
        (b'{"model": "echo", "inputs": [' + b"1," * 4_000_000 + b"1]}", 422, "4096"),
    ],
)
def test_a_body_made_to_hurt_is_refused_with_a_short_answer(
    target: Target, body: bytes, status: int, said: str
) -> None:
    answer = target.ask(post(body))
    assert answer.status == status
    assert said in str(answer.problem()["detail"])
    assert len(answer.body) < 10_000


def test_of_a_key_that_stands_twice_within_a_row_the_last_one_counts(target: Target) -> None:
    """As docs/API.md says: what a row holds is the model's business."""
    body = b'{"model": "echo", "input": {"model": 1, "model": 2, "id": "\\u00e4"}}'
    answer = target.ask(post(body))
    assert (answer.status, json.loads(answer.body)["model"]) == (202, "echo")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "//v1/jobs", 404),
        ("GET", "/v1/../v1/jobs", 404),
        ("GET", "/v1/%2e%2e/v1/jobs", 404),
        ("GET", "/v1/jobs/", 404),
        ("POST", "/v1/jobs/", 404),
        ("GET", "/v1/jobs/%00", 404),
        ("GET", "/v1/jobs/..%2f..%2fetc%2fpasswd", 404),
        ("GET", "/v1/jobs/%ed%a0%80", 404),
        ("GET", "/v1/jobs/%ff%fe", 404),
        ("GET", "/v1/jobs/a%0d%0ax-injected:%201", 404),
        ("GET", "/v1/jobs/" + "x" * 7_000, 404),
        ("GET", "/v1/jobs/x?wait=%00%ff", 422),
        ("GET", "/v1/models/%00", 404),
        ("GET", "/docs/../metrics", 404),
        ("OPTIONS", "*", 404),
        ("OPTIONS", "/v1/jobs", 405),
        ("TRACE", "/v1/jobs", 405),
        ("PROPFIND", "/livez", 405),
        ("POST", "/livez", 405),
    ],
)
def test_odd_paths_and_methods_are_problems_like_any_other(target: Target, method: str, path: str, status: int) -> None:
    answer = target.ask(request(method, path))
    assert answer.status == status
    assert answer.problem()["detail"]
    assert "x-injected" not in answer.headers
    assert status != 405 or answer.headers["allow"]


def test_a_target_with_scheme_and_host_is_taken(target: Target) -> None:
    assert target.ask(request("GET", "http://127.0.0.1/livez")).status == 200


def test_the_head_of_an_error_alone_has_no_body(target: Target) -> None:
    answer = target.ask(request("HEAD", "/v1/nothing"))
    assert (answer.status, answer.body) == (404, b"")
    assert answer.headers["content-type"] == "application/problem+json"


def test_a_request_to_change_the_protocol_is_answered_in_this_one(target: Target) -> None:
    answer = target.ask(request("GET", "/livez", "connection: upgrade", "upgrade: websocket"))
    assert (answer.status, answer.headers["connection"]) == (200, "close")


def test_a_trailer_does_not_become_a_header(target: Target) -> None:
    body = b"%x\r\n%s\r\n0\r\nx-request-id: from-the-trailer\r\n\r\n" % (len(JOB), JOB)
    # In one piece the trailer is there before the request is looked at.
    answer = target.ask(CHUNKED + body)
    assert answer.status == 202
    assert answer.headers["x-request-id"] != "from-the-trailer"


def test_a_request_that_does_not_go_on_is_told_so_and_closed(target: Target) -> None:
    stuck = [
        (b"GET /livez HTTP/1.1\r\nx-slow:", "head"),
        (b"\r\n", "head"),
        (KEPT + b"GET /li", "head"),
        (HALF, "body"),
        (CHUNKED + b"5\r\n{", "body"),
    ]
    with ExitStack() as stack:
        connections = [stack.enter_context(connect(target.port)) for _ in stuck]
        for connection, (sent, _) in zip(connections, stuck, strict=True):
            connection.sendall(sent)
        for connection, (_, part) in zip(connections, stuck, strict=True):
            answer = answer_of(connection)
            assert answer.status == 408
            assert f"the {part} of the request did not come within 1 s" in str(answer.problem()["detail"])


def test_a_trickle_is_cut_off_although_it_goes_on(target: Target) -> None:
    stop = threading.Event()
    with connect(target.port) as head, connect(target.port) as body:
        head.sendall(b"GET /livez HTTP/1.1\r\n")
        body.sendall(request("POST", "/v1/jobs", "content-type: application/json", "content-length: 100000"))

        def trickle() -> None:
            try:
                while not stop.wait(0.2):
                    head.send(b"x-a: b\r\n")
                    body.send(b" ")
            except OSError:
                return

        dripping = threading.Thread(target=trickle)
        dripping.start()
        try:
            assert [answer_of(one).status for one in (head, body)] == [408, 408]
        finally:
            stop.set()
            dripping.join()


def test_a_body_that_is_slow_but_moves_is_taken(target: Target) -> None:
    body = b" " * 20_000 + JOB
    with connect(target.port) as connection:
        head, _, _ = post(body).partition(b"\r\n\r\n")
        connection.sendall(head + b"\r\n\r\n")
        pause = threading.Event()
        for begin in range(0, len(body), 3_000):
            pause.wait(0.25)
            connection.sendall(body[begin : begin + 3_000])
        assert answer_of(connection).status == 202


def test_a_caller_that_says_nothing_is_closed_without_a_word(target: Target) -> None:
    with connect(target.port) as connection:
        assert connection.recv(1) == b""


def test_a_flood_of_requests_whose_answers_nobody_reads_is_given_up(target: Target) -> None:
    with target.standing():
        assert target.ask(KEPT * 50_000).status in (0, 200)


@pytest.mark.parametrize("padding", [0, 3_000])
def test_all_that_comes_at_once_on_a_connection_is_answered_in_turn(target: Target, padding: int) -> None:
    bodies = [b'{"model": "echo", "input": %d}' % number + b" " * padding for number in range(50)]
    sent = [post(body, f"x-request-id: {number}") for number, body in enumerate(bodies)]
    told = together(target, *(_kept(one) for one in sent[:-1]), sent[-1])
    assert [answer.status for answer in told] == [202] * 50
    assert [answer.headers["x-request-id"] for answer in told] == [str(number) for number in range(50)]


def test_nor_is_a_request_lost_that_comes_in_pieces_of_a_chunk_among_others(target: Target) -> None:
    chunked = _kept(CHUNKED) + b"".join(b"1\r\n%c\r\n" % byte for byte in JOB) + b"0\r\n\r\n"
    told = together(target, *[chunked] * 50, GET)
    assert [answer.status for answer in told] == [202] * 50 + [200]


def test_who_reads_the_answers_may_send_thousands_of_requests_at_once(target: Target) -> None:
    with target.standing():
        told = together(target, KEPT * 10_000, GET)
    assert [answer.status for answer in told] == [200] * 10_001


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (b"BREW /pot HTTP/1.1\r\n\r\n", 400),
        (request("GET", "/v1/jobs/" + "x" * 9_000), 414),
        (request("GET", "/livez", *(f"x-{n}: 1" for n in range(101))), 431),
        (request("POST", "/v1/jobs", "content-type: application/json", "transfer-encoding: chunked") + b"xyz\r\n", 400),
        (HALF, 408),
        (b"GET /li", 408),
    ],
)
def test_requests_before_one_that_cannot_be_read_are_answered_first(target: Target, fault: bytes, status: int) -> None:
    job = _kept(post(JOB, "prefer: wait=2"))
    told = together(target, job, *[KEPT] * 3, fault)
    assert [answer.status for answer in told] == [202, 200, 200, 200, status]
    assert told[-1].problem()["detail"]


def together(target: Target, *sent: bytes) -> list[Answer]:
    """Send all of it at once, and read all answers meanwhile."""
    with connect(target.port) as connection:
        sender = threading.Thread(target=connection.sendall, args=(b"".join(sent),))
        sender.start()
        told = answers_of(connection)
        sender.join()
    return told


def _kept(sent: bytes) -> bytes:
    """This request, without a word that the connection is to be closed."""
    return sent.replace(b"connection: close\r\n", b"")


@pytest.mark.parametrize(
    ("path", "start", "end"),
    [
        ("/v1/jobs?wait=60", b'{"model": "minilm", "input": "', b'"}'),
        ("/v1/embeddings", b'{"model": "minilm", "input": ["', b'"]}'),
        (
            "/v2/models/minilm/infer",
            b'{"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["',
            b'"]}]}',
        ),
    ],
)
def test_nothing_of_a_large_body_is_held_while_its_job_is_waited_for(
    target: Target, path: str, start: bytes, end: bytes
) -> None:
    body = start + b"x" * (4 * 2**20) + end
    sent = request("POST", path, "content-type: application/json", body=body)
    held: list[socket.socket] = []
    with ExitStack() as stack, target.standing():
        for _ in range(24):
            held.append(stack.enter_context(connect(target.port)))
            held[-1].sendall(sent)
            wait_until(lambda: metric(target.port, "sheaf_waiters") == len(held), description="it waits")


def test_who_goes_away_after_a_large_body_is_not_waited_for(target: Target) -> None:
    body = b'{"model": "echo", "input": "' + b"x" * (4 * 2**20) + b'"}'
    sent = request("POST", "/v1/jobs?wait=60", "content-type: application/json", body=body)
    before = metric(target.port, "sheaf_waiters")
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(connect(target.port)).sendall(sent)
        wait_until(lambda: metric(target.port, "sheaf_waiters") == before + 8, description="they wait")
    wait_until(lambda: metric(target.port, "sheaf_waiters") == before, description="nobody waits any more")


def test_two_thousand_idle_slow_and_half_sent_connections_keep_nobody_out(target: Target) -> None:
    kinds = (b"", b"GET /livez HTTP/1.1\r\nx-slow:", HALF, KEPT)

    def timed_out() -> float:
        return metric(target.port, "sheaf_http_refused_total", type="request-timeout")

    before = timed_out()
    with ExitStack() as stack, target.standing():
        for number in range(2_000):
            stack.enter_context(connect(target.port)).sendall(kinds[number % len(kinds)])
        wait_until(lambda: timed_out() - before == 1_000, description="the slow and the half-sent ones are closed")


def test_connections_beyond_the_limit_are_told_to_come_again(tmp_path: Path) -> None:
    with front(tmp_path, api={"max_connections": 20}) as made, ExitStack() as stack:
        port: int = made.config["api"]["port"]
        held = [stack.enter_context(connect(port)) for _ in range(20)]
        told: list[Answer] = []

        def one_more() -> bool:
            with connect(port) as connection:
                told.append(answer_of(connection))
            return told[-1].status == 503

        # A machine that stands still for a second misses the answer: the server does not wait longer.
        wait_until(one_more, description="it is told that there are too many")
        assert told[-1].problem()["type"] == "urn:sheaf:error:too-many-connections"
        assert told[-1].headers["retry-after"]
        held[0].close()
        wait_until(lambda: answers(f"{made.base}/livez"), description="it serves again")


def test_an_answer_that_nobody_reads_is_given_up(target: Target) -> None:
    """The caller asks for page after page, and takes none."""
    with target.standing(), socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        connection.connect((HOST, target.port))
        wait_until(lambda: _is_cut(connection), description="the connection is cut")


def test_what_goes_wrong_inside_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("the secret of the inside")

    envelope = Envelope(broken, ApiMetrics(CollectorRegistry()), LineWriter("json"), lambda *_: None)

    async def asked() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(envelope), base_url="http://test") as client:
            return await client.get("/v1/jobs")

    answer = asyncio.run(asked())
    assert answer.status_code == 500
    assert answer.json()["type"] == "urn:sheaf:error:internal"
    assert "secret" not in answer.text
    assert "the secret of the inside" in caplog.text


def _is_cut(connection: socket.socket) -> bool:
    try:
        connection.send(KEPT.replace(b"/livez", b"/openapi.json"))
    except OSError:
        return True
    return False
