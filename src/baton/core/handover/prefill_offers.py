"""Offers of the prefill side: queued attempts are offered to their peers by seniority, a little ahead of time."""

from __future__ import annotations

from baton.core.engine.held_prefills import HeldPrefills
from baton.core.engine.prefix import Key
from baton.core.engine.queued_requests import PREFETCH_AHEAD
from baton.core.engine.scheduler import Scheduler
from baton.core.handover.messages import Offer, Tell
from baton.core.handover.prefill_handovers import SOON, PrefillHandover, PrefillHandovers
from baton.core.handover.protocol import Acts

STEPS_AHEAD = 2
"""Offer at most this many steps' worth of prefill tokens ahead: it keeps P busy, and each offer costs room at D."""


class PrefillOffers:
    def __init__(self, scheduler: Scheduler, held: HeldPrefills, handovers: PrefillHandovers) -> None:
        self._scheduler = scheduler
        self._held = held
        self._handovers = handovers
        self._tokens_ahead_max = STEPS_AHEAD * scheduler.config.step_tokens

    def advance(self, now_us: int) -> Acts:
        """Offer what can be computed soon."""
        acts: Acts = []
        if not self._handovers.queue:
            return acts
        ahead = sum(self._unplanned(entry) for entry in self._handovers.active.values() if entry.state in SOON)
        while ahead < self._tokens_ahead_max and (entry := self._next()) is not None:
            serial = self._held.hold(entry.submission, self._keys_of(entry), entry.submission.known_tokens + 1, now_us)
            if serial is None:
                break
            self._handovers.offer(entry, serial)
            ahead += self._unplanned(entry)
            acts.append(self.tell(entry))
        return acts

    def tell(self, entry: PrefillHandover) -> Tell:
        handover, tokens = entry.handover, entry.submission.known_tokens
        return Tell(handover.peer, Offer(handover.request, handover.attempt, tokens, self._handovers.queued_tokens))

    def _next(self) -> PrefillHandover | None:
        """The first of the queue whose KV is not being fetched from the store."""
        for entry in self._handovers.next_to_offer(PREFETCH_AHEAD):
            if not entry.is_prefetched:
                entry.is_prefetched = self._held.prefetch(entry.handover, entry.submission, self._keys_of(entry))
            if not self._scheduler.tiers.is_prefetching(entry.handover):
                return entry
        return None

    def _keys_of(self, entry: PrefillHandover) -> list[Key]:
        entry.keys = entry.keys or self._scheduler.keys_of(entry.submission, entry.submission.known)
        return entry.keys

    def _unplanned(self, entry: PrefillHandover) -> int:
        return 0 if entry.serial is None else self._scheduler.unplanned(entry.serial)
