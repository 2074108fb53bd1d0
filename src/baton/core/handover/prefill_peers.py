"""The peers that prefill for a decode side: which of them are up, how much each has to do, and which one to ask next."""

from __future__ import annotations

from typing import NamedTuple

from baton.core.engine.request import Submission
from baton.core.handover.messages import PeerId

BELIEF_HALVES_US = 1_000_000
"""What is known of a peer's queue counts half after so long: one that was busy once is not avoided for ever."""
DECLINED_US = 1_000_000
"""For so long a peer that declined (it drains, its queue is full) is asked only if there is no other."""


class _Believed(NamedTuple):
    """How much prefill waits at a peer, as it last said or as it was last asked for."""

    queued_tokens: int
    at_us: int


class PrefillPeers:
    def __init__(self) -> None:
        self._believed: dict[PeerId, _Believed] = {}
        """Of those that are up; the one asked longest ago first."""
        self._declined_us: dict[PeerId, int] = {}
        """When each of them last did not take what it was asked for."""

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
        """The peer to ask for a prefill; it has as much more to do from now on."""
        peer = self._peer_for(submission, now_us)
        tokens = self._queued_tokens(peer, now_us) + submission.known_tokens
        # Put last: of equals the first one is asked, and all decode sides would ask the same peer for ever.
        del self._believed[peer]
        self._believed[peer] = _Believed(tokens, now_us)
        return peer

    def _peer_for(self, submission: Submission, now_us: int) -> PeerId:
        """The one that was named for it, if it is up and takes what it is asked for; else the one with least to do."""
        named = PeerId(submission.prefill_at)
        if named in self._believed and not self._declines(named, now_us):
            return named
        return min(self._believed, key=lambda peer: (self._declines(peer, now_us), self._queued_tokens(peer, now_us)))

    def _queued_tokens(self, peer: PeerId, now_us: int) -> int:
        believed = self._believed[peer]
        return believed.queued_tokens >> ((now_us - believed.at_us) // BELIEF_HALVES_US)

    def _declines(self, peer: PeerId, now_us: int) -> bool:
        return peer in self._declined_us and now_us - self._declined_us[peer] < DECLINED_US
