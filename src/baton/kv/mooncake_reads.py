"""Reads another process's memory through the Transfer Engine. Its calls block, so threads of their own make them.

Each thread has a staging area, from which the I/O thread copies. A read can be abandoned: its data are discarded, and if it
was under way, another thread is started in place of the one that is stuck, since a peer that has stopped can block a read
for a minute. (The engine connects to new peers one at a time: one that stops just then delays the first reads from others as
long.) Areas stay registered until the end; data that land late in one are detected by the checksums.
"""

from __future__ import annotations

import mmap
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from baton.kv.io_thread import Post
from baton.kv.mooncake_engine import TransferEngine

READ_THREADS = 4
"""Reads under way at the same time."""
READ_THREADS_MAX = 32
"""Most threads, including those whose read hangs."""
STAGING_BYTES = 4 << 20
CLOSE_S = 2.0
"""Longest wait for each thread at closing. A thread that still hangs is left running, and the engine stays open."""

Staging = npt.NDArray[np.uint8]

_left_behind: list[list[Staging]] = []
"""Areas that are still registered, so they must never be unmapped."""


@dataclass(eq=False)
class RemoteRead:
    peer: str
    of: list[int]
    """Addresses in the peer's memory, of pieces of `size` bytes each."""
    size: int
    take: Callable[[Staging, str | None], None]
    """Called on the I/O thread with the data, or the reason why there are none. Not called after `abandon`."""
    under_way: bool = False
    abandoned: bool = False


class RemoteReaders:
    def __init__(self, engine: TransferEngine, staging_bytes: int) -> None:
        self._engine = engine
        self._staging_bytes = staging_bytes
        self._orders: queue.SimpleQueue[RemoteRead | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._areas: list[Staging] = []
        self._spare: list[Staging] = []
        self._threads: list[threading.Thread] = []
        self._post: Post | None = None

    def begin(self, post: Post) -> None:
        self._post = post
        for _ in range(READ_THREADS):
            self._add_thread()

    def order(self, read: RemoteRead) -> None:
        self._orders.put(read)

    def abandon(self, read: RemoteRead) -> None:
        """On the I/O thread: discard the result of this read."""
        with self._lock:
            read.abandoned = True
            stuck = read.under_way
        if stuck:
            self._add_thread()

    def close(self) -> None:
        """On the I/O thread, after everything else."""
        self._closing.set()
        for _ in self._threads:
            self._orders.put(None)
        for thread in self._threads:
            thread.join(CLOSE_S)
        if any(thread.is_alive() for thread in self._threads):
            _left_behind.append(self._areas)  # the engine may still write there
            return
        for area in self._areas:
            self._engine.unregister(area.ctypes.data)
        self._engine.give_back()
        self._areas.clear()
        self._spare.clear()

    def _add_thread(self) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if len(self._threads) >= READ_THREADS_MAX or self._closing.is_set():
            return
        area = self._spare.pop() if self._spare else self._new_area()
        thread = threading.Thread(target=self._run, args=(area,), name="kv-mooncake-read", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _new_area(self) -> Staging:
        area: Staging = np.frombuffer(mmap.mmap(-1, self._staging_bytes), dtype=np.uint8)
        self._engine.register(area.ctypes.data, self._staging_bytes)
        self._areas.append(area)
        return area

    def _run(self, area: Staging) -> None:
        """Thread loop: read into the area, post it to the I/O thread, wait until it is copied, repeat."""
        taken = threading.Semaphore(0)
        while (read := self._orders.get()) is not None and not self._closing.is_set():
            if not self._still_wanted(read, under_way=True):
                continue
            to = [area.ctypes.data + number * read.size for number in range(len(read.of))]
            done = self._engine.read(read.peer, to, read.of, [read.size] * len(read.of))
            if not self._still_wanted(read, under_way=False):
                self._spare.append(area)  # `abandon` has started another thread in place of this one
                return
            if self._post is not None:
                self._post(
                    partial(self._deliver, read, area, None if done else "cannot read what was announced", taken), True
                )
            while not taken.acquire(timeout=0.1):
                if self._closing.is_set():
                    return

    def _still_wanted(self, read: RemoteRead, under_way: bool) -> bool:
        with self._lock:
            read.under_way = under_way and not read.abandoned
            return not read.abandoned

    @staticmethod
    def _deliver(read: RemoteRead, area: Staging, problem: str | None, taken: threading.Semaphore) -> None:
        """On the I/O thread."""
        if not read.abandoned:
            read.take(area, problem)
        taken.release()
