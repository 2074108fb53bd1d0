"""The client library of a Mooncake Store: loading it, connecting when it is first needed, and its registered memory.

A call after `close` ends the process, so a client is closed only when the last call that uses it has ended.

Two calls of the library block all threads (they keep the interpreter's lock): `setup`, while it waits for the master, and
`close`, for one to two seconds, or ten where the master is gone. Therefore `setup` is called only when the master has just
answered on its HTTP port and on its RPC port, and a client whose master is gone is never closed: the end of the process
removes it at once. An instance attaches its arena, and thereby connects, before it serves, and closes afterwards.

What remains: `setup` blocks the process for some 30 ms; if the master stops answering within those, for as long as one of
its calls may take (the time-out, but a second at least).
"""

from __future__ import annotations

import contextlib
import http.client
import math
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol, TypedDict

import numpy as np
import numpy.typing as npt

from baton.kv.mooncake_engine import load_libraries, ports_told
from baton.kv.store import StoreFailed

_AREA_BYTES = 8 << 20
_AREAS_MAX_BYTES = 1 << 30
_ANSWER_MAX_BYTES = 1 << 28
_PROBE = struct.pack("<4B4I", 21, 0, 0, 0, 1, 0, 0, 0)
"""A call of a function that no master has, which it answers: magic number, version, kinds; call 1, function 0, no data."""

Area = npt.NDArray[np.uint8]

_left_behind: list[tuple[MooncakeClient, MooncakeConnection]] = []
"""Clients that are never closed. They and their registered memory must stay alive."""


class _Buffers(Protocol):
    @property
    def size(self) -> int: ...


class _InMemory(Protocol):
    @property
    def buffer_descriptor(self) -> _Buffers: ...


class _Replica(Protocol):
    def is_memory_replica(self) -> bool: ...
    def get_memory_descriptor(self) -> _InMemory: ...


class _Mounted(TypedDict):
    ret: int


class MooncakeClient(Protocol):
    """The calls of the library that are used here. Zero is success, a negative number one of its error codes."""

    def setup(
        self, local_hostname: str, metadata_server: str, global_segment_size: int, local_buffer_size: int,
        protocol: str, rdma_devices: str, master_server_addr: str,
    ) -> int: ...  # fmt: skip
    def allocate_and_mount_segment(self, size: int, protocol: str) -> _Mounted: ...
    def register_buffer(self, address: int, size: int) -> int: ...
    def batch_is_exist(self, keys: list[str]) -> list[int]: ...
    def batch_get_into(self, keys: list[str], to: list[int], sizes: list[int]) -> list[int]: ...
    def batch_put_from(self, keys: list[str], of: list[int], sizes: list[int]) -> list[int]: ...
    def batch_remove(self, keys: list[str], force: bool) -> list[int]: ...
    def batch_get_replica_desc(self, keys: list[str]) -> Mapping[str, Sequence[_Replica]]: ...
    def remove_by_regex(self, pattern: str, force: bool) -> int: ...
    def close(self) -> int: ...


@cache
def why_unavailable() -> str | None:
    try:
        client_class()
    except ImportError as error:
        return f"mooncake's store client cannot be loaded: {error}"
    return None


def client_class() -> Callable[[], MooncakeClient]:
    load_libraries()
    from mooncake.store import MooncakeDistributedStore

    made: Callable[[], MooncakeClient] = MooncakeDistributedStore
    return made


def _set_call_timeouts(timeout_s: float) -> None:
    """Make calls of the library end within our time-out, unless the environment sets others; its defaults are 30 s."""
    limit_ms = str(math.ceil(max(1.0, timeout_s) * 1000))
    settings = {"MC_RPC_TIMEOUT_MS": limit_ms, "MC_RPC_CONNECT_TIMEOUT_MS": "1000", "MC_STORE_CLIENT_SETUP_RETRIES": "1"}
    for name, value in settings.items():
        os.environ.setdefault(name, value)


@dataclass(frozen=True)
class MooncakeSettings:
    shown: str
    master: tuple[str, int]
    admin: tuple[str, int]
    metadata: str
    protocol: str
    device: str
    segment_bytes: int
    host: str | None
    """The address at which others reach us; None to use the one of the connection to the master."""


