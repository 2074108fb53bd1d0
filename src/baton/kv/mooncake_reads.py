"""Reading another process's memory through the engine, which blocks: helpers do it, the lane takes what they bring.

Each helper has a staging area. A read that nobody waits for any more is abandoned: what it brings is thrown away, and where
it was under way already another helper takes the place of the one that is at it, for a peer that has stopped can hold it for
a minute. (The engine meets new peers one at a time: one that stops just then delays first reads from the others as long.)
Areas stay registered until the end; something late that lands in one is found by the checks.
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
"""Reads under way at once."""
READ_THREADS_MAX = 32
"""With those that hang."""
STAGING_BYTES = 4 << 20
CLOSE_S = 2.0
"""How long closing waits for a helper that hangs; it is left behind then, with the engine."""

Staging = npt.NDArray[np.uint8]

_left_behind: list[list[Staging]] = []
"""Registered still, so never to be unmapped."""


@dataclass(eq=False)
class RemoteRead:
    peer: str
    of: list[int]
    """Addresses over there, of pieces of `size`."""
    size: int
    take: Callable[[Staging, str | None], None]
    """On the lane: what was read, or why not. Not called once it is abandoned."""
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
        """On the lane: nobody waits for it any more."""
        with self._lock:
            read.abandoned = True
            stuck = read.under_way
        if stuck:
            self._add_thread()

    def close(self) -> None:
        """On the lane, as the last thing."""
        self._closing.set()
        for _ in self._threads:
            self._orders.put(None)
        for thread in self._threads:
            thread.join(CLOSE_S)
        if any(thread.is_alive() for thread in self._threads):
            _left_behind.append(self._areas)  # it may still write there
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
        """A helper's life: read, let the lane have it, go on when the lane has copied it."""
        taken = threading.Semaphore(0)
        while (read := self._orders.get()) is not None and not self._closing.is_set():
            if not self._still_wanted(read, under_way=True):
                continue
            to = [area.ctypes.data + number * read.size for number in range(len(read.of))]
            done = self._engine.read(read.peer, to, read.of, [read.size] * len(read.of))
            if not self._still_wanted(read, under_way=False):
                self._spare.append(area)  # another has taken our place
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
        """On the lane."""
        if not read.abandoned:
            read.take(area, problem)
        taken.release()
