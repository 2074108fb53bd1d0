"""Stores to test, by kind, and objects to put into them.

A kind, or another way to reach one, joins by an entry in `SERVED`: why it cannot work here (None where it can), and a
context manager that, given an empty folder, serves an empty store and tells its address.
"""

from __future__ import annotations

import contextlib
import mmap
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.kv.store import KINDS, Store
from baton.wire.envelope import HEADER_BYTES, object_name, seal
from benchmarks.store_servers import StoreServer, mooncake_server, mooncake_why_not, valkey_server, valkey_why_not
from tests.support.certificates import OPENSSL, Authority
from tests.support.tls_relay import tls_relay

LAYOUT = bytes(range(16))
OTHER_LAYOUT = bytes(range(16, 32))


@dataclass(frozen=True)
class Served:
    why_not: Callable[[], str | None]
    served: Callable[[Path], AbstractContextManager[str]]
    """Given an empty folder; the address of an empty store while it lasts."""
    tears: bool = False
    """Who reads an object while another drops it may get something else, which the envelope's checks find."""


@contextlib.contextmanager
def file_served(folder: Path) -> Iterator[str]:
    yield f"file:{folder / 'store'}"


@contextlib.contextmanager
def valkey_served(folder: Path) -> Iterator[str]:
    with valkey_server() as server:
        yield server.url


@contextlib.contextmanager
def valkeys_served(folder: Path) -> Iterator[str]:
    """The server that tests have is built without TLS: a relay terminates it before the server."""
    folder.mkdir(exist_ok=True)
    authority = Authority(folder)
    with (
        valkey_server() as server,
        tls_relay(int(server.url.split(":")[2].split("/")[0]), authority.sign("server")) as relay,
    ):
        yield f"valkeys://localhost:{relay.port}/0?ca={authority.certificate}"


def valkeys_why_not() -> str | None:
    return valkey_why_not() or (None if OPENSSL else "there is no openssl to make certificates with")


@contextlib.contextmanager
def mooncake_served(folder: Path) -> Iterator[str]:
    with mooncake_server() as server:
        yield server.url


SERVED: dict[str, Served] = {
    "file": Served(lambda: None, file_served),
    "valkey": Served(valkey_why_not, valkey_served),
    "valkeys": Served(valkeys_why_not, valkeys_served),
    "mooncake": Served(mooncake_why_not, mooncake_served, tears=True),
}


@contextlib.contextmanager
def hanging(server: StoreServer) -> Iterator[None]:
    """Stopped for good while this lasts: it takes connections, and never answers."""
    server.child.pause()
    state = Path(f"/proc/{server.child.pid}/stat")
    while state.read_text().rpartition(")")[2].split()[0] != "T":
        pass
    try:
        yield
    finally:
        server.child.resume()


def store_kinds() -> list[object]:
    """Each kind by its name; those that cannot work here are skipped and say why."""
    params: list[object] = []
    for kind in dict.fromkeys((*KINDS, *SERVED)):
        reason = SERVED[kind].why_not() if kind in SERVED else f"nobody serves a {kind} store for tests"
        params.append(pytest.param(kind, marks=[pytest.mark.skip(reason=reason)] if reason else [], id=kind))
    return params


class Arena:
    """One piece of memory, from which buffers are taken and never given back: as a store's driver has it."""

    def __init__(self, size: int = 16 << 20) -> None:
        self.whole = memoryview(mmap.mmap(-1, size))
        self._at = 0

    def room(self, size: int) -> memoryview:
        begin, self._at = self._at, self._at + size
        assert self._at <= len(self.whole), "a larger arena, please"
        return self.whole[begin : self._at]

    def of(self, data: bytes | memoryview) -> memoryview:
        buffer = self.room(len(data))
        buffer[:] = data
        return buffer


@dataclass(frozen=True)
class Sample:
    """A block and what is stored of it."""

    key: bytes
    layout: bytes
    payload: bytes
    data: bytes

    @property
    def name(self) -> str:
        return object_name(self.layout, self.key)


def sample(draw: random.Random, size: int = 5000, layout: bytes = LAYOUT, key: bytes | None = None) -> Sample:
    key, payload = draw.randbytes(16) if key is None else key, draw.randbytes(size)
    data = memoryview(bytearray(HEADER_BYTES + size))
    seal(key, layout, memoryview(payload), data)
    return Sample(key, layout, payload, bytes(data))


def samples(draw: random.Random, count: int, size: int = 5000) -> list[Sample]:
    return [sample(draw, size) for _ in range(count)]


def put(store: Store, *made: Sample) -> list[bool]:
    return store.put([each.name for each in made], [memoryview(each.data) for each in made])


def got(store: Store, made: Sample) -> bytes | int:
    into = memoryview(bytearray(len(made.data)))
    (count,) = store.get([made.name], [into])
    return bytes(into[:count]) if count >= 0 else count
