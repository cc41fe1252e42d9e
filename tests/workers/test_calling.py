"""Which addresses a call may end at, whatever names lead to."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from tests.receiver import Receiver
from webhooks import Policy, Target
from workers.courier.calling import Caller
from workers.courier.schedule import Answer


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
    assert answer.error is not None
    assert "the address 127.0.0.1 is not public" in answer.error
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
    assert f"the address {address} is not public" in (answer.error or "")


async def test_a_host_that_the_settings_name_may_be_anywhere(receiver: Receiver) -> None:
    policy = Policy.of(["localhost"], allow_http=False)
    answer = await call(policy, policy.target(f"http://localhost:{receiver.port}/hook"))
    assert answer.status == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "[::ffff:127.0.0.1]", "[0:0::FFFF:7F00:1]", "LocalHost"])
async def test_whatever_notation_of_a_host_is_taken_can_be_called(receiver: Receiver, host: str) -> None:
    policy = Policy.of(["127.0.0.0/8", "::ffff:127.0.0.1", "localhost"], allow_http=False)
    answer = await call(policy, policy.target(f"http://{host}:{receiver.port}/hook"))
    assert (answer.status, answer.error) == (200, None)


async def test_proxies_of_the_environment_are_not_used(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    policy = Policy.of(["127.0.0.1"], allow_http=False)
    assert (await call(policy, policy.target(receiver.url()))).status == 200


async def test_a_url_that_could_be_read_in_two_ways_is_not_called(receiver: Receiver) -> None:
    target = Target(receiver.url(), "example.org", 80, None, trusted=True)
    assert (await call(Policy(), target)).error == "the URL can be read in two ways"