class MooncakeConnection:
    """The library's client, created at first use and closed when the last call that uses it has ended."""

    def __init__(self, settings: MooncakeSettings, timeout_s: float) -> None:
        self._settings = settings
        self._timeout_s = timeout_s
        self._making = threading.Lock()
        self._lock = threading.Lock()
        self._client: MooncakeClient | None = None
        self._users = 0
        self._closed = False
        self._arena: memoryview | None = None
        self._registered: list[tuple[int, int, memoryview]] = []
        """(address, size, view that keeps the memory alive)."""
        self.areas = RegisteredAreas(settings.shown)
        self.mounted_bytes = 0

    @contextlib.contextmanager
    def client(self) -> Iterator[MooncakeClient]:
        client = self._acquire()
        try:
            yield client
        finally:
            self._release()

    def attach(self, arena: memoryview) -> None:
        self._arena = arena

    def is_registered(self, address: int, size: int) -> bool:
        return any(begin <= address and address + size <= begin + length for begin, length, _ in self._registered)

    def mount(self, client: MooncakeClient) -> None:
        """Contribute our memory segment to the store, once."""
        with self._making:
            if self.mounted_bytes or not self._settings.segment_bytes:
                return
            answer = client.allocate_and_mount_segment(self._settings.segment_bytes, self._settings.protocol)
            if answer["ret"]:
                raise StoreFailed(f"{self._settings.shown} does not take {self._settings.segment_bytes} bytes of our memory")
            self.mounted_bytes = self._settings.segment_bytes

    def ask_master(self, path: str) -> bytes:
        host, port = self._settings.admin
        conn = http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        try:
            conn.request("GET", path)
            answer = conn.getresponse()
            content = answer.read(_ANSWER_MAX_BYTES)
        except (OSError, UnicodeError, http.client.HTTPException) as error:
            hint = "the master's HTTP port, which ?admin= names"
            raise StoreFailed(f"{self._settings.shown}: {host}:{port} ({hint}) is not reached: {error}") from error
        finally:
            conn.close()
        if answer.status != http.HTTPStatus.OK:
            raise StoreFailed(f"{self._settings.shown}: {host}:{port} answers {path} with {answer.status}")
        return content

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._close_if_unused()

    def _acquire(self) -> MooncakeClient:
        if not self._making.acquire(timeout=self._timeout_s):
            raise StoreFailed(f"{self._settings.shown} is still being connected to")
        try:
            with self._lock:
                if self._closed:
                    raise StoreFailed(f"{self._settings.shown} is closed")
                self._users += 1
            with contextlib.ExitStack() as unless_made:
                unless_made.callback(self._release)
                if self._client is None:
                    self._client = self._new_client()
                self._register(self._client)
                unless_made.pop_all()
            return self._client
        finally:
            self._making.release()

    def _release(self) -> None:
        with self._lock:
            self._users -= 1
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        with self._lock:
            if not self._closed or self._users or self._client is None:
                return
            client, self._client = self._client, None
        try:
            self.ask_master("/health")
        except StoreFailed:
            _left_behind.append((client, self))
            return
        client.close()
        self._registered.clear()
        self.areas.forget()

    def _new_client(self) -> MooncakeClient:
        settings, (host, port) = self._settings, self._settings.master
        self.ask_master("/health")
        found = self._probe_master()
        ours = settings.host or found
        _set_call_timeouts(self._timeout_s)
        client = client_class()()
        with ports_told("the store's client"):
            failed = client.setup(ours, settings.metadata, 0, 0, settings.protocol, settings.device, f"{host}:{port}")
        if failed:
            raise StoreFailed(f"{settings.shown} does not take us in as {ours}")
        return client

    def _probe_master(self) -> str:
        """Check that the master reacts on its RPC port; returns our own address towards it.

        Any reaction counts, even closing the connection. An accepted connection alone proves nothing: the kernel accepts
        for a stopped process too.
        """
        try:
            with socket.create_connection(self._settings.master, self._timeout_s) as conn:
                conn.sendall(_PROBE)
                conn.recv(1)
                return str(conn.getsockname()[0])
        except (OSError, UnicodeError) as error:
            raise StoreFailed(f"{self._settings.shown} is not reached: {error}") from error

    def _register(self, client: MooncakeClient) -> None:
        arena = self._arena
        if arena is None or self.is_registered(address_of(arena), len(arena)):
            return
        if client.register_buffer(address_of(arena), len(arena)):
            raise StoreFailed(f"{self._settings.shown} does not take an arena of {len(arena)} bytes")
        self._registered.append((address_of(arena), len(arena), arena))


class RegisteredAreas:
    """Registered memory for calls of the client. Each area belongs to one call until that has ended."""

    def __init__(self, shown: str) -> None:
        self._shown = shown
        self._lock = threading.Lock()
        self._spare: list[Area] = []
        self._all: list[Area] = []

    def take(self, client: MooncakeClient, size: int) -> Area:
        with self._lock:
            for at, area in enumerate(self._spare):
                if area.size >= size:
                    return self._spare.pop(at)
            wanted = max(_AREA_BYTES, 1 << (size - 1).bit_length())
            if sum(area.size for area in self._all) + wanted > _AREAS_MAX_BYTES:
                raise StoreFailed(f"{self._shown}: too many calls hang")
            area = np.zeros(wanted, np.uint8)
            if client.register_buffer(area.ctypes.data, area.size):
                raise StoreFailed(f"{self._shown} does not take {wanted} bytes of memory")
            self._all.append(area)
            return area

    def give_back(self, area: Area) -> None:
        with self._lock:
            self._spare.append(area)

    @contextlib.contextmanager
    def lent(self, client: MooncakeClient, size: int) -> Iterator[Area]:
        area = self.take(client, size)
        try:
            yield area
        finally:
            self.give_back(area)

    def forget(self) -> None:
        with self._lock:
            self._spare.clear()
            self._all.clear()


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)
