"""Bugs planted in what keeps KV outside the pool, one at a time; see `planted` for what becomes of them.

Each is one that systems with host memory or a store behind their pool have had, or could have: blocks and rows that come
back while a copy still touches them, answers that are believed too early, stores that everybody waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from baton.core.engine.blocks import BlockPool, Pin
from baton.core.engine.departing import DepartingRequests
from baton.core.engine.ended import EndedRequest
from baton.core.engine.ending import RequestEnding
from baton.core.engine.held_prefills import PrefillsWithBlocks
from baton.core.engine.plan import Int32s
from baton.core.engine.prefix import Key
from baton.core.engine.prefix_lookup import PrefixLookup
from baton.core.engine.records import PrefixHit, Request
from baton.core.engine.request import FinishReason, Move, Phase, Serial
from baton.core.engine.restoring import KvRestoring
from baton.core.engine.scheduler import Scheduler
from baton.core.engine.worker import Effect, Worker
from baton.core.tiers.departures import Departures
from baton.core.tiers.fetching import KvFetching
from baton.core.tiers.host_rows import HostRows
from baton.core.tiers.offload import Tiers
from baton.core.tiers.open_transfers import FILLS, OpenTransfer, OpenTransfers, TransferKind
from baton.core.tiers.outcomes import Outcome
from baton.core.tiers.saving import KvSaving
from baton.core.tiers.transfers import (
    CopyIn,
    CopyOut,
    Put,
    StorageEvent,
    TransferDone,
    TransferFailed,
    TransferFenced,
    TransferId,
)
from baton.wire.envelope import EnvelopeFlaw, OpenedEnvelope
from tests.sim.planted import Patch, core, wire
from tests.sim.planted_routing import BUGS

__all__ = ["BUGS"]


# ── blocks that leave ────────────────────────────────────────────────────────────────────────────────────────────────────


@core("blocks that are being copied to host memory are free for others at once")
def copy_blocks_that_nobody_holds(patch: Patch) -> None:
    patch.set("BlockPool.hold_for_copy", lambda self, blocks: None)
    patch.set("engine.end_copy", lambda self, blocks: None)


@core("a copy that is late gives its blocks back with the order to fence it, not with the answer")
def give_blocks_back_before_the_fence(patch: Patch) -> None:
    expire_then = patch.original("Tiers.expire")

    def expire(self: Tiers, now_us: int) -> None:
        expire_then(self, now_us)
        for haul in self._transfers:
            if haul.fencing and haul.kind is TransferKind.OUT:
                self._saving._pool.end_copy(haul.blocks)
                haul.blocks = haul.blocks[:0]

    patch.set("Tiers.expire", expire)


@core("blocks whose copy failed are never given back")
def keep_blocks_of_failed_copies(patch: Patch) -> None:
    copied_then = patch.original("copied_out")

    def copied_out(self: KvSaving, haul: OpenTransfer, came: Sequence[bool]) -> None:
        if not all(came):
            haul.blocks = haul.blocks[:0]
        copied_then(self, haul, came)

    patch.set("copied_out", copied_out)


@core("a block that leaves and is found in the cache counts as leaving for ever")
def hold_what_leaves_uncounted(patch: Patch) -> None:
    def hold(self: BlockPool, blocks: Int32s) -> None:
        self._evictable_count -= self.unreferenced(blocks)
        self._references[blocks] += 1

    patch.set("BlockPool.hold", hold)


@core("blocks are dropped first and saved then")
def save_after_the_drop(patch: Patch) -> None:
    def vacate(self: RequestEnding, request: Request) -> list[Key]:
        if request.pinned:
            return []
        running = self._running
        slot = running.slot_of(request)
        running.pool.drop(running.slots.blocks(slot))
        unstored = self._save(request)
        running.slots.vacate(slot)
        request.slot = None
        if request.phase is Phase.FINISHED:
            del running.requests[request.serial]
        return unstored

    patch.set("RequestEnding.vacate", vacate)


@core("of the blocks that one copy moves the last goes to the first row")
def cross_blocks_and_rows(patch: Patch) -> None:
    orders_then = patch.original("Tiers.take_orders")

    def take_orders(self: Tiers) -> list[Any]:
        return [
            replace(order, rows=order.rows[::-1]) if isinstance(order, CopyOut) else order for order in orders_then(self)
        ]

    patch.set("Tiers.take_orders", take_orders)


# ── rows of host memory ──────────────────────────────────────────────────────────────────────────────────────────────────


@core("a row that is being read goes when room is needed")
def evict_rows_that_are_read(patch: Patch) -> None:
    def evict(self: HostRows, count: int) -> None:
        for key in list(self._ready)[: max(0, count)]:
            self._free.append(self._ready.pop(key))

    patch.set("tiers._evict", evict)


@core("what is still on its way into host memory is taken for being there")
def read_rows_that_are_filling(patch: Patch) -> None:
    run_then = patch.original("HostRows.run")

    def run(self: HostRows, keys: Sequence[Key]) -> Int32s:
        rows = []
        for key in keys:
            row = self._ready.get(key, self._filling.get(key))
            if row is None:
                break
            rows.append(row)
        return np.array(rows, dtype=np.int32) if len(rows) > len(run_then(self, keys)) else run_then(self, keys)

    def read(self: HostRows, keys: Sequence[Key]) -> None:
        for key in reversed(keys):
            row = self._ready.get(key, self._filling.get(key))
            if row is not None:
                self._readers[row] += 1

    patch.set("HostRows.run", run)
    patch.set("HostRows.read", read)


@core("a gap in what host memory has of a prefix is passed over")
def pass_over_a_gap(patch: Patch) -> None:
    def run(self: HostRows, keys: Sequence[Key]) -> Int32s:
        return np.array([row for key in keys if (row := self._ready.get(key)) is not None], dtype=np.int32)

    patch.set("HostRows.run", run)


@core("rows whose filling is fenced are free with the order, not with the answer")
def free_rows_before_the_fence(patch: Patch) -> None:
    fence_then, fill_then = patch.original("OpenTransfers.fence"), patch.original("OpenTransfers.fill")

    def fence(self: OpenTransfers, haul: OpenTransfer) -> None:
        fence_then(self, haul)
        if haul.kind in FILLS:
            fill_then(self, haul, (False,) * len(haul.keys))

    def fill(self: OpenTransfers, haul: OpenTransfer, came: Sequence[bool]) -> None:
        if not haul.fencing:
            fill_then(self, haul, came)

    patch.set("OpenTransfers.fence", fence)
    patch.set("OpenTransfers.fill", fill)


@core("a row that the store has read is never let go of")
def never_let_go_of_a_row(patch: Patch) -> None:
    put_then = patch.original("has_put")

    def has_put(self: KvSaving, haul: OpenTransfer, came: Sequence[bool]) -> None:
        put_then(self, haul, came)
        self._host.read(haul.keys)

    patch.set("has_put", has_put)


# ── answers that are believed ────────────────────────────────────────────────────────────────────────────────────────────


def _believing(patch: Patch, kind: TransferKind, answers: type | tuple[type, ...]) -> None:
    """Some answers about one kind of haul are taken for: all of it is there."""
    ended_then = patch.original("_ended")

    def ended(self: Tiers, haul: OpenTransfer, event: StorageEvent) -> None:
        if haul.kind is kind and isinstance(event, answers):
            event = TransferDone(haul.id, (True,) * len(haul.keys))
        ended_then(self, haul, event)

    patch.set("_ended", ended)


@core("a copy into host memory that failed is believed to be whole")
def believe_a_failed_copy_out(patch: Patch) -> None:
    _believing(patch, TransferKind.OUT, TransferFailed)


@core("a copy into host memory that was fenced is believed to be whole")
def believe_a_fenced_copy_out(patch: Patch) -> None:
    _believing(patch, TransferKind.OUT, TransferFenced)


@core("a copy to the device that failed or was fenced is believed to be whole, and its request decodes nonsense")
def believe_a_bad_copy_in(patch: Patch) -> None:
    _believing(patch, TransferKind.IN, (TransferFailed, TransferFenced))


@core("objects that were missing or bad are believed to have arrived")
def believe_that_all_arrived(patch: Patch) -> None:
    _believing(patch, TransferKind.GET, (TransferDone, TransferFailed, TransferFenced))


@core("of what came from host memory one block more is counted than came")
def count_one_block_more(patch: Patch) -> None:
    loaded_then = patch.original("KvRestoring.loaded")

    def loaded(self: KvRestoring, serial: Serial, blocks: int) -> EndedRequest | int:
        request, size = self._running.requests[serial], self._running.config.block_size
        whole, found = (request.tokens_at_start - 1) // size, request.found_tokens // size
        return loaded_then(self, serial, min(blocks + 1, whole - found))

    patch.set("KvRestoring.loaded", loaded)


@core("the block of the last token is brought back too, and nothing is left to compute")
def restore_the_last_token(patch: Patch) -> None:
    def keys_after(self: PrefixLookup, request: Request, hit: PrefixHit) -> list[Key]:
        return request.keys[1 + len(hit.blocks) : request.tokens_at_start // self._block_size + 1]

    patch.set("keys_after", keys_after)


# ── restoring ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@core("a request runs as soon as its copy is ordered")
def run_before_the_copy(patch: Patch) -> None:
    restore_then = patch.original("KvRestoring.restore")

    def restore(self: KvRestoring, request: Request, hit: PrefixHit, rows: Int32s, protected: bool) -> None:
        restore_then(self, request, hit, rows, protected)
        vars(self)["scheduler of the bug"]._pass.restored(self._running.slot_of(request))

    init_then = patch.original("Scheduler.__init__")

    def init(self: Scheduler, *parts: Any) -> None:
        init_then(self, *parts)
        vars(self._restoring)["scheduler of the bug"] = self  # part of its state, so that it is in snapshots too

    patch.set("Scheduler.__init__", init)
    patch.set("KvRestoring.restore", restore)
    patch.set("Scheduler.loaded", lambda self, serial, blocks, now_us: None)


@core("blocks that a copy writes to are not marked")
def restore_without_a_pin(patch: Patch) -> None:
    restore_then = patch.original("KvRestoring.restore")

    def restore(self: KvRestoring, request: Request, hit: PrefixHit, rows: Int32s, protected: bool) -> None:
        restore_then(self, request, hit, rows, protected)
        self._running.pin(request, Pin.NONE)

    patch.set("KvRestoring.restore", restore)


@core("a request that is cancelled while its KV arrives is free at once; the copy goes on in its blocks")
def end_a_restore_at_once(patch: Patch) -> None:
    def order_end(self: KvRestoring, request: Request, reason: FinishReason) -> None:
        running = self._running
        running.slots.restoring[running.slot_of(request)] = False
        running.pin(request, Pin.NONE)
        self._billing.transferred(request, running.now_us)
        self._ending.end_unstarted(request, reason)

    loaded_then = patch.original("Scheduler.loaded")

    def loaded(self: Scheduler, serial: Serial, blocks: int, now_us: int) -> EndedRequest | None:
        return loaded_then(self, serial, blocks, now_us) if self.request(serial) is not None else None

    patch.set("KvRestoring.order_end", order_end)
    patch.set("Scheduler.loaded", loaded)


@core("a copy for a request that was cancelled is not fenced")
def never_give_up_a_load(patch: Patch) -> None:
    patch.set("KvLoading.give_up", lambda self, serial: None)


@core("with only a restored request to begin, the loop sleeps on")
def sleep_over_what_is_restored(patch: Patch) -> None:
    patch.set("RestoredRows.is_due", property(lambda self: False))
    patch.set("RestoredRows.stalled", property(lambda self: self._running.slots.loading + len(self._restored)))


@core("on the short path a granted prefill is computed while its KV still arrives")
def begin_what_is_still_restored(patch: Patch) -> None:
    def begin(self: PrefillsWithBlocks, serial: Serial) -> None:
        running = self._running
        running.prefilling.append(running.slot_of(running.requests[serial]))

    patch.set("PrefillsWithBlocks.begin", begin)
    forget_what_was_granted(patch)


@core("on the short path what was granted while it was restored is forgotten")
def forget_what_was_granted(patch: Patch) -> None:
    def restored(self: PrefillsWithBlocks, slot: int) -> None:
        self._running.move(self._running.occupant(slot), Move.ADMIT)

    patch.set("PrefillsWithBlocks.restored", restored)


@core("the rows that a copy to the device reads are another request's")
def load_the_rows_of_another(patch: Patch) -> None:
    orders_then = patch.original("Tiers.take_orders")

    def take_orders(self: Tiers) -> list[Any]:
        return [
            replace(order, rows=(order.rows + 1) % self.host.rows) if isinstance(order, CopyIn) else order
            for order in orders_then(self)
        ]

    patch.set("Tiers.take_orders", take_orders)


# ── time limits ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@core("a copy or a question that is late is waited for as long as it takes")
def fence_nothing(patch: Patch) -> None:
    expire_then = patch.original("Tiers.expire")

    def expire(self: Tiers, now_us: int) -> None:
        for haul in self._transfers:
            haul.deadline_us = max(haul.deadline_us, now_us + 1)
        expire_then(self, now_us)

    patch.set("Tiers.expire", expire)


@core("nobody looks at the clock for copies and questions")
def forget_the_deadlines_of_hauls(patch: Patch) -> None:
    def next_deadline(self: Tiers) -> int | None:
        return min(self._departures.deadlines(), default=None)

    patch.set("Tiers.next_deadline", next_deadline)


@core("a fence that takes its time is ordered again with every pass")
def fence_again_and_again(patch: Patch) -> None:
    fence_then = patch.original("OpenTransfers.fence")

    def fence(self: OpenTransfers, haul: OpenTransfer) -> None:
        fence_then(self, haul)
        haul.fencing = False

    patch.set("OpenTransfers.fence", fence)


@core("a request waits for the store until it answers")
def wait_for_the_store(patch: Patch) -> None:
    seek_then = patch.original("KvFetching.prefetch")

    def prefetch(self: KvFetching, requester: Any, keys: Sequence[Key]) -> bool:
        sought = seek_then(self, requester, keys)
        if requester in self._prefetches:
            self._prefetches[requester].until_us = 1 << 60
        return sought

    patch.set("KvFetching.prefetch", prefetch)
    patch.set("KvFetching.over", lambda self, haul: None)


@core("who goes elsewhere waits until all it leaves behind is stored, however long that takes")
def wait_until_all_is_stored(patch: Patch) -> None:
    depart_then = patch.original("Departures.depart")

    def depart(self: Departures, serial: Serial, keys: Sequence[Key], now_us: int) -> None:
        depart_then(self, serial, keys, now_us)
        self._departures[serial].until_us = 1 << 60

    patch.set("Departures.depart", depart)


@core("who waits for what the store cannot take is never told to go")
def wait_for_what_is_not_stored(patch: Patch) -> None:
    patch.set("Departures.settle", lambda self, key: None)
    expire_then = patch.original("Departures.expire")

    def expire(self: Departures, now_us: int) -> None:
        for departure in self._departures.values():
            departure.until_us = max(departure.until_us, now_us + 1)
        expire_then(self, now_us)

    patch.set("Departures.expire", expire)


@core("the wait for the store is on nobody's bill")
def bill_no_departure(patch: Patch) -> None:
    def departed(self: DepartingRequests, serial: Serial, _now_us: int) -> EndedRequest:
        return self._departing.pop(serial)[0]

    patch.set("DepartingRequests.departed", departed)


# ── the store ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@core("a store that fails is asked on and on")
def never_leave_the_store_alone(patch: Patch) -> None:
    patch.set("CircuitBreaker.failed", lambda self, now_us: None)


@core("a store that has failed is never asked again")
def never_try_the_store_again(patch: Patch) -> None:
    patch.set("CircuitBreaker.allows", lambda self, now_us: self._until_us is None)


@core("a store that was left alone is asked with everything at once as soon as the time is over")
def try_with_everything(patch: Patch) -> None:
    patch.set("CircuitBreaker.asked", lambda self: None)


@core("late answers do not count as failures")
def forgive_what_is_late(patch: Patch) -> None:
    expire_then = patch.original("Tiers.expire")

    def expire(self: Tiers, now_us: int) -> None:
        self._has_failed = lambda kind: None  # type: ignore[method-assign]
        try:
            expire_then(self, now_us)
        finally:
            del self._has_failed

    patch.set("Tiers.expire", expire)


@core("as many orders go to the store at once as there is work")
def ask_without_a_bound(patch: Patch) -> None:
    begin_then = patch.original("OpenTransfers.begin")

    def begin(self: OpenTransfers, kind: TransferKind, *arguments: Any, **named: Any) -> TransferId:
        haul = begin_then(self, kind, *arguments, **named)
        self._at_store = dict.fromkeys(self._at_store, -1000)
        return haul

    patch.set("OpenTransfers.begin", begin)


@core("numbers of orders come again, and a late answer is taken for another's")
def reuse_numbers(patch: Patch) -> None:
    begin_then = patch.original("OpenTransfers.begin")

    def begin(self: OpenTransfers, *arguments: Any, **named: Any) -> TransferId:
        if not self._open:
            self._next_id = 0
        return begin_then(self, *arguments, **named)

    patch.set("OpenTransfers.begin", begin)


@core("what is stored is read from rows that are still being filled")
def store_rows_that_are_filling(patch: Patch) -> None:
    copy_then = patch.original("_copy_out")

    def copy_out(self: KvSaving, saved: list[tuple[Key, int]], rows: Int32s) -> None:
        copy_then(self, saved, rows)
        if self._config.store and saved and self._transfers.may_ask(TransferKind.PUT):
            key = saved[0][0]
            haul = self._transfers.begin(TransferKind.PUT, (key,), self._config.put_us)
            self._transfers.order(Put(haul, (key,), rows[:1]))

    def has_put(self: KvSaving, haul: OpenTransfer, came: Sequence[bool]) -> None:
        if set(haul.keys) <= self._putting:
            put_then(self, haul, came)

    put_then = patch.original("has_put")
    patch.set("_copy_out", copy_out)
    patch.set("has_put", has_put)


@core("a giver does not look up when what it waited for has come from the store")
def offer_nothing_after_a_fetch(patch: Patch) -> None:
    def transferred(self: Worker, event: StorageEvent) -> list[Effect]:
        self._tiers.handle(event, self._now_us)
        return []

    patch.set("_transferred", transferred)


# ── what is stored ───────────────────────────────────────────────────────────────────────────────────────────────────────


@wire("a stored block is used without a look at whose it is")
def accept_other_keys(patch: Patch) -> None:
    _trusting(patch, key=True)


@wire("a stored block of another model is used")
def accept_other_layouts(patch: Patch) -> None:
    _trusting(patch, layout=True)


@wire("the checksum of a stored block is not looked at")
def accept_other_bytes(patch: Patch) -> None:
    patch.set("envelope._check", lambda whole: bytes(16))


def _trusting(patch: Patch, *, key: bool = False, layout: bool = False) -> None:
    """Whatever a sound envelope says of its key or layout is what was asked for."""
    open_then = patch.original("open_any")

    def open_any(data: memoryview) -> OpenedEnvelope | EnvelopeFlaw:
        opened = open_then(data)
        if isinstance(opened, EnvelopeFlaw):
            return opened
        return OpenedEnvelope(
            _Any(opened.key) if key else opened.key, _Any(opened.layout) if layout else opened.layout, opened.payload
        )

    patch.set("open_any", open_any)


class _Any(bytes):
    """Equal to everything."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = bytes.__hash__


@core("attempts that wait at a prefill instance are not told of room that the end of a transfer makes")
def tell_nobody_of_late_room(patch: Patch) -> None:
    outcomes_then = patch.original("Worker._outcomes")

    def outcomes(self: Worker, found: list[Outcome]) -> list[Effect]:
        vars(self._side)["advance"] = lambda now_us: []
        effects: list[Effect] = outcomes_then(self, found)
        del vars(self._side)["advance"]
        return effects

    patch.set("Worker._outcomes", outcomes)
