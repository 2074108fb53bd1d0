"""The queue as a source of rows: its head is let in while it fits, and the store is asked ahead for what it starts with."""

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

SOUGHT_AHEAD = 8
"""The store is asked for this many at the head of the queue; this many may pass one that waits for it."""
SOUGHT_AGAIN_MAX = 2
"""How often the store is asked once more for one that could be let in."""


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
        self._tiers.forget_seeker(request.serial)

    def prefetch(self) -> None:
        """Have the store asked for what those at the head of the queue start with; they may not come to wait for it."""
        if not self._has_store:
            return
        for request in self._queue.first(SOUGHT_AHEAD):
            if not request.is_sought and self._peers.prefills_here(request):
                request.is_sought = self._restoring.seek(request.serial, request)

    def admit(self, step: StepBuilder) -> None:
        """Let requests in while the next one fits."""
        while (request := self._next()) and step.budget > 0 and self._admission.has_row:
            match self._admission.consider(request):
                case Admit(hit, _) if self._is_sought_again(request, hit):
                    continue  # it lets others pass
                case Admit(hit, protected):
                    self._queue.remove(request)
                    self._let_in(step, request, hit, protected)
                case MustWait():
                    return

    def _next(self) -> Request | None:
        """The head of the queue; one that is being brought from the store lets others pass."""
        head, is_seeking = self._queue.head, self._tiers.is_seeking
        if head is None or not is_seeking(head.serial):
            return head
        return next((request for request in self._queue.first(SOUGHT_AHEAD) if not is_seeking(request.serial)), None)

    def _is_sought_again(self, request: Request, hit: PrefixHit) -> bool:
        """What it starts with may have been in host memory, or on its way to the store, when it began to wait, and be in the
        store alone by now."""
        tiers = self._tiers
        if not self._has_store or request.sought_again >= SOUGHT_AGAIN_MAX or not self._peers.prefills_here(request):
            return False
        after = self._lookup.keys_after(request, hit)
        missing = after[len(tiers.host.run(after)) :]
        if not missing or not tiers.is_known_stored(missing[0]):
            return False
        request.sought_again += 1
        tiers.seek(request.serial, missing, self._running.now_us)
        return tiers.is_seeking(request.serial)

    def _let_in(self, step: StepBuilder, request: Request, hit: PrefixHit, protected: bool) -> None:
        if self._peers.takes(request, hit, protected):
            return
        rows = self._restoring.host_rows(request, hit)
        if len(rows):
            self._restoring.restore(request, hit, rows, protected)
        else:
            self._admission.start(step, request, hit, protected)
