"""Which addresses a call may end at, whatever names lead to; what is told of a call that fails; kept connections."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import pytest
from aiohttp.abc import AbstractResolver, ResolveResult
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.conftest import free_port
from tests.receiver import Receiver, Reply
from webhooks import Policy, Target
from workers.courier.calling import Caller
from workers.courier.failures import NoAnswer, failed
from workers.courier.schedule import Answer

LOCAL = Policy.of(["127.0.0.1"], allow_http=False)


class Rebinding(AbstractResolver):
    """A name server that says something else each time it is asked, as an attacker's does."""

    def __init__(self, *addresses: str) -> None:
        self._addresses = list(addresses)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        address = self._addresses.pop(0) if len(self._addresses) > 1 else self._addresses[0]
        found = ResolveResult(
            hostname=host, host=address, port=port, family=socket.AF_INET, proto=0, flags=socket.AI_NUMERICHOST
        )
        return [found]

    async def close(self) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


async def call(policy: Policy, target: Target, resolver: AbstractResolver | None = None) -> Answer:
    async with Caller(policy, 1.0, resolver=resolver) as caller:
        return await caller.call(target, {}, b"{}")


async def test_a_name_that_leads_inside_by_the_time_of_the_call_is_not_called(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DNS rebinding: public when it was asked about, loopback when it is connected to."""
    policy = Policy(allow_http=True)
    resolver = Rebinding("93.184.215.14", "127.0.0.1")
    target = policy.target(f"http://rebinding.example:{receiver.port}/hook")
    [asked_first] = await resolver.resolve(target.host)
    policy.check(asked_first["host"])
    answer = await call(policy, target, resolver)
    assert answer.error == NoAnswer.NOT_ALLOWED
    assert "the address 127.0.0.1 is not public" in (answer.detail or "")
    assert receiver.calls() == []


async def test_a_connection_goes_to_the_very_address_that_was_checked(receiver: Receiver) -> None:
    policy = Policy.of(["127.0.0.1"], allow_http=True)
    target = policy.target(f"http://rebinding.example:{receiver.port}/hook")
    answer = await call(policy, target, Rebinding("127.0.0.1", "169.254.169.254"))
    assert (answer.status, answer.error) == (200, None)


@pytest.mark.parametrize("address", ["169.254.169.254", "10.0.0.1", "0.0.0.0"])
async def test_names_of_inner_addresses_are_not_called(address: str) -> None:
    policy = Policy(allow_http=True)
    answer = await call(policy, policy.target("http://inner.example/"), Rebinding(address))
    assert answer.error == NoAnswer.NOT_ALLOWED
    assert f"the address {address} is not public" in (answer.detail or "")


async def test_a_host_that_the_settings_name_may_be_anywhere(receiver: Receiver) -> None:
    policy = Policy.of(["localhost"], allow_http=False)
    answer = await call(policy, policy.target(f"http://localhost:{receiver.port}/hook"))
    assert answer.status == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "[::ffff:127.0.0.1]", "[0:0::FFFF:7F00:1]", "LocalHost"])
async def test_whatever_notation_of_a_host_is_taken_can_be_called(receiver: Receiver, host: str) -> None:
    policy = Policy.of(["127.0.0.0/8", "::ffff:127.0.0.1", "localhost"], allow_http=False)
    answer = await call(policy, policy.target(f"http://{host}:{receiver.port}/hook"))
    assert (answer.status, answer.error) == (200, None)


@asynccontextmanager
async def own_certificate(folder: Path) -> AsyncIterator[int]:
    """A port that speaks TLS with a certificate of its own making."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    file = folder / "own.pem"
    written = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    file.write_bytes(key.private_bytes(*written) + certificate.public_bytes(serialization.Encoding.PEM))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_proxies_of_the_environment_are_not_used(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    policy = Policy.of(["127.0.0.1"], allow_http=False)
    assert (await call(policy, policy.target(receiver.url()))).status == 200


async def test_a_url_that_could_be_read_in_two_ways_is_not_called(receiver: Receiver) -> None:
    target = Target(receiver.url(), "example.org", 80, None, trusted=True)
    assert (await call(Policy(), target)).error == "the URL can be read in two ways"


@pytest.mark.parametrize(
    "reply, failure, detail",
    [
        (Reply(raw=b""), NoAnswer.CLOSED, "Server disconnected"),
        (Reply(raw=b"HTTP/1.1 200 OK\r\nx-inside: of nobody's"), NoAnswer.CLOSED, "inside"),
        (Reply(raw=b"", reset=True), NoAnswer.CLOSED, "reset"),
        (Reply(raw=b"220 mail.inside\r\n"), NoAnswer.NOT_HTTP, "mail.inside"),
    ],
)
async def test_of_an_answer_that_is_none_only_its_kind_is_told(
    receiver: Receiver, reply: Reply, failure: NoAnswer, detail: str
) -> None:
    receiver.answer("/hook", reply)
    answer = await call(LOCAL, LOCAL.target(receiver.url()))
    assert (answer.status, answer.error) == (None, failure)
    assert detail in (answer.detail or "")
    assert (answer.detail or "").isprintable()
    assert len(receiver.calls()) == 1


async def test_a_receivers_words_are_no_part_of_the_error(receiver: Receiver) -> None:
    receiver.answer("/hook", Reply(500, body=b"\tthe text\r\n\x1b[31m of a\x7f user"))
    answer = await call(LOCAL, LOCAL.target(receiver.url()))
    assert (answer.error, answer.detail) == ("it answered 500", "the text [31m of a user")


def test_a_path_that_may_be_a_secret_is_no_part_of_what_is_told() -> None:
    """As the client library words a connection that is lost while the body is written."""
    url = "https://example.org/hooks/secret"
    lost = aiohttp.ClientOSError(None, f"Can not write request body for {url}")
    assert failed(lost, url) == (NoAnswer.CLOSED, "[Errno None] Can not write request body for the URL")


@pytest.mark.parametrize(
    "url, failure",
    [
        ("http://127.0.0.1:{free}/", NoAnswer.REFUSED),
        ("http://localhost:{free}/", NoAnswer.REFUSED),
        ("http://nowhere.invalid/", NoAnswer.NO_NAME),
        ("https://127.0.0.1:{receiver}/", NoAnswer.NO_TLS),
        ("http://127.255.255.255:{receiver}/", NoAnswer.UNREACHABLE),
    ],
)
async def test_how_a_connection_fails_is_told_without_an_address(
    receiver: Receiver, url: str, failure: NoAnswer
) -> None:
    policy = Policy.of(["127.0.0.0/8", "localhost"], allow_http=True)
    answer = await call(policy, policy.target(url.format(free=free_port(), receiver=receiver.port)))
    assert answer.error == failure
    assert answer.detail


async def test_a_certificate_that_nobody_vouches_for_is_told_of(tmp_path: Path) -> None:
    async with own_certificate(tmp_path) as port:
        answer = await call(LOCAL, LOCAL.target(f"https://127.0.0.1:{port}/"))
    assert answer.error == NoAnswer.CERTIFICATE


@pytest.mark.parametrize("reset", [False, True])
async def test_a_call_on_a_kept_connection_that_was_closed_is_made_again_on_a_new_one(
    receiver: Receiver, reset: bool
) -> None:
    receiver.answer("/hook", 200, Reply(raw=b"", reset=reset), 204)
    async with Caller(LOCAL, 5.0) as caller:
        first, second = [await caller.call(LOCAL.target(receiver.url()), {}, b"{}") for _ in range(2)]
    assert (first.status, first.error) == (200, None)
    assert (second.status, second.error) == (204, None)
    kept, failed, fresh = receiver.calls()
    assert kept.port == failed.port != fresh.port
    assert fresh.headers == {**failed.headers, "connection": "close"}
    assert failed.body == fresh.body


async def test_a_call_that_is_made_again_goes_where_calls_may_go(receiver: Receiver) -> None:
    """The name leads elsewhere by then."""
    resolver = Rebinding("127.0.0.1", "169.254.169.254")
    receiver.answer("/hook", 200, Reply(raw=b""), 200)
    policy = Policy.of(["127.0.0.1"], allow_http=True)
    async with Caller(policy, 5.0, resolver=resolver) as caller:
        target = policy.target(f"http://rebinding.example:{receiver.port}/hook")
        answers = [await caller.call(target, {}, b"{}") for _ in range(2)]
    assert [answer.error for answer in answers] == [None, NoAnswer.NOT_ALLOWED]
    assert len(receiver.calls()) == 2


async def test_a_call_is_made_again_once_at_most(receiver: Receiver) -> None:
    receiver.answer("/hook", 200, Reply(raw=b""))
    async with Caller(LOCAL, 5.0) as caller:
        answers = [await caller.call(LOCAL.target(receiver.url()), {}, b"{}") for _ in range(2)]
    assert [answer.error for answer in answers] == [None, NoAnswer.CLOSED]
    assert len(receiver.calls()) == 3


@pytest.mark.parametrize("raw", [b"HTTP/1.1 500", b"220 mail.inside\r\n"])
async def test_a_call_that_was_answered_in_part_is_not_made_again(receiver: Receiver, raw: bytes) -> None:
    receiver.answer("/hook", 200, Reply(raw=raw), 200)
    async with Caller(LOCAL, 5.0) as caller:
        answers = [await caller.call(LOCAL.target(receiver.url()), {}, b"{}") for _ in range(2)]
    assert [answer.error is None for answer in answers] == [True, False]
    assert len(receiver.calls()) == 2


async def test_a_call_that_is_made_again_has_the_time_that_is_left(receiver: Receiver) -> None:
    """Each of the two is answered within the time of a call, both are not."""
    receiver.answer("/hook", 200, Reply(raw=b"", after_s=1.5), Reply(200, after_s=1.5))
    async with Caller(LOCAL, 2.0) as caller:
        answers = [await caller.call(LOCAL.target(receiver.url()), {}, b"{}") for _ in range(2)]
    assert [answer.error for answer in answers] == [None, "no answer within 2 s"]
