"""Sends spans to a collector, beside the server and never in its way.

    event loop ── put ──▶ bounded queue ──▶ thread: builds spans, exports them in batches

What the queue has no room for is dropped and counted, and so is a batch that the collector did not take. One warning is
logged when spans begin to be lost, and one line when the collector takes them again. `close` waits a bounded time, and the
thread is a daemon: a collector that never answers does not keep the process.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from baton.api.tracing.request_trace import FinishedTrace
from baton.api.tracing.span_counts import SpanTotals
from baton.api.tracing.spans import FinishedSpan, spans_of

log = logging.getLogger("baton.traces")

QUEUED_MAX = 2048
"""Traces that wait for the thread."""
BATCH_SPANS = 512
GATHER_S = 1.0
"""Spans wait so long for others to travel with, unless they fill a batch."""
CLOSE_S = 3.0


class SpanExporter(Protocol):
    def export(self, spans: Sequence[FinishedSpan]) -> bool:
        """Send them; returns whether the collector took them. May take long; raises nothing."""

    def shutdown(self) -> None:
        """Let an export that waits to be tried again fail."""


class SpanExport:
    def __init__(
        self,
        exporter: SpanExporter,
        where: str,
        queued_max: int = QUEUED_MAX,
        gather_s: float = GATHER_S,
    ) -> None:
        """`where`: the collector, for the log."""
        self._exporter = exporter
        self._where = where
        self._queued_max = queued_max
        self._gather_s = gather_s
        self._queue: deque[FinishedTrace] = deque()
        self._wanted = threading.Event()
        """Something is to be done at once: a batch is full, or the end."""
        self._closing = False
        self._is_losing = False
        self._overflowed = 0
        """Spans dropped by the event loop; the thread counts its own, since neither waits for the other."""
        self._refused = 0
        self._exported = 0
        self._thread = threading.Thread(target=self._run, name="span export", daemon=True)

    def totals(self) -> SpanTotals:
        return SpanTotals(self._exported, self._overflowed + self._refused)

    def start(self) -> None:
        self._thread.start()

    def put(self, finished: FinishedTrace) -> None:
        if self._closing or len(self._queue) >= self._queued_max:
            self._overflowed += 1 + len(finished.notes)  # at least: to make them here would cost the event loop
            self._warn("they come faster than they can be sent")
            return
        self._queue.append(finished)
        if len(self._queue) >= BATCH_SPANS // 4:
            self._wanted.set()

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Send what waits, for at most `limit_s`. Call in a thread."""
        self._closing = True
        self._wanted.set()
        self._thread.join(limit_s / 2)
        self._exporter.shutdown()
        self._thread.join(limit_s / 2)

    # ── in the thread ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while not self._closing or self._queue:
            if not self._queue or not self._closing:
                self._wanted.wait(self._gather_s)
                self._wanted.clear()
            while self._queue:
                self._export(self._batch())

    def _batch(self) -> list[FinishedSpan]:
        spans: list[FinishedSpan] = []
        while self._queue and len(spans) < BATCH_SPANS:
            spans += spans_of(self._queue.popleft())
        return spans

    def _export(self, spans: list[FinishedSpan]) -> None:
        if self._exporter.export(spans):
            self._exported += len(spans)
            if self._is_losing:
                self._is_losing = False
                log.info("the collector at %s takes spans again; %d were dropped so far", self._where, self.totals().dropped)
        else:
            self._refused += len(spans)
            self._warn("it does not take them")

    def _warn(self, why: str) -> None:
        if not self._is_losing:
            self._is_losing = True
            log.warning("spans for the collector at %s are dropped: %s", self._where, why)
