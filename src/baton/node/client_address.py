"""Which client a connection or a request comes from, and which host names a server without keys answers to.

An address is a group of clients that one person controls: an IPv4 address, or an IPv6 network of /64.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from functools import lru_cache

from baton.core.setting import BadConfig
from baton.node.peer_options import is_loopback

IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

HOST_BYTES_MAX = 261
"""A DNS name and a port."""
_IPV6_PREFIX = 64
UNKNOWN = "unknown"
"""Clients of a proxy that does not tell their address are counted together."""


def parse_networks(texts: Sequence[str]) -> tuple[IpNetwork, ...]:
    """Addresses and networks as given with --trusted-proxies."""
    found = []
    for text in texts:
        try:
            found.append(ipaddress.ip_network(text, strict=False))
        except ValueError:
            raise BadConfig(f"--trusted-proxies {text} is no address or network, such as 10.0.0.5 or 10.0.0.0/24") from None
    return tuple(found)


def parse_address(text: str) -> IpAddress | None:
    try:
        address = ipaddress.ip_address(text.strip())
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return address if mapped is None else mapped


def is_in(address: IpAddress, networks: Iterable[IpNetwork]) -> bool:
    return any(address in network for network in networks)


def counted_as(address: IpAddress) -> str:
    if address.version == 4:
        return str(address)
    return str(ipaddress.ip_network((address, _IPV6_PREFIX), strict=False))


def forwarded_for(headers: Iterable[tuple[bytes, bytes]], proxies: Sequence[IpNetwork]) -> str | None:
    """What a request is counted for that came by trusted proxies: the last in X-Forwarded-For that is not one of them.

    What stands before it was written by the client itself, and says nothing. All that is no address is counted as one.
    None: only proxies are named, or nobody.
    """
    listed = b",".join(value for name, value in headers if name == b"x-forwarded-for").decode("latin-1")
    for text in reversed(listed.split(",")):
        if not text.strip():
            continue
        address = parse_address(text) or parse_address(_without_port(text.strip()))
        if address is None:
            return UNKNOWN
        if not is_in(address, proxies):
            return counted_as(address)
    return None


def _without_port(text: str) -> str:
    """The address in `1.2.3.4:5`, `[2001:db8::1]:5` and `[2001:db8::1]`, as some proxies write it."""
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0]


@lru_cache(maxsize=64)
def is_local_name(host: bytes) -> bool:
    """Whether a Host header names loopback. No page can be given such a name by whoever answers for another domain."""
    return is_loopback(hostname(host))


def hostname(host: bytes) -> str:
    """The Host header without its port; empty where it cannot be one."""
    if len(host) > HOST_BYTES_MAX:
        return ""
    text = host.decode("latin-1").strip().lower()
    if text.startswith("["):
        name, closed, _ = text[1:].partition("]")
        return name if closed else ""
    return text.partition(":")[0].removesuffix(".")
