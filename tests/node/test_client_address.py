"""Whom a request is counted for, and which host names are loopback's."""

from __future__ import annotations

import pytest

from baton.core.setting import BadConfig
from baton.node.client_address import UNKNOWN, counted_as, forwarded_for, is_local_name, parse_address, parse_networks

PROXIES = parse_networks(["10.0.0.5", "192.168.0.0/16", "fd00::/8"])


@pytest.mark.parametrize(
    ("listed", "client"),
    [
        (["203.0.113.7"], "203.0.113.7"),
        (["1.1.1.1, 203.0.113.7"], "203.0.113.7"),  # the client itself wrote the first
        (["1.1.1.1", "203.0.113.7, 10.0.0.5", "192.168.3.4"], "203.0.113.7"),
        (["10.0.0.5, 192.168.0.1"], None),
        (["203.0.113.7, nonsense"], UNKNOWN),
        (["203.0.113.7, unknown"], UNKNOWN),
        (["203.0.113.7, 1.2.3"], UNKNOWN),
        (["203.0.113.7:5555"], "203.0.113.7"),
        (["1.1.1.1, 203.0.113.7:5555, 10.0.0.5:80"], "203.0.113.7"),
        (["[2001:db8::1]:5"], "2001:db8::/64"),
        (["[2001:db8::1]"], "2001:db8::/64"),
        (["2001:db8::1"], "2001:db8::/64"),
        (["203.0.113.7, "], "203.0.113.7"),
        (["::ffff:203.0.113.7"], "203.0.113.7"),
        ([], None),
        ([""], None),
    ],
)
def test_the_client_is_the_last_address_that_is_no_proxy(listed: list[str], client: str | None) -> None:
    headers = [(b"host", b"x"), *((b"x-forwarded-for", value.encode()) for value in listed)]
    assert forwarded_for(headers, PROXIES) == client


def test_neighbours_in_one_ipv6_network_are_counted_as_one() -> None:
    one, other, stranger = (parse_address(text) for text in ("2001:db8::1", "2001:db8::ffff:1", "2001:db8:0:1::1"))
    assert one is not None
    assert other is not None
    assert stranger is not None
    assert counted_as(one) == counted_as(other) != counted_as(stranger)


def test_what_is_no_network_is_told_with_the_option() -> None:
    with pytest.raises(BadConfig, match="--trusted-proxies nginx"):
        parse_networks(["nginx"])


@pytest.mark.parametrize("host", [b"localhost", b"127.1.2.3", b"[::1]", b"[::1]:80", b"localhost:1", b" LocalHost. "])
def test_loopback_names(host: bytes) -> None:
    assert is_local_name(host)


@pytest.mark.parametrize(
    "host",
    [b"", b"evil.example", b"localhost.evil.example", b"127.0.0.1.evil.example", b"0.0.0.0", b"[::1", b"[::2]", b"10.0.0.1",
     b"127.0.0.1@evil.example", b"localhost" + b"x" * 300, b"\xff"],
)  # fmt: skip
def test_other_names(host: bytes) -> None:
    assert not is_local_name(host)
