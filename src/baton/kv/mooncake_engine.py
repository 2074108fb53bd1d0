"""Mooncake's Transfer Engine: finding it, loading it, and one of them a process and address.

Owns the library and what it needs of the system. Knows nothing of KV.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Protocol

from baton.kv.transfer_contract import TransferUnavailable

READ_TIMEOUT_S = 5
LIBRARIES = Path(sys.prefix) / "lib" / "baton-mooncake"
"""Where the set-up puts what the engine needs of the system, when the system does not have it."""
_SETTINGS = {"MC_TRANSFER_TIMEOUT": str(READ_TIMEOUT_S), "MC_LOG_LEVEL": "ERROR"}
"""Of theirs, where the environment does not say otherwise."""


class _TransferEngine(Protocol):
    """What we use of theirs. Zero is success."""

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
    """What anything of mooncake's needs before it can be imported."""
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
    """Libraries of a folder, each after those that it needs: the netlink ones first."""
    return sorted(
        folder.glob("lib*.so.*"), key=lambda path: (not path.name.startswith("libnl-3"), "nl" not in path.name, path.name)
    )


class TransferEngine:
    """One a process and address, while somebody uses it."""

    _lock = threading.Lock()
    _open: dict[str, TransferEngine] = {}  # noqa: RUF012 - the one table of them, on purpose

    def __init__(self, host: str) -> None:
        self._host = host
        self._users = 0
        self._registered: Counter[int] = Counter()
        self._theirs = _engine_class()()
        if self._theirs.initialize(host, "P2PHANDSHAKE", "tcp", ""):
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
        """Once, however many ask for it."""
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
        """Blocks until it is here, or cannot be had."""
        return self._theirs.batch_transfer_sync_read(peer, to, of, sizes) == 0
