"""Threads of their own for parsing, templates and tokenising, shared fairly by tenants.

Bytes in work are bounded, in all and for one tenant, and so are those that wait; beyond that requests are refused for a
moment. Large bodies never take all threads, so that a small one of somebody else waits for small ones only. The event loop
and its default executor stay free.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from baton.api.errors import ApiError, refused
from baton.api.fair_queue import FairQueue, QueueEntry, ShareLimits
from baton.core.errors import Refusal, RefusalCode

LARGE_BYTES = 64 << 10
"""Beyond this a body takes long: at worst a microsecond a byte, or more."""
BYTES_AT_ONCE = 8 << 20
TENANT_BYTES_AT_ONCE = 4 << 20
TENANT_WAITING_BYTES_MAX = 16 << 20
WAITING_BYTES_MAX = 64 << 20
_THREADS_MAX = 8

T = TypeVar("T")
_Turn = asyncio.Future[None]


class TextPool:
    def __init__(self, threads: int | None = None) -> None:
        """At least two threads. Default: one a core, up to a few."""
        threads = threads or max(2, min(_THREADS_MAX, os.cpu_count() or 2))
        self._threads = ThreadPoolExecutor(threads, "baton-text")
        self._large: FairQueue[_Turn] = FairQueue()
        self._small: FairQueue[_Turn] = FairQueue()
        self._large_limits = ShareLimits(BYTES_AT_ONCE, TENANT_BYTES_AT_ONCE, threads - 1)
        self._small_limits = ShareLimits(threads * LARGE_BYTES, threads * LARGE_BYTES, threads)

    async def run(self, tenant: str, size: int, work: Callable[[], T]) -> T:
        """Run the work for a body of `size` bytes in a thread, when it is its turn. Raises a 429 or 503 ApiError."""
        self._check_room(tenant, size)
        loop = asyncio.get_running_loop()
        is_large = size > LARGE_BYTES
        queue = self._large if is_large else self._small
        entry = QueueEntry(tenant, max(1, size), loop.create_future())
        queue.put(entry)
        self._start(queue)
        try:
            await entry.item
        except asyncio.CancelledError:
            if not queue.drop(entry):
                self._ended(queue, entry)
            raise
        # Shielded: a thread cannot be stopped, so its bytes count until it is done, also when nobody waits for it.
        working = loop.run_in_executor(self._threads, work)
        working.add_done_callback(partial(self._done, queue, entry))
        return await asyncio.shield(working)

    def _check_room(self, tenant: str, size: int) -> None:
        own = self._large.waiting_weight_of(tenant) + self._small.waiting_weight_of(tenant)
        if own and own + size > TENANT_WAITING_BYTES_MAX:
            raise refused(Refusal(RefusalCode.RATE_LIMITED, f"{own} bytes of this key wait to be tokenised", 1), None)
        everyone = self._large.waiting_weight + self._small.waiting_weight
        if everyone and everyone + size > WAITING_BYTES_MAX:
            message = f"{everyone} bytes wait to be tokenised"
            raise ApiError(503, message, "service_unavailable_error", code="busy", headers={"Retry-After": "1"})

    def _done(self, queue: FairQueue[_Turn], entry: QueueEntry[_Turn], working: asyncio.Future[object]) -> None:
        if not working.cancelled():
            working.exception()  # so that an error whose client has left is not logged as never retrieved
        self._ended(queue, entry)

    def _ended(self, queue: FairQueue[_Turn], entry: QueueEntry[_Turn]) -> None:
        queue.end(entry)
        self._start(queue)

    def _start(self, queue: FairQueue[_Turn]) -> None:
        for entry in queue.start(self._large_limits if queue is self._large else self._small_limits):
            if not entry.item.done():
                entry.item.set_result(None)
