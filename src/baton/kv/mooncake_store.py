"""`mooncake`: objects in a Mooncake Store. A master tracks where each object is; the instances contribute the memory.

    look   one call for all          put    from the attached arena, without a copy
    get    into a registered area, then copied into the buffers

Calls of the client library block without limit and cannot be interrupted. They run on daemon threads: the caller waits at
most the time-out, and the process does not wait for them at its end. A call that timed out goes on and may touch its memory
late. A late read (put) can store wrong bytes, which the envelope's checksum detects; the arena lives as long as the client.
A late write (get) could overwrite another call's data, so each area belongs to one call until that has ended.

`drop` and `clear` remove objects that are being read; a reader may then get other bytes, which the checksum detects. (The
library's default would refuse for ten seconds after the last look.)

`?segment=` is the memory that an instance contributes from its first put on; when it ends, the objects there are lost. Keys
begin with `baton:`. The client cannot list objects, so `names` and `stat` ask the master's HTTP port (`?admin=`, always
needed). The engine's ports have no authentication and listen on all addresses: use it on trusted networks only.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

import numpy as np

from baton.kv.mooncake_client import Area, MooncakeClient, MooncakeConnection, MooncakeSettings, address_of, client_class
from baton.kv.store import MISSING, OVERSIZED, BadStore, Store, StoreFailed, StoreStat, StoreUrl, parse_size
from baton.kv.store_guard import StoreGuard

PORT = 50051
ADMIN_PORT = 9003
PREFIX = "baton:"
SEGMENT_BYTES = 512 << 20
_OPTIONS = ("metadata", "segment", "protocol", "device", "host", "admin")
_CALLS_MAX = 16
"""Most calls at the same time, including those that hang."""
_LINE_BYTES = 64
_PAGE = 512

_NO_ROOM = -200
_DOES_NOT_FIT = -600
_TRANSFER_FAILED = -800
_NOT_THERE = (-702, -703, -704, -707, _TRANSFER_FAILED)
"""No complete copy, not written completely, unknown, removed meanwhile, or on an instance that is gone."""

T = TypeVar("T")


def open_mooncake(url: StoreUrl, timeout_s: float, limit_bytes: int | None) -> Store:
    """Connects at the first use, so the master may start later than this instance."""
    client_class()
    return MooncakeStore(_settings_of(url, limit_bytes), timeout_s)


def _settings_of(url: StoreUrl, limit_bytes: int | None) -> MooncakeSettings:
    for name in url.options:
        if name not in _OPTIONS:
            raise BadStore(f"{url}: a mooncake store has no option {name!r}, only limit, {', '.join(_OPTIONS)}")
    if url.path:
        raise BadStore(f"{url}: nothing follows the port of a mooncake store")
    segment = url.options.get("segment")
    given = limit_bytes if limit_bytes is not None else SEGMENT_BYTES
    return MooncakeSettings(
        shown=str(url), master=(url.host, url.port or PORT), admin=_admin_of(url),
        metadata=url.options.get("metadata", "P2PHANDSHAKE"), protocol=url.options.get("protocol", "tcp"),
        device=url.options.get("device", ""), segment_bytes=given if segment is None else parse_size(segment),
        host=url.options.get("host"),
    )  # fmt: skip


def _admin_of(url: StoreUrl) -> tuple[str, int]:
    host, _, port = url.options.get("admin", f"{url.host}:{ADMIN_PORT}").rpartition(":")
    if not host or not port.isdecimal():
        raise BadStore(f"{url}: admin is the address of the master's HTTP port, such as {url.host}:{ADMIN_PORT}")
    return host, int(port)


class MooncakeStore:
    kind = "mooncake"

    def __init__(self, settings: MooncakeSettings, timeout_s: float) -> None:
        self._settings = settings
        self._timeout_s = timeout_s
        self._connection = MooncakeConnection(settings, timeout_s)
        self._threads = _DaemonThreads(settings.shown, _CALLS_MAX)

    def look(self, names: Sequence[str]) -> list[bool]:
        codes = self._call(lambda client: client.batch_is_exist(_keys(names))) if names else []
        return [self._checked(code) > 0 for code in codes]

    def get(self, names: Sequence[str], into: Sequence[memoryview]) -> list[int]:
        if not names:
            return []
        sizes = [len(view) for view in into]
        area, codes = self._call(lambda client: self._fetch(client, names, sizes), self._give_back)
        with contextlib.ExitStack() as afterwards:
            afterwards.callback(self._connection.areas.give_back, area)
            counts = [self._count(code) for code in codes]
            for view, begin, count in zip(into, _begins(sizes)[:-1], counts, strict=True):
                if count > 0:
                    view[:count] = area[begin : begin + count].data
        return counts

    def put(self, names: Sequence[str], objects: Sequence[memoryview]) -> list[bool]:
        if not names:
            return []
        codes = self._call(lambda client: self._send(client, names, objects))
        return [code not in (_NO_ROOM, _TRANSFER_FAILED) and self._checked(code) == 0 for code in codes]

    def drop(self, names: Sequence[str]) -> None:
        codes = self._call(lambda client: client.batch_remove(_keys(names), True)) if names else []
        for code in codes:
            if code not in _NOT_THERE:
                self._checked(code)

    def attach(self, arena: memoryview) -> None:
        """Connect and register the arena now, or at a later call if that fails. Kept until the connection is closed."""
        self._connection.attach(arena)
        with contextlib.suppress(StoreFailed):
            self._call(lambda client: client.batch_is_exist([]))

    def names(self) -> Iterator[tuple[str, int]]:
        listed = self._bounded(lambda: self._connection.ask_master("/get_all_keys")).decode("utf-8", "replace").split("\n")
        keys = [key for key in listed if key.startswith(PREFIX)]
        for begin in range(0, len(keys), _PAGE):
            yield from self._sizes(keys[begin : begin + _PAGE])

    def stat(self) -> StoreStat:
        sizes = [size for _, size in self.names()]
        metrics = self._bounded(lambda: self._connection.ask_master("/metrics")).decode("utf-8", "replace")
        values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith("master_") and " " in line)
        capacity = self._number(values.get("master_total_capacity_bytes", "0"))
        details = {"capacity of all instances": str(capacity), "given by this one": str(self._connection.mounted_bytes)}
        return StoreStat(self.kind, len(sizes), sum(sizes), capacity or None, details)

    def clear(self) -> int:
        return self._checked(self._call(lambda client: client.remove_by_regex(f"^{PREFIX}", True)))

    def close(self) -> None:
        """Waits at most the time-out; a call that still hangs ends with the process."""
        with contextlib.suppress(StoreFailed):
            self._bounded(self._connection.close)
        self._threads.close()

    # ── in the caller's thread ───────────────────────────────────────────────────────────────────────────────────────────

    def _call(self, job: Callable[[MooncakeClient], T], late: Callable[[T], None] | None = None) -> T:
        def work() -> T:
            with self._connection.client() as client:
                return job(client)

        return self._bounded(work, late)

    def _bounded(self, work: Callable[[], T], late: Callable[[T], None] | None = None) -> T:
        """Run `work` on a thread and wait at most the time-out. A result that comes later is passed to `late`."""
        future = self._threads.submit(work)
        wait([future], self._timeout_s)
        if future.done():
            return future.result()
        if not future.cancel() and late is not None:
            future.add_done_callback(lambda ended: _pass_on(ended, late))
        raise StoreFailed(f"{self._settings.shown} does not answer within {self._timeout_s:g} s")

    def _sizes(self, keys: list[str]) -> Iterator[tuple[str, int]]:
        found = self._call(lambda client: client.batch_get_replica_desc(keys))
        for key in keys:
            in_memory = [each.get_memory_descriptor() for each in found.get(key, ()) if each.is_memory_replica()]
            if in_memory:
                yield key.removeprefix(PREFIX), in_memory[0].buffer_descriptor.size

    def _number(self, text: str) -> int:
        try:
            return int(float(text))
        except (ValueError, OverflowError):  # no number, or an infinite one
            raise StoreFailed(f"{self._settings.shown}: its master tells a capacity of {text[:40]!r}") from None

    def _give_back(self, fetched: tuple[Area, list[int]]) -> None:
        self._connection.areas.give_back(fetched[0])

    def _count(self, code: int) -> int:
        if code in _NOT_THERE:
            return MISSING
        return OVERSIZED if code == _DOES_NOT_FIT else self._checked(code)

    def _checked(self, code: int) -> int:
        if code < 0:
            raise StoreFailed(f"{self._settings.shown} answers with mooncake's error {code}")
        return code

    # ── in a thread of ours ──────────────────────────────────────────────────────────────────────────────────────────────

    def _fetch(self, client: MooncakeClient, names: Sequence[str], sizes: list[int]) -> tuple[Area, list[int]]:
        begins = _begins(sizes)
        area = self._connection.areas.take(client, begins[-1])
        with contextlib.ExitStack() as unless_ended:
            unless_ended.callback(self._connection.areas.give_back, area)
            codes = client.batch_get_into(_keys(names), [area.ctypes.data + begin for begin in begins[:-1]], sizes)
            unless_ended.pop_all()
        return area, codes

    def _send(self, client: MooncakeClient, names: Sequence[str], objects: Sequence[memoryview]) -> list[int]:
        self._connection.mount(client)
        sizes = [len(content) for content in objects]
        addresses = [address_of(content) for content in objects]
        if all(self._connection.is_registered(address, size) for address, size in zip(addresses, sizes, strict=True)):
            return client.batch_put_from(_keys(names), addresses, sizes)
        begins = _begins(sizes)
        with self._connection.areas.lent(client, begins[-1]) as area:
            for content, begin in zip(objects, begins[:-1], strict=True):
                area[begin : begin + len(content)] = np.frombuffer(content, np.uint8)
            return client.batch_put_from(_keys(names), [area.ctypes.data + begin for begin in begins[:-1]], sizes)


class _DaemonThreads:
    """At most `most` daemon threads, started when needed. With a ThreadPoolExecutor the process could not end while one of
    its threads hangs."""

    def __init__(self, shown: str, most: int) -> None:
        self._shown = shown
        self._most = most
        self._made = 0
        self._closed = False
        self._lock = threading.Lock()
        """Protects `_made` and `_closed`."""
        self._idle = threading.Semaphore(0)
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._guard = StoreGuard()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise StoreFailed(f"{self._shown} is closed")
            self._waiting.put(lambda: self._do(work, future))
            if not self._idle.acquire(blocking=False) and self._made < self._most:
                self._made += 1
                threading.Thread(target=self._run, name=f"mooncake-store-{self._made}", daemon=True).start()
        return future

    def close(self) -> None:
        """Each thread ends after its current call."""
        with self._lock:
            self._closed = True
            for _ in range(self._made):
                self._waiting.put(None)

    def _run(self) -> None:
        while (call := self._waiting.get()) is not None:
            call()
            del call  # it holds the result
            self._idle.release()

    def _do(self, work: Callable[[], T], future: Future[T]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            with self._guard.guarded():
                came = work()
        except (BadStore, StoreFailed) as failure:
            future.set_exception(failure)
        else:
            future.set_result(came)


def _keys(names: Sequence[str]) -> list[str]:
    return [PREFIX + name for name in names]


def _begins(sizes: Sequence[int]) -> list[int]:
    """Offsets of objects of these sizes, aligned to _LINE_BYTES, and the end of the last one."""
    begins = [0]
    for size in sizes:
        begins.append(begins[-1] + -(-size // _LINE_BYTES) * _LINE_BYTES)
    return begins


def _pass_on(ended: Future[T], late: Callable[[T], None]) -> None:
    if ended.exception() is None:
        late(ended.result())
