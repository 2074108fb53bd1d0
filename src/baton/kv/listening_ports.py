"""The TCP addresses that this process listens at, as the kernel tells: a library that opens ports does not say which."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import struct
from pathlib import Path

_LISTENING = "0A"


def listening_addresses() -> frozenset[str]:
    """HOST:PORT of each; empty where the system has no /proc."""
    own, rows = _own_sockets(), [*_rows("tcp"), *_rows("tcp6")]
    return frozenset(address_of_row(row[1]) for row in rows if row[3] == _LISTENING and row[9] in own)


def _rows(table: str) -> list[list[str]]:
    try:
        return [line.split() for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]]
    except OSError:
        return []


def address_of_row(written: str) -> str:
    """An address as the table has it, such as 0100007F:1F40: words in the machine's byte order, and the port."""
    host, _, port = written.partition(":")
    words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
    address = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    return f"[{address}]:{int(port, 16)}" if address.version == 6 else f"{address}:{int(port, 16)}"


def _own_sockets() -> set[str]:
    own: set[str] = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                target = os.readlink(f"/proc/self/fd/{name}")
                if target.startswith("socket:["):
                    own.add(target[len("socket:[") : -1])
    return own
