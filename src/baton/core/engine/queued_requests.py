"""The queue as a source of rows: its head is admitted while it fits, and KV is prefetched from the store for it."""

from __future__ import annotations

from baton.core.engine.admission import Admission, Admit, MustWait
from baton.core.engine.prefix_lookup import PrefixLookup
from baton.core.engine.records import PrefixHit, Request
from baton.core.engine.restoring import KvRestoring
from baton.core.engine.row_source import PeerPrefills
from baton.core.engine.running_set import RunningSet
from baton.core.engine.step_builder import StepBuilder
from baton.core.engine.waiting_queue import WaitingQueue
from baton.core.tiers.offload import AnyTiers

PREFETCH_AHEAD = 8
"""Prefetch for this many requests at the head of the queue; at most this many may overtake one that waits for the store."""
SOUGHT_AGAIN_MAX = 2
"""Times the store is asked again for a request that could be admitted."""


class QueuedRequests:
    def __init__(
        self,
        running: RunningSet,
        queue: WaitingQueue,
        admission: Admission,
        lookup: PrefixLookup,
        restoring: KvRestoring,
        tiers: AnyTiers,
        peers: PeerPrefills,
    ) -> None:
        self._running = running
        self._queue = queue
        self._admission = admission
        self._lookup = lookup
        self._restoring = restoring
        self._tiers = tiers
        self._peers = peers
        self._has_store = running.config.tiers.store

    @property
    def waiting(self) -> int:
        return self._queue.waiting

    @property
    def is_due(self) -> bool:
        return len(self._queue) > 0

    def withdraw(self, request: Request) -> None:
        self._queue.withdraw(request)
        self._tiers.forget_prefetch(request.serial)

    def prefetch(self) -> None:
        """Prefetch KV from the store for the requests at the head of the queue, before they could be admitted."""
        if not self._has_store:
            return
        for request in self._queue.first(PREFETCH_AHEAD):
            if not request.is_prefetched and self._peers.prefills_here(request):
                request.is_prefetched = self._restoring.prefetch(request.serial, request)

    def admit(self, step: StepBuilder) -> None:
        """Admit requests while the next one fits."""
        while (request := self._next()) and step.budget > 0 and self._admission.has_row:
            match self._admission.consider(request):
                case Admit(hit, _) if self._prefetches_again(request, hit):
                    continue  # others may overtake it
                case Admit(hit, protected):
                    self._queue.remove(request)
                    self._start(step, request, hit, protected)
                case MustWait():
                    return

    def _next(self) -> Request | None:
        """The first request in the queue whose KV is not being fetched from the store."""
        head, is_prefetching = self._queue.head, self._tiers.is_prefetching
        if head is None or not is_prefetching(head.serial):
            return head
        return next((request for request in self._queue.first(PREFETCH_AHEAD) if not is_prefetching(request.serial)), None)

    def _prefetches_again(self, request: Request, hit: PrefixHit) -> bool:
        """Ask the store once more: KV that was in host memory, or being stored, when the request began to wait may be only
        in the store by now."""
        tiers = self._tiers
        if not self._has_store or request.prefetched_again >= SOUGHT_AGAIN_MAX or not self._peers.prefills_here(request):
            return False
        after = self._lookup.keys_after(request, hit)
        missing = after[len(tiers.host.run(after)) :]
        if not missing or not tiers.is_known_stored(missing[0]):
            return False
        request.prefetched_again += 1
        tiers.prefetch(request.serial, missing, self._running.now_us)
        return tiers.is_prefetching(request.serial)

    def _start(self, step: StepBuilder, request: Request, hit: PrefixHit, protected: bool) -> None:
        if self._peers.takes(request, hit, protected):
            return
        rows = self._restoring.host_rows(request, hit)
        if len(rows):
            self._restoring.restore(request, hit, rows, protected)
        else:
            self._admission.start(step, request, hit, protected)
