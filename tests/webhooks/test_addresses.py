"""Which URLs and addresses a webhook may have."""

from __future__ import annotations

import pytest

from webhooks import Policy, Refused, host_of

STRICT = Policy()

INSIDE = [
    *("127.0.0.1", "127.1", "2130706433", "0x7f000001", "0x7F.1", "0177.0.0.1", "017700000001", "127.0.0.1."),
    *("0.0.0.0", "0", "10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.1.1", "3232235777"),
    *("169.254.169.254", "2852039166", "0xa9fea9fe", "0251.0376.0251.0376", "100.100.100.200", "168.63.129.16"),
    *("100.64.0.1", "192.0.0.192", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1"),
    *("[::1]", "[::]", "[fe80::1]", "[fc00::1]", "[fd00:ec2::254]", "[ff02::1]", "[fec0::1]", "[2001:db8::1]"),
    *("[::ffff:127.0.0.1]", "[::ffff:a9fe:a9fe]", "[::127.0.0.1]", "[64:ff9b::7f00:1]", "[64:ff9b::a9fe:a9fe]"),
    *("[64:ff9b:1::1]", "[2002:7f00:1::]", "[2002:a9fe:a9fe::1]", "[2001:0:7f00:1::]", "[0:0:0:0:0:ffff:0a00:0001]"),
]


@pytest.mark.parametrize("host", INSIDE)
def test_an_address_inside_is_refused_in_every_notation(host: str) -> None:
    with pytest.raises(Refused, match="is not public"):
        STRICT.target(f"https://{host}/hook")


@pytest.mark.parametrize(
    "host", ["8.8.8.8", "[2606:4700::1111]", "[::ffff:8.8.8.8]", "[64:ff9b::808:808]", "172.32.0.1"]
)
def test_a_public_address_is_taken(host: str) -> None:
    assert STRICT.target(f"https://{host}/hook").address is not None


ODD = ["127.1", "2130706433", "0177.0.0.1", "0x7f.1", "0x7F000001", "017700000001", "127.0.0.0x1", "127.0.0.1."]


@pytest.mark.parametrize("host", ODD)
def test_an_address_that_is_listed_is_taken_only_as_it_is_usually_written(host: str) -> None:
    with pytest.raises(Refused, match=r"write the address as 127\.0\.0\.1, not as"):
        Policy.of(["127.0.0.0/8"], allow_http=False).target(f"http://{host}/hook")


@pytest.mark.parametrize("host", ["134744072", "8.526344", "010.8.8.8", "0x8.8.8.8", "8.8.8.8."])
def test_a_public_address_is_taken_only_as_it_is_usually_written(host: str) -> None:
    with pytest.raises(Refused, match=r"write the address as 8\.8\.8\.8, not as"):
        STRICT.target(f"https://{host}/hook")


@pytest.mark.parametrize(
    "url, said",
    [
        ("ftp://example.org/", "begin with https"),
        ("file:///etc/passwd", "begin with https"),
        ("//example.org/", "begin with https"),
        ("http://example.org/", "webhooks.allow"),
        ("https://user:pass@example.org/", "user or password"),
        ("https://example.org@127.0.0.1/", "user or password"),
        ("https://example.org/#part", "fragment"),
        ("https:///path", "no host name"),
        ("https://exa mple.org/", "without spaces"),
        ("https://example.org\\@127.0.0.1/", "backslashes"),
        ("https://\uff11\uff12\uff17.0.0.1/", "ASCII"),
        ("https://127%2e0.0.1/", "no host name"),
        ("https://example.org./", "without the dot at its end: example.org"),
        ("https://example.org../", "no host name"),
        ("https://example..org/", "no host name"),
        (f"https://{'a' * 64}.org/", "no host name"),
        (f"https://{'a.' * 127}org/", "no host name"),
        ("https://1.2.3.4.5/", "no host name"),
        ("https://256.1.1.1/", "no host name"),
        ("https://example.0x7f/", "no host name"),
        ("https://[::1/", "no URL"),
        ("https://[fe80::1%25eth0]/", "not public"),
        ("https://example.org:99999/", "no URL"),
        ("https://example.org:0/", "no port 0"),
        ("https://example.org/\r\nx-evil: 1", "without spaces"),
        ("https://example.org/" + "a" * 2048, "2048"),
    ],
)
def test_a_url_that_is_not_plain_is_refused_with_its_reason(url: str, said: str) -> None:
    with pytest.raises(Refused, match=said):
        STRICT.target(url)


def test_a_name_is_taken_apart_and_not_resolved() -> None:
    target = STRICT.target("https://Hooks.Example.ORG:8443/a?b=c")
    assert (target.host, target.port, target.address, target.trusted) == ("hooks.example.org", 8443, None, False)


def test_what_the_settings_list_may_be_inside_and_without_tls() -> None:
    policy = Policy.of(["hooks.internal", "10.1.0.0/16", "127.0.0.1"], allow_http=False)
    assert policy.target("http://hooks.internal/").trusted
    assert policy.target("http://10.1.2.3/").trusted
    assert policy.target("http://127.0.0.1:9000/").trusted
    policy.check("10.1.2.3")
    for url in ("https://10.2.0.1/", "http://other.internal/", "https://127.0.0.2/"):
        with pytest.raises(Refused):
            policy.target(url)


def test_http_can_be_allowed_without_allowing_addresses() -> None:
    policy = Policy.of([], allow_http=True)
    assert not policy.target("http://example.org/").trusted
    with pytest.raises(Refused, match="not public"):
        policy.target("http://10.0.0.1/")


@pytest.mark.parametrize("entry", ["10.0.0.0/40", "http://example.org", "a b", "", "10.0.0.1/8", "1234"])
def test_what_cannot_be_listed_is_told(entry: str) -> None:
    with pytest.raises(ValueError, match="neither a host name"):
        Policy.of([entry], allow_http=False)


@pytest.mark.parametrize(
    "host, urls",
    [
        ("example.org", ["https://example.org/a", "HTTP://EXAMPLE.org:81/b?c=//d", "https://example.org.", "http://example.org:80"]),
        ("127.0.0.1", ["http://127.0.0.1", "https://127.1:1/", "http://[::ffff:127.0.0.1]:8/", "http://[0:0::FFFF:7f00:1]"]),
        ("2001:db8::1", ["http://[2001:db8::1]/", "https://[2001:0DB8:0:0::1]:8443"]),
        ("", ["", "no URL", "ftp://example.org", "http:?//", "http://[::1", "https://user:secret@example.org/"]),
    ],
)  # fmt: skip
def test_a_host_is_the_same_however_it_is_written(host: str, urls: list[str]) -> None:
    assert {host_of(url) for url in urls} == {host}
