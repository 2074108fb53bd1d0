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
class _Prefetch:
    """A fetch from the store for a waiting request."""

    waits_for: set[TransferId]
    until_us: int
    wanted: deque[Key] = field(default_factory=deque)
    """Keys that the store has and no order fetches yet."""


class KvFetching:
    def __init__(
        self,
        transfers: OpenTransfers,
        bring_back: BringBackRule,
        stored: StoredKeys,
        saving: KvSaving,
        departures: Departures,
    ) -> None:
        self._transfers = transfers
        self._config = transfers.config
        self._bring_back = bring_back
        self._stored = stored
        self._saving = saving
        self._departures = departures
        self._prefetches: dict[Hashable, _Prefetch] = {}

    def __len__(self) -> int:
        return len(self._prefetches)

    def deadlines(self) -> Iterator[int]:
        return (prefetch.until_us for prefetch in self._prefetches.values())

    def prefetch(self, requester: Hashable, keys: Sequence[Key]) -> bool:
        """Fetch into host memory what the store has of these keys, which follow the prefix that is here. False: not now."""
        transfers, config = self._transfers, self._config
        if not keys or requester in self._prefetches:
            return True
        # While one GET is being tried, no look-up is made either: its result would have to wait for that one.
        if not (transfers.may_ask(TransferKind.LOOK) and transfers.breakers[TransferKind.GET].allows(transfers.now_us)):
            return False
        if not self._bring_back.fetches(len(keys)):
            return True
        transfer = transfers.begin(TransferKind.LOOK, tuple(keys), config.look_us, requester=requester)
        self._prefetches[requester] = _Prefetch({transfer}, transfers.now_us + config.look_us + config.get_us)
        transfers.order(Look(transfer, tuple(keys)))
        return True

    def is_prefetching(self, requester: Hashable) -> bool:
        return requester in self._prefetches

    def forget(self, requester: Hashable) -> None:
        """The request does not wait any more; orders in progress go on, for others."""
        self._prefetches.pop(requester, None)

    def looked(self, transfer: OpenTransfer, came: Sequence[bool]) -> None:
        there = leading(came)
        for key in transfer.keys[:there]:
            self._saving.note_stored(key)
        self._stored.forget(transfer.keys[there:])
        prefetch = self._prefetches.get(transfer.requester)
        if prefetch is None:
            return
        prefetch.wanted.extend(transfer.keys[:there])
        self.get_some()

    def get_some(self) -> None:
        """Order GETs for wanted keys, as far as the store may be asked."""
        for prefetch in self._prefetches.values():
            while prefetch.wanted and self._transfers.may_ask(TransferKind.GET):
                self._get(prefetch)

    def _get(self, prefetch: _Prefetch) -> None:
        """Order the next few wanted keys; those already being fetched are only waited for."""
        transfers, keys = self._transfers, list[Key]()
        while prefetch.wanted and len(keys) < self._config.transfer_blocks:
            key = prefetch.wanted.popleft()
            if key in transfers.filling:
                prefetch.waits_for.add(transfers.filling[key])
            elif key not in transfers.host:
                keys.append(key)
        rows = transfers.host.take(keys)
        if len(rows) < len(keys):
            prefetch.wanted.clear()  # no room: blocks after a gap are of no use
        if len(rows):
            taken = tuple(keys[: len(rows)])
            transfer = transfers.begin(TransferKind.GET, taken, self._config.get_us)
            prefetch.waits_for.add(transfer)
            transfers.order(Get(transfer, taken, rows))

    def got(self, transfer: OpenTransfer, came: Sequence[bool]) -> None:
        self._transfers.fill(transfer, came)
        self._transfers.counts["fetched"] += sum(came)
        for key, is_there in zip(transfer.keys, came, strict=True):
            if is_there:
                self._saving.note_stored(key)
            else:
                self._stored.forget([key])
                self._departures.settle(key)
        if False in came:
            for prefetch in self._prefetches.values():
                if transfer.id in prefetch.waits_for:
                    prefetch.wanted.clear()  # blocks after a gap are of no use

    def over(self, transfer: OpenTransfer) -> None:
        """This transfer has ended: no fetch waits for it any more."""
        for prefetch in self._prefetches.values():
            prefetch.waits_for.discard(transfer.id)

    def expire(self) -> None:
        for requester in [
            requester for requester, prefetch in self._prefetches.items() if prefetch.until_us <= self._transfers.now_us
        ]:
            del self._prefetches[requester]

    def end_prefetches(self) -> None:
        """End fetches that have no transfer in progress and cannot order any more."""
        gone = not self._transfers.breakers[TransferKind.GET].allows(self._transfers.now_us)
        for requester in [
            requester
            for requester, prefetch in self._prefetches.items()
            if not prefetch.waits_for and (gone or not prefetch.wanted)
        ]:
            del self._prefetches[requester]
