"""Saves KV of requests that leave their slots: device ──CopyOut──▶ host ──Put──▶ store. No request waits for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from baton.core.engine.blocks import BlockPool
from baton.core.engine.plan import Int32s
from baton.core.engine.prefix import Key
from baton.core.tiers.bring_back import BringBackRule
from baton.core.tiers.departures import Departures
from baton.core.tiers.open_transfers import OpenTransfer, OpenTransfers, TransferKind
from baton.core.tiers.stored_keys import StoredKeys
from baton.core.tiers.transfers import CopyOut, Put

LEAVING_SHARE = 4
"""Blocks of finished requests are not saved while more than one in this many blocks of the pool is leaving."""


class KvSaving:
    def __init__(
        self,
        transfers: OpenTransfers,
        pool: BlockPool,
        bring_back: BringBackRule,
        stored: StoredKeys,
        departures: Departures,
    ) -> None:
        self._transfers = transfers
        self._config = transfers.config
        self._host = transfers.host
        self._counts = transfers.counts
        self._pool = pool
        self._bring_back = bring_back
        self._stored = stored
        self._departures = departures
        self._to_put: OrderedDict[Key, None] = OrderedDict()
        """Keys to be stored; those no longer in host memory in their turn are skipped."""
        self._putting: set[Key] = set()

    # ── to host memory ───────────────────────────────────────────────────────────────────────────────────────────────────

    def save(self, blocks: Int32s, preempted: bool) -> list[Key]:
        """Copy to host memory the cached ones of these blocks that it lacks. They are in sequence order and still held.

        Returns the keys that the store is expected to get and lacks.
        """
        cached = [(key, block) for block in blocks.tolist() if (key := self._pool.prefix.key_of(block)) is not None]
        missing = [(key, block) for key, block in cached if key not in self._host]
        here = [key for key, _ in cached if self._host.row_of(key) is not None] if len(missing) < len(cached) else []
        self._host.touch(here)
        if missing and self._may_save(len(missing), preempted):
            rows = self._host.take([key for key, _ in missing])
            self._counts["unsaved"] += len(missing) - len(rows)
            self._copy_out(missing[: len(rows)], rows)
        elif missing:
            self._counts["unsaved"] += len(missing)
        if not self._config.store:
            return []
        for key in reversed(here):
            self._offer_to_store(key)
        self.put_some()
        if self._transfers.breakers[TransferKind.PUT].is_open:
            return []
        return [key for key, _ in cached if key in self._transfers.filling or key in self._to_put or key in self._putting]

    def _may_save(self, blocks: int, preempted: bool) -> bool:
        if not preempted and self._pool.leaving * LEAVING_SHARE > self._pool.blocks:
            return False
        return self._bring_back.copies(blocks)

    def _copy_out(self, saved: list[tuple[Key, int]], rows: Int32s) -> None:
        """The end of the sequence first: it then counts as least recently used, here and in the store."""
        most = self._config.transfer_blocks
        for first in reversed(range(0, len(saved), most)):
            part = saved[first : first + most]
            blocks = np.array([block for _, block in part], dtype=np.int32)
            transfer = self._transfers.begin(TransferKind.OUT, tuple(key for key, _ in part), self._config.copy_us, blocks)
            self._pool.hold_for_copy(blocks)
            self._transfers.order(CopyOut(transfer, blocks, rows[first : first + most]))

    def copied_out(self, transfer: OpenTransfer, came: Sequence[bool]) -> None:
        self._pool.end_copy(transfer.blocks)
        self._transfers.fill(transfer, came)
        self._counts["saved"] += sum(came)
        self._counts["unsaved"] += len(came) - sum(came)
        for key, is_there in zip(reversed(transfer.keys), reversed(came), strict=True):
            if is_there:
                self._offer_to_store(key)
            else:
                self._departures.settle(key)

    # ── to the store ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _offer_to_store(self, key: Key) -> None:
        if self._config.store and not self._stored.has(key, self._transfers.now_us) and key not in self._putting:
            self._to_put[key] = None
            if len(self._to_put) > self._host.rows:
                self._give_up_storing(next(iter(self._to_put)))

    def _give_up_storing(self, key: Key) -> None:
        del self._to_put[key]
        self._counts["unstored"] += 1
        self._departures.settle(key)

    def put_some(self) -> None:
        """Order PUTs for keys to be stored, as far as the store may be asked."""
        while self._to_put and self._transfers.may_ask(TransferKind.PUT):
            keys: list[Key] = []
            while self._to_put and len(keys) < self._config.transfer_blocks:
                key = next(iter(self._to_put))
                if self._host.row_of(key) is None:
                    self._give_up_storing(key)
                else:
                    del self._to_put[key]
                    keys.append(key)
            if keys:
                self._put(tuple(keys))

    def _put(self, keys: tuple[Key, ...]) -> None:
        transfer = self._transfers.begin(TransferKind.PUT, keys, self._config.put_us)
        rows = np.array([self._host.row_of(key) for key in keys], dtype=np.int32)
        self._putting.update(keys)
        self._host.read(keys)
        self._transfers.order(Put(transfer, keys, rows))

    def has_put(self, transfer: OpenTransfer, came: Sequence[bool]) -> None:
        self._host.let_go(transfer.keys)
        self._counts["stored"] += sum(came)
        self._counts["unstored"] += len(came) - sum(came)
        self._putting.difference_update(transfer.keys)
        for key, is_there in zip(transfer.keys, came, strict=True):
            if is_there:
                self.note_stored(key)
            else:
                self._departures.settle(key)

    def note_stored(self, key: Key) -> None:
        """The store has this key."""
        self._stored.remember(key, self._transfers.now_us)
        self._to_put.pop(key, None)
        self._departures.settle(key)
