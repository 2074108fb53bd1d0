"""Fetches KV from the store: store ──Look, Get──▶ host, while a request waits in the queue. Holds no device block."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from baton.core.engine.prefix import Key
from baton.core.tiers.bring_back import BringBackRule
from baton.core.tiers.departures import Departures
from baton.core.tiers.open_transfers import OpenTransfer, OpenTransfers, TransferKind, leading
from baton.core.tiers.saving import KvSaving
from baton.core.tiers.stored_keys import StoredKeys
from baton.core.tiers.transfers import Get, Look, TransferId


@dataclass(slots=True)
class _Seek:
    """A fetch from the store for a waiting request."""

    waits_for: set[TransferId]
    until_us: int
    wanted: deque[Key] = field(default_factory=deque)
    """Keys that the store has and no order fetches yet."""


class KvFetching:
    def __init__(
        self, hauls: OpenTransfers, bring_back: BringBackRule, stored: StoredKeys, saving: KvSaving, departures: Departures
    ) -> None:
        self._hauls = hauls
        self._config = hauls.config
        self._bring_back = bring_back
        self._stored = stored
        self._saving = saving
        self._departures = departures
        self._seeks: dict[Hashable, _Seek] = {}

    def __len__(self) -> int:
        return len(self._seeks)

    def deadlines(self) -> Iterator[int]:
        return (seek.until_us for seek in self._seeks.values())

    def seek(self, seeker: Hashable, keys: Sequence[Key]) -> bool:
        """Fetch into host memory what the store has of these keys, which follow the prefix that is here. False: not now."""
        hauls, config = self._hauls, self._config
        if not keys or seeker in self._seeks:
            return True
        # While one GET is being tried, no look-up is made either: its result would have to wait for that one.
        if not (hauls.may_ask(TransferKind.LOOK) and hauls.breakers[TransferKind.GET].allows(hauls.now_us)):
            return False
        if not self._bring_back.fetches(len(keys)):
            return True
        haul = hauls.begin(TransferKind.LOOK, tuple(keys), config.look_us, seeker=seeker)
        self._seeks[seeker] = _Seek({haul}, hauls.now_us + config.look_us + config.get_us)
        hauls.order(Look(haul, tuple(keys)))
        return True

    def is_seeking(self, seeker: Hashable) -> bool:
        return seeker in self._seeks

    def forget(self, seeker: Hashable) -> None:
        """The request does not wait any more; orders in progress go on, for others."""
        self._seeks.pop(seeker, None)

    def looked(self, haul: OpenTransfer, came: Sequence[bool]) -> None:
        there = leading(came)
        for key in haul.keys[:there]:
            self._saving.note_stored(key)
        self._stored.forget(haul.keys[there:])
        seek = self._seeks.get(haul.seeker)
        if seek is None:
            return
        seek.wanted.extend(haul.keys[:there])
        self.get_some()

    def get_some(self) -> None:
        """Order GETs for wanted keys, as far as the store may be asked."""
        for seek in self._seeks.values():
            while seek.wanted and self._hauls.may_ask(TransferKind.GET):
                self._get(seek)

    def _get(self, seek: _Seek) -> None:
        """Order the next few wanted keys; those already being fetched are only waited for."""
        hauls, keys = self._hauls, list[Key]()
        while seek.wanted and len(keys) < self._config.haul_blocks:
            key = seek.wanted.popleft()
            if key in hauls.filling:
                seek.waits_for.add(hauls.filling[key])
            elif key not in hauls.host:
                keys.append(key)
        rows = hauls.host.take(keys)
        if len(rows) < len(keys):
            seek.wanted.clear()  # no room: blocks after a gap are of no use
        if len(rows):
            taken = tuple(keys[: len(rows)])
            haul = hauls.begin(TransferKind.GET, taken, self._config.get_us)
            seek.waits_for.add(haul)
            hauls.order(Get(haul, taken, rows))

    def got(self, haul: OpenTransfer, came: Sequence[bool]) -> None:
        self._hauls.fill(haul, came)
        self._hauls.counts["fetched"] += sum(came)
        for key, is_there in zip(haul.keys, came, strict=True):
            if is_there:
                self._saving.note_stored(key)
            else:
                self._stored.forget([key])
                self._departures.settle(key)
        if False in came:
            for seek in self._seeks.values():
                if haul.haul in seek.waits_for:
                    seek.wanted.clear()  # blocks after a gap are of no use

    def over(self, haul: OpenTransfer) -> None:
        """This transfer has ended: no fetch waits for it any more."""
        for seek in self._seeks.values():
            seek.waits_for.discard(haul.haul)

    def expire(self) -> None:
        for seeker in [seeker for seeker, seek in self._seeks.items() if seek.until_us <= self._hauls.now_us]:
            del self._seeks[seeker]

    def end_seeks(self) -> None:
        """End fetches that have no transfer in progress and cannot order any more."""
        gone = not self._hauls.breakers[TransferKind.GET].allows(self._hauls.now_us)
        for seeker in [seeker for seeker, seek in self._seeks.items() if not seek.waits_for and (gone or not seek.wanted)]:
            del self._seeks[seeker]
