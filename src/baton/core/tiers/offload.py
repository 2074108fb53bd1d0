"""KV outside the pool: saving, prefetching and loading it, each within a time limit.

    save      device ──CopyOut──▶ host ──Put──▶ store     when a request leaves its slot; `saving`, `departures`
    prefetch  store ──Look, Get──▶ host                   while a request waits in the queue; `fetching`
    load      host ──CopyIn──▶ device                     when it is admitted, into blocks of its own; `loading`

`Tiers` composes these parts and passes answers and time to them. Nothing here blocks, and look-ups evict nothing. The driver
moves the bytes: `transfers` has the orders to it and its answers.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from baton.core.config import WorkerConfig
from baton.core.engine.blocks import BlockPool
from baton.core.engine.gauges import StorageGauges
from baton.core.engine.plan import Int32s
from baton.core.engine.prefix import Key
from baton.core.engine.request import Serial
from baton.core.engine.victims import RecoveryRates
from baton.core.errors import InvariantViolated
from baton.core.tiers.bring_back import BringBackRule
from baton.core.tiers.departures import Departures
from baton.core.tiers.fetching import KvFetching
from baton.core.tiers.host_rows import HostRows
from baton.core.tiers.loading import KvLoading
from baton.core.tiers.open_transfers import OF_STORE, OpenTransfer, OpenTransfers, TransferKind
from baton.core.tiers.outcomes import Outcome
from baton.core.tiers.saving import KvSaving
from baton.core.tiers.stored_keys import StoredKeys
from baton.core.tiers.transfers import StorageEffect, StorageEvent, TransferDone, TransferFailed, TransferFenced

NO_STORAGE = StorageGauges()


class Tiers:
    def __init__(self, config: WorkerConfig, pool: BlockPool, rates: RecoveryRates) -> None:
        self._outcomes: list[Outcome] = []
        self._transfers = OpenTransfers(config.tiers)
        self._bring_back = BringBackRule(config, rates, self._transfers.counts)
        self._stored = StoredKeys(config.tiers.host_rows)
        self._departures = Departures(config.tiers.depart_us, self._outcomes)
        self._saving = KvSaving(self._transfers, pool, self._bring_back, self._stored, self._departures)
        self._fetching = KvFetching(self._transfers, self._bring_back, self._stored, self._saving, self._departures)
        self._loading = KvLoading(self._transfers, self._outcomes)
        self.host = self._transfers.host
        self._has_store = config.tiers.store
        self.saves_preempted = config.tiers.save_preempted
        """Whether the KV of a preempted request is saved."""

    @property
    def stores_preempted(self) -> bool:
        """Whether the KV of a preempted request will be found in the store."""
        breakers = self._transfers.breakers.values()
        return self._has_store and self.saves_preempted and not any(breaker.is_open for breaker in breakers)

    # ── views ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def gauges(self) -> StorageGauges:
        breakers = self._transfers.breakers.values()
        now = {
            "host_rows": self.host.rows,
            "host_used": self.host.used,
            "transfers": len(self._transfers),
            "breaker_open": int(any(breaker.is_open for breaker in breakers)),
            "breaker_opened": sum(breaker.opened for breaker in breakers),
        }
        return StorageGauges(**{**self._transfers.counts, **now})

    def open(self) -> tuple[OpenTransfer, ...]:
        """For the laws."""
        return tuple(self._transfers)

    @property
    def busy(self) -> bool:
        """Whether KV is being saved. What is still to be stored waits for one of these, or for the store to return."""
        return any(transfer.kind in (TransferKind.OUT, TransferKind.PUT) for transfer in self._transfers)

    def next_deadline(self) -> int | None:
        if not (self._transfers or self._fetching or self._departures):
            return None  # the usual case, and this is called several times an event
        transfers = (transfer.deadline_us for transfer in self._transfers if not transfer.fencing)
        return min((*transfers, *self._fetching.deadlines(), *self._departures.deadlines()), default=None)

    def take_orders(self) -> list[StorageEffect]:
        return self._transfers.take_orders()

    def take_outcomes(self) -> list[Outcome]:
        """Outcomes since the last call; call it after every call that may have caused one."""
        outcomes = self._outcomes.copy()
        self._outcomes.clear()
        return outcomes

    # ── calls of the scheduler ───────────────────────────────────────────────────────────────────────────────────────────

    def save(self, blocks: Int32s, preempted: bool, now_us: int) -> list[Key]:
        """Save these blocks, given in sequence order. Returns the keys that the store will get and lacks."""
        self._transfers.now_us = now_us
        return self._saving.save(blocks, preempted)

    def depart(self, serial: Serial, keys: Sequence[Key], now_us: int) -> None:
        """Emit Departed when the store has these keys or will not get them, at the latest after the time limit."""
        self._departures.depart(serial, keys, now_us)

    def forget_departure(self, serial: Serial) -> None:
        """Emit no Departed for it."""
        self._departures.forget(serial)

    def brings_back(self, blocks: int) -> bool:
        """Whether to copy `blocks` from host memory rather than compute them; a refusal is counted."""
        return self._bring_back.copies(blocks)

    def prefetch(self, requester: Hashable, keys: Sequence[Key], now_us: int) -> bool:
        """Fetch into host memory what the store has of these keys, which follow the prefix that is here. False: not now."""
        self._transfers.now_us = now_us
        return self._fetching.prefetch(requester, keys)

    def is_prefetching(self, requester: Hashable) -> bool:
        return self._fetching.is_prefetching(requester)

    def forget_prefetch(self, requester: Hashable) -> None:
        """The request does not wait any more; orders in progress go on, for others."""
        self._fetching.forget(requester)

    def is_known_stored(self, key: Key) -> bool:
        return self._stored.has(key, self._transfers.now_us)

    def load(self, serial: Serial, keys: Sequence[Key], rows: Int32s, blocks: Int32s, now_us: int) -> None:
        """Copy these rows, which hold the blocks of `keys`, into the request's blocks. Loaded follows at its end."""
        self._transfers.now_us = now_us
        self._loading.load(serial, keys, rows, blocks)

    def give_up_load(self, serial: Serial) -> None:
        """Fence its copy. Loaded still follows, once nothing writes to the blocks."""
        self._loading.give_up(serial)

    # ── answers and time ─────────────────────────────────────────────────────────────────────────────────────────────────

    def handle(self, event: StorageEvent, now_us: int) -> None:
        self._transfers.now_us = now_us
        transfer = self._transfers.get(event.transfer)
        if transfer is not None:
            self._ended(transfer, event)
        self._go_on()

    def expire(self, now_us: int) -> None:
        """Fence late transfers, and end waits whose time is over."""
        transfers = self._transfers
        transfers.now_us = now_us
        for transfer in transfers.late():
            transfers.counts["late"] += 1
            transfers.fence(transfer)
            self._bring_back.measure(transfer, now_us)
            if transfer.kind in OF_STORE:
                self._has_failed(transfer.kind)
                self._fetching.over(transfer)
            if transfer.kind is TransferKind.GET:
                self._stored.forget(transfer.keys)
        self._fetching.expire()
        self._departures.expire(now_us)
        self._go_on()

    def _go_on(self) -> None:
        """Order what waited for the transfer that ended, and end waits for a store that is unavailable."""
        self._saving.put_some()
        self._fetching.get_some()
        if self._transfers.breakers[TransferKind.PUT].is_open:
            self._departures.give_up()
        self._fetching.end_prefetches()

    def _ended(self, transfer: OpenTransfer, event: StorageEvent) -> None:
        """The driver has released the transfer, whatever its result."""
        self._transfers.close(transfer)
        came = event.came if isinstance(event, TransferDone) else (False,) * len(transfer.keys)
        if not transfer.fencing:
            self._judge_driver(transfer, event)
        match transfer.kind:
            case TransferKind.OUT:
                self._saving.copied_out(transfer, came)
            case TransferKind.IN:
                self._loading.copied_in(transfer, came)
            case TransferKind.LOOK:
                if not transfer.fencing:
                    self._fetching.looked(transfer, came)
            case TransferKind.GET:
                self._fetching.got(transfer, came)
            case TransferKind.PUT:
                self._saving.has_put(transfer, came)
        self._fetching.over(transfer)

    def _judge_driver(self, transfer: OpenTransfer, event: StorageEvent) -> None:
        failed = isinstance(event, TransferFailed | TransferFenced)
        self._transfers.counts["failed"] += failed
        if not failed:
            self._bring_back.measure(transfer, self._transfers.now_us)
        if transfer.kind in OF_STORE:
            if failed:
                self._has_failed(transfer.kind)
            else:
                self._transfers.breakers[transfer.kind].succeeded()

    def _has_failed(self, kind: TransferKind) -> None:
        breaker = self._transfers.breakers[kind]
        breaker.failed(self._transfers.now_us)
        if breaker.is_open:
            self._stored.clear()  # the store may have lost everything


