"""The peers that prefill for a decode side: which are connected, how much each has queued, and which one to ask next."""

from __future__ import annotations

from typing import NamedTuple

from baton.core.engine.request import Submission
from baton.core.handover.messages import PeerId

BELIEF_HALVES_US = 1_000_000
"""The believed queue of a peer halves in this time, so that one that was busy once is not avoided for ever."""
DECLINED_US = 1_000_000
"""A peer that declined is asked only if there is no other, for this long."""


class _Believed(NamedTuple):
    """Prefill tokens queued at a peer, by its last message or by what it was asked for since."""

    queued_tokens: int
    at_us: int


class PrefillPeers:
    def __init__(self) -> None:
        self._believed: dict[PeerId, _Believed] = {}
        """Connected peers; the one asked longest ago comes first."""
        self._declined_us: dict[PeerId, int] = {}
        """Time at which each of them last declined."""

    def __len__(self) -> int:
        return len(self._believed)

    def add(self, peer: PeerId, now_us: int) -> None:
        self._believed[peer] = _Believed(0, now_us)
        self._declined_us.pop(peer, None)

    def remove(self, peer: PeerId) -> None:
        self._believed.pop(peer, None)
        self._declined_us.pop(peer, None)

    def learn(self, peer: PeerId, queued_tokens: int, now_us: int) -> None:
        if peer in self._believed:
            self._believed[peer] = _Believed(queued_tokens, now_us)

    def declined(self, peer: PeerId, now_us: int) -> None:
        if peer in self._believed:
            self._declined_us[peer] = now_us

    def all_decline(self, now_us: int) -> bool:
        return all(self._declines(peer, now_us) for peer in self._believed)

    def choose(self, submission: Submission, now_us: int) -> PeerId:
        """Choose the peer to ask for a prefill, and add it to the peer's believed queue."""
        peer = self._peer_for(submission, now_us)
        tokens = self._queued_tokens(peer, now_us) + submission.known_tokens
        # Put last: of equals the first one is asked, and all decode sides would ask the same peer for ever.
        del self._believed[peer]
        self._believed[peer] = _Believed(tokens, now_us)
        return peer

    def _peer_for(self, submission: Submission, now_us: int) -> PeerId:
        """The one that the router chose, if it is connected and does not decline; else the one with the shortest queue."""
        named = PeerId(submission.prefill_at)
        if named in self._believed and not self._declines(named, now_us):
            return named
        return min(self._believed, key=lambda peer: (self._declines(peer, now_us), self._queued_tokens(peer, now_us)))

    def _queued_tokens(self, peer: PeerId, now_us: int) -> int:
        believed = self._believed[peer]
        return believed.queued_tokens >> ((now_us - believed.at_us) // BELIEF_HALVES_US)

    def _declines(self, peer: PeerId, now_us: int) -> bool:
        return peer in self._declined_us and now_us - self._declined_us[peer] < DECLINED_US
