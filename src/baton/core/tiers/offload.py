"""KV outside the pool: saving, prefetching and loading it, each within a time limit.

    save    device ──CopyOut──▶ host ──Put──▶ store     when a request leaves its slot; `saving`, `departures`
    seek    store ──Look, Get──▶ host                   while a request waits in the queue; `fetching`
    load    host ──CopyIn──▶ device                     when it is admitted, into blocks of its own; `loading`

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
        self._hauls = OpenTransfers(config.tiers)
        self._bring_back = BringBackRule(config, rates, self._hauls.counts)
        self._stored = StoredKeys(config.tiers.host_rows)
        self._departures = Departures(config.tiers.depart_us, self._outcomes)
        self._saving = KvSaving(self._hauls, pool, self._bring_back, self._stored, self._departures)
        self._fetching = KvFetching(self._hauls, self._bring_back, self._stored, self._saving, self._departures)
        self._loading = KvLoading(self._hauls, self._outcomes)
        self.host = self._hauls.host
        self.saves_preempted = config.tiers.save_preempted
        """Whether the KV of a preempted request is saved."""

    # ── what others may know ─────────────────────────────────────────────────────────────────────────────────────────────

    def gauges(self) -> StorageGauges:
        breakers = self._hauls.breakers.values()
        now = {
            "host_rows": self.host.rows,
            "host_used": self.host.used,
            "hauls": len(self._hauls),
            "breaker_open": int(any(breaker.is_open for breaker in breakers)),
            "breaker_opened": sum(breaker.opened for breaker in breakers),
        }
        return StorageGauges(**{**self._hauls.counts, **now})

    def open(self) -> tuple[OpenTransfer, ...]:
        """For the laws."""
        return tuple(self._hauls)

    @property
    def busy(self) -> bool:
        """Whether KV is being saved. What is still to be stored waits for one of these, or for the store to return."""
        return any(haul.kind in (TransferKind.OUT, TransferKind.PUT) for haul in self._hauls)

    def next_deadline(self) -> int | None:
        if not (self._hauls or self._fetching or self._departures):
            return None  # the usual case, and this is called several times an event
        hauls = (haul.deadline_us for haul in self._hauls if not haul.fencing)
        return min((*hauls, *self._fetching.deadlines(), *self._departures.deadlines()), default=None)

    def take_orders(self) -> list[StorageEffect]:
        return self._hauls.take_orders()

    def take_outcomes(self) -> list[Outcome]:
        """Outcomes since the last call; call it after every call that may have caused one."""
        outcomes = self._outcomes.copy()
        self._outcomes.clear()
        return outcomes

    # ── what the scheduler asks for ──────────────────────────────────────────────────────────────────────────────────────

    def save(self, blocks: Int32s, preempted: bool, now_us: int) -> list[Key]:
        """Save these blocks, given in sequence order. Returns the keys that the store will get and lacks."""
        self._hauls.now_us = now_us
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

    def seek(self, seeker: Hashable, keys: Sequence[Key], now_us: int) -> bool:
        """Fetch into host memory what the store has of these keys, which follow the prefix that is here. False: not now."""
        self._hauls.now_us = now_us
        return self._fetching.seek(seeker, keys)

    def is_seeking(self, seeker: Hashable) -> bool:
        return self._fetching.is_seeking(seeker)

    def forget_seeker(self, seeker: Hashable) -> None:
        """The request does not wait any more; orders in progress go on, for others."""
        self._fetching.forget(seeker)

    def is_known_stored(self, key: Key) -> bool:
        return self._stored.has(key, self._hauls.now_us)

    def load(self, serial: Serial, keys: Sequence[Key], rows: Int32s, blocks: Int32s, now_us: int) -> None:
        """Copy these rows, which hold the blocks of `keys`, into the request's blocks. Loaded follows at its end."""
        self._hauls.now_us = now_us
        self._loading.load(serial, keys, rows, blocks)

    def give_up_load(self, serial: Serial) -> None:
        """Fence its copy. Loaded still follows, once nothing writes to the blocks."""
        self._loading.give_up(serial)

    # ── answers and time ─────────────────────────────────────────────────────────────────────────────────────────────────

    def handle(self, event: StorageEvent, now_us: int) -> None:
        self._hauls.now_us = now_us
        haul = self._hauls.get(event.haul)
        if haul is not None:
            self._ended(haul, event)
        self._go_on()

    def expire(self, now_us: int) -> None:
        """Fence late transfers, and end waits whose time is over."""
        hauls = self._hauls
        hauls.now_us = now_us
        for haul in hauls.late():
            hauls.counts["late"] += 1
            hauls.fence(haul)
            self._bring_back.measure(haul, now_us)
            if haul.kind in OF_STORE:
                self._has_failed(haul.kind)
                self._fetching.over(haul)
            if haul.kind is TransferKind.GET:
                self._stored.forget(haul.keys)
        self._fetching.expire()
        self._departures.expire(now_us)
        self._go_on()

    def _go_on(self) -> None:
        """Order what waited for the transfer that ended, and end waits for a store that is unavailable."""
        self._saving.put_some()
        self._fetching.get_some()
        if self._hauls.breakers[TransferKind.PUT].is_open:
            self._departures.give_up()
        self._fetching.end_seeks()

    def _ended(self, haul: OpenTransfer, event: StorageEvent) -> None:
        """The driver has released the transfer, whatever its result."""
        self._hauls.close(haul)
        came = event.came if isinstance(event, TransferDone) else (False,) * len(haul.keys)
        if not haul.fencing:
            self._judge_driver(haul, event)
        match haul.kind:
            case TransferKind.OUT:
                self._saving.copied_out(haul, came)
            case TransferKind.IN:
                self._loading.copied_in(haul, came)
            case TransferKind.LOOK:
                if not haul.fencing:
                    self._fetching.looked(haul, came)
            case TransferKind.GET:
                self._fetching.got(haul, came)
            case TransferKind.PUT:
                self._saving.has_put(haul, came)
        self._fetching.over(haul)

    def _judge_driver(self, haul: OpenTransfer, event: StorageEvent) -> None:
        failed = isinstance(event, TransferFailed | TransferFenced)
        self._hauls.counts["failed"] += failed
        if not failed:
            self._bring_back.measure(haul, self._hauls.now_us)
        if haul.kind in OF_STORE:
            if failed:
                self._has_failed(haul.kind)
            else:
                self._hauls.breakers[haul.kind].succeeded()

    def _has_failed(self, kind: TransferKind) -> None:
        breaker = self._hauls.breakers[kind]
        breaker.failed(self._hauls.now_us)
        if breaker.is_open:
            self._stored.clear()  # the store may have lost everything


class NoTiers:
    """For an engine without host memory: nothing is saved, found or brought back."""

    saves_preempted = False
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

    def seek(self, seeker: Hashable, keys: Sequence[Key], now_us: int) -> bool:
        del seeker, keys, now_us
        return True

    def is_seeking(self, seeker: Hashable) -> bool:
        del seeker
        return False

    def is_known_stored(self, key: Key) -> bool:
        del key
        return False

    def forget_seeker(self, seeker: Hashable) -> None:
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