class NoTiers:
    """For an engine without host memory: nothing is saved, found or brought back."""

    saves_preempted = False
    stores_preempted = False
    busy = False

    def __init__(self) -> None:
        self.host = HostRows(0)

    def gauges(self) -> StorageGauges:
        return NO_STORAGE

    def open(self) -> tuple[OpenTransfer, ...]:
        return ()

    def next_deadline(self) -> int | None:
        return None

    def take_orders(self) -> list[StorageEffect]:
        return []

    def take_outcomes(self) -> list[Outcome]:
        return []

    def handle(self, event: StorageEvent, now_us: int) -> None:
        """No order is open."""

    def expire(self, now_us: int) -> None:
        """Nothing is ever late."""

    def save(self, blocks: Int32s, preempted: bool, now_us: int) -> list[Key]:
        del blocks, preempted, now_us
        return []

    def brings_back(self, blocks: int) -> bool:
        del blocks
        return False

    def prefetch(self, requester: Hashable, keys: Sequence[Key], now_us: int) -> bool:
        del requester, keys, now_us
        return True

    def is_prefetching(self, requester: Hashable) -> bool:
        del requester
        return False

    def is_known_stored(self, key: Key) -> bool:
        del key
        return False

    def forget_prefetch(self, requester: Hashable) -> None:
        """Nothing is fetched."""

    def load(self, serial: Serial, keys: Sequence[Key], rows: Int32s, blocks: Int32s, now_us: int) -> None:
        del keys, rows, blocks, now_us
        raise InvariantViolated(f"KV of request {serial} was to be restored where there is none outside the pool")

    def give_up_load(self, serial: Serial) -> None:
        """Nothing is loaded."""

    def depart(self, serial: Serial, keys: Sequence[Key], now_us: int) -> None:
        del keys, now_us
        raise InvariantViolated(f"request {serial} was to wait for KV to be stored where there is no store")

    def forget_departure(self, serial: Serial) -> None:
        """No request departs."""


AnyTiers = Tiers | NoTiers


def tiers_of(config: WorkerConfig, pool: BlockPool, rates: RecoveryRates) -> AnyTiers:
    return Tiers(config, pool, rates) if config.tiers.host_rows else NoTiers()
