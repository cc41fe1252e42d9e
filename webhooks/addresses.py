"""Which addresses a webhook may have: an attacker who names one must not reach what only this machine can reach.

Asked twice: about the URL, when it is given, and about the very address that a connection goes to, since a name may be
resolved to something else by then.

Source: the IANA registries of special-purpose IPv4 and IPv6 addresses; OWASP's sheet on server-side request forgery.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Self
from urllib.parse import SplitResult, urlsplit

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

#: Most characters of a URL.
MAX_URL = 2048

_NO_HOSTS = tuple(
    IPv4Network(network)
    for network in (
        *("0.0.0.0/8", "127.0.0.0/8"),  # this host
        *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"),  # private
        "100.64.0.0/10",  # carriers' NAT; Alibaba's metadata service
        "169.254.0.0/16",  # link-local; the metadata services of most clouds
        *("192.0.0.0/24", "192.88.99.0/24"),  # protocols; Oracle's metadata service
        *("192.0.2.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24"),  # documentation, measurements
        "168.63.129.16/32",  # Azure's metadata service
        "224.0.0.0/3",  # multicast, reserved, broadcast
    )
)
#: Of IPv6 all but this is loopback, local, multicast or nobody's.
_UNICAST = IPv6Network("2000::/3")
_NO_HOSTS_V6 = tuple(IPv6Network(network) for network in ("2001::/23", "2001:db8::/32", "3fff::/20"))
#: Translators to IPv4 take the address from the last bits of these.
_NAT64 = IPv6Network("64:ff9b::/96")
_COMPATIBLE = IPv6Network("::/96")

_PORTS = {"https": 443, "http": 80}
_PRINTABLE = re.compile(r"[\x21-\x7e]+")
_NAME = re.compile(r"(?:[a-z0-9_][a-z0-9_-]{0,62}\.)*[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
#: Most characters of a host name.
_MAX_NAME = 253
#: What ends so can be nothing but an IPv4 address (the URL standard's rule, which callers keep).
_ENDS_IN_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)")


class Refused(ValueError):
    """A webhook may not be called there; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Target:
    """A URL that passed. `trusted` means that the settings name its host, wherever that is."""

    url: str
    host: str
    port: int
    #: The host, where it is an address.
    address: Address | None
    trusted: bool


@dataclass(frozen=True, slots=True)
class Policy:
    """What may be called: public addresses, over https, and whatever the settings allow besides."""

    hosts: frozenset[str] = frozenset()
    networks: tuple[Network, ...] = ()
    allow_http: bool = False

    @classmethod
    def of(cls, allow: Sequence[str], *, allow_http: bool) -> Self:
        """`allow` lists host names, addresses and networks. Raises `ValueError` for what is none of them."""
        networks: list[Network] = []
        hosts: list[str] = []
        for entry in allow:
            try:
                networks.append(ip_network(entry))
            except ValueError:
                host = entry.lower().rstrip(".")
                if not _is_name(host):
                    raise ValueError(f"{entry!r} is neither a host name, nor an address, nor a network") from None
                hosts.append(host)
        return cls(frozenset(hosts), tuple(networks), allow_http)

    def target(self, url: str) -> Target:
        """The URL taken apart. Raises `Refused`; names are not resolved here."""
        parts, port = _split(url)
        written = parts.hostname or ""
        host = written.removesuffix(".")
        address = _literal(host, bracketed="[" in parts.netloc)
        if address is None and not _is_name(host):
            raise Refused(f"{host!r} is no host name")
        trusted = host in self.hosts or (address is not None and self._listed(address))
        if parts.scheme == "http" and not (trusted or self.allow_http):
            raise Refused("it must begin with https:// (or its host be listed in webhooks.allow)")
        if address is not None and not trusted:
            self.check(address)
        # Resolvers differ in what they take such for, and some callers take it for nothing.
        if isinstance(address, IPv4Address) and written != str(address):
            raise Refused(f"write the address as {address}, not as {written}")
        if host != written:
            raise Refused(f"write the host without the dot at its end: {host}")
        return Target(url, host, port, address, trusted)

    def check(self, address: Address | str) -> None:
        """Raises `Refused` for an address that may not be connected to."""
        if isinstance(address, str):
            address = ip_address(address)
        if not self._listed(address) and not _is_public(address):
            raise Refused(f"the address {address} is not public (webhooks.allow can list it)")

    def _listed(self, address: Address) -> bool:
        return any(address in network for network in self.networks)


@lru_cache(maxsize=1024)
def host_of(url: str) -> str:
    """What stands for a URL's host, however that is written and whatever the port; "" where that cannot be told."""
    try:
        parts, _ = _split(url)
        host = (parts.hostname or "").rstrip(".")
        address = _literal(host, bracketed="[" in parts.netloc)
    except Refused:
        return ""
    if isinstance(address, IPv6Address):
        return str(address.ipv4_mapped or address)
    return host if address is None else str(address)


def _split(url: str) -> tuple[SplitResult, int]:
    """The URL's parts and its port, as far as every reader of URLs would take it apart in the same way."""
    if len(url) > MAX_URL:
        raise Refused(f"it has {len(url)} characters, {MAX_URL} at most may be used")
    if not _PRINTABLE.fullmatch(url) or "\\" in url:
        raise Refused("write it in ASCII without spaces and backslashes (names in punycode, the rest with %)")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise Refused(f"it is no URL: {error}") from None
    if parts.scheme not in _PORTS:
        raise Refused("it must begin with https://")
    if "@" in parts.netloc:
        raise Refused("it may not hold a user or password: put a token into the path or the query")
    if "#" in url:
        raise Refused("it may not have a fragment (#): no server would see it")
    if port == 0:
        raise Refused("there is no port 0")
    return parts, port or _PORTS[parts.scheme]


def _literal(host: str, *, bracketed: bool) -> Address | None:
    """The address that a host is, in any notation that the system's resolver understands; None for a name."""
    if bracketed:
        try:
            return IPv6Address(host)
        except ValueError:
            raise Refused(f"[{host}] is no IPv6 address") from None
    try:
        # Decimal, octal, hexadecimal and short forms: 2130706433, 0177.0.0.1, 0x7f.1, 127.1.
        return IPv4Address(socket.inet_aton(host))
    except OSError:
        return None


def _is_name(host: str) -> bool:
    return bool(_NAME.fullmatch(host)) and len(host) <= _MAX_NAME and not _ENDS_IN_NUMBER.fullmatch(host)


def _is_public(address: Address) -> bool:
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _NO_HOSTS)
    inner = _inner(address)
    if inner is not None:
        return _is_public(inner)
    return address in _UNICAST and not any(address in network for network in _NO_HOSTS_V6)


def _inner(address: IPv6Address) -> IPv4Address | None:
    """The IPv4 address that packets to this one end at."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address in _NAT64 or address in _COMPATIBLE:
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    return None
