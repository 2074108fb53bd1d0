"""Mooncake's Transfer Engine: loading the library, and one engine per process and address.

Owns the library and the system libraries that it needs. Knows nothing of KV.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Protocol

from baton.kv.listening_ports import listening_addresses
from baton.kv.transfer_contract import TransferUnavailable

log = logging.getLogger("baton.mooncake")

READ_TIMEOUT_S = 5
LIBRARIES = Path(sys.prefix) / "lib" / "baton-mooncake"
"""Folder of the system libraries that the set-up installs for the engine where the system lacks them."""
_SETTINGS = {"MC_TRANSFER_TIMEOUT": str(READ_TIMEOUT_S), "MC_LOG_LEVEL": "ERROR"}
"""Environment variables of the library and the values that are used where they are not set."""


class _TransferEngine(Protocol):
    """The calls of the library that are used here. Zero is success."""

    def initialize(self, name: str, metadata: str, protocol: str, device: str) -> int: ...
    def get_rpc_port(self) -> int: ...
    def register_memory(self, address: int, size: int) -> int: ...
    def unregister_memory(self, address: int) -> int: ...
    def batch_transfer_sync_read(self, peer: str, to: list[int], of: list[int], sizes: list[int]) -> int: ...


@cache
def why_unavailable() -> str | None:
    try:
        _engine_class()
    except ImportError as error:
        return f"mooncake's Transfer Engine cannot be loaded: {error}"
    return None


@cache
def load_libraries() -> None:
    """Set the environment and load the system libraries that mooncake's modules need when they are imported."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    for library in _in_order(LIBRARIES):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@cache
def _engine_class() -> Callable[[], _TransferEngine]:
    load_libraries()
    from mooncake.engine import TransferEngine

    made: Callable[[], _TransferEngine] = TransferEngine
    return made


def _in_order(folder: Path) -> list[Path]:
    """The libraries of a folder, each after those that it needs: the netlink ones first."""
    return sorted(
        folder.glob("lib*.so.*"), key=lambda path: (not path.name.startswith("libnl-3"), "nl" not in path.name, path.name)
    )


@contextlib.contextmanager
def ports_told(opener: str) -> Iterator[None]:
    """Log the ports that the library opens inside the block, which it tells nobody. They are open to everybody."""
    before = listening_addresses()
    yield
    opened = sorted(listening_addresses() - before) or ["ports that the system does not tell"]
    log.warning(
        "mooncake: %s listens at %s, without authentication: what reaches it can read and write this instance's KV",
        opener,
        ", ".join(opened),
    )


class TransferEngine:
    """One engine per process and address, shared by its users and ended by the last of them."""

    _lock = threading.Lock()
    _open: dict[str, TransferEngine] = {}  # noqa: RUF012 - the one table of them, on purpose

    def __init__(self, host: str) -> None:
        self._host = host
        self._users = 0
        self._registered: Counter[int] = Counter()
        self._theirs = _engine_class()()
        with ports_told("the Transfer Engine"):
            started = self._theirs.initialize(host, "P2PHANDSHAKE", "tcp", "") == 0
        if not started:
            raise TransferUnavailable(f"mooncake's Transfer Engine does not start on {host}")
        self.name = f"{host}:{self._theirs.get_rpc_port()}"

    @classmethod
    def take(cls, host: str) -> TransferEngine:
        ipaddress.ip_address(host)
        with cls._lock:
            if host not in cls._open:
                cls._open[host] = cls(host)
            cls._open[host]._users += 1
            return cls._open[host]

    def give_back(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                del self._open[self._host]
                del self._theirs  # it stops its threads and closes its ports

    def register(self, address: int, size: int) -> None:
        """Register memory; repeated registrations of an address are counted."""
        with self._lock:
            if not self._registered[address] and self._theirs.register_memory(address, size):
                raise TransferUnavailable(f"mooncake's Transfer Engine does not take {size} bytes of memory")
            self._registered[address] += 1

    def unregister(self, address: int) -> None:
        with self._lock:
            self._registered[address] -= 1
            if not self._registered[address]:
                self._theirs.unregister_memory(address)

    def read(self, peer: str, to: list[int], of: list[int], sizes: list[int]) -> bool:
        """Read from a peer's memory into ours. Blocks until done; False if it failed."""
        return self._theirs.batch_transfer_sync_read(peer, to, of, sizes) == 0
