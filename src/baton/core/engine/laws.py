"""The invariants of one engine's scheduler, as checks that a test or a simulator runs after any event.

Each law is a function that raises InvariantViolated with what it found. They read copies and change nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from baton.core.engine.blocks import Pin
from baton.core.engine.masks import all_true, any_true
from baton.core.engine.records import Request
from baton.core.engine.request import Phase
from baton.core.engine.scheduler import Scheduler
from baton.core.engine.slots import FINISHED, NO_REQUEST, PREFILLING
from baton.core.errors import InvariantViolated
from baton.core.tiers.open_transfers import READS, TransferKind

_LEASED, _RECEIVING = int(Pin.LEASED), int(Pin.RECEIVING)
"""Plain numbers: numpy compares with them six times as fast as with members of an enum."""


def audit(scheduler: Scheduler) -> None:
    """Check every law. Costs O(pool): for tests, simulation and replay, not for serving."""
    for law in LAWS.values():
        law(scheduler)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise InvariantViolated(what)


def blocks_are_conserved(scheduler: Scheduler) -> None:
    """Free, evictable, leased, receiving, leaving and running sum to the pool, and each is what a recount finds."""
    pool, gauges = scheduler.pool, scheduler.pool.gauges()
    references, free, named = pool.references(), pool.free_blocks(), pool.prefix.names()
    pins = pool.pins()
    outside = gauges.leased + gauges.receiving + gauges.leaving
    if gauges.free + gauges.evictable + gauges.running + outside != pool.blocks:
        raise InvariantViolated(f"{gauges} do not sum to {pool.blocks}")
    listed = set(free.tolist())
    _require(len(listed) == len(free), "a block is in the free list twice")
    _require(not any_true(references[free] != 0), "a free block has references")
    _require(listed.isdisjoint(named), "a free block has a name")
    evictable = int(np.count_nonzero(references[list(named)] == 0))
    _require(evictable == gauges.evictable, f"{evictable} blocks are evictable, the gauge says {gauges.evictable}")
    leased, receiving = (int(np.count_nonzero(pins == pin)) for pin in (_LEASED, _RECEIVING))
    _require(leased == gauges.leased, f"{leased} blocks are leased, the gauge says {gauges.leased}")
    _require(receiving == gauges.receiving, f"{receiving} blocks are receiving, the gauge says {gauges.receiving}")
    _require(not any_true(references[pins > 0] != 1), "a pinned block has another number of owners than one")
    copy_references = pool.copy_references()
    leaving = int(np.count_nonzero((copy_references > 0) & (copy_references == references)))
    _require(leaving == gauges.leaving, f"{leaving} blocks are leaving, the gauge says {gauges.leaving}")
    running = int(np.count_nonzero(references)) - leased - receiving - leaving
    _require(running == gauges.running, f"{running} blocks are in use, the gauge says {gauges.running}")


def references_equal_tables(scheduler: Scheduler) -> None:
    """A block has as many references as tables that contain it and copies that read it."""
    slots = scheduler.slots
    counted = scheduler.pool.copy_references()
    for slot in np.flatnonzero(slots.serial != NO_REQUEST).tolist():
        blocks = slots.blocks(slot)
        if len(set(blocks.tolist())) != len(blocks):
            raise InvariantViolated(f"slot {slot} names a block twice")
        counted[blocks] += 1
    wrong = np.flatnonzero(counted != scheduler.pool.references())
    if len(wrong):
        raise InvariantViolated(f"blocks {wrong[:8].tolist()} have other reference counts than tables that name them")


def names_belong_to_blocks(scheduler: Scheduler) -> None:
    """A key belongs to one block, and the block to that key."""
    names = scheduler.pool.prefix.names()
    _require(len(set(names.values())) == len(names), "two blocks carry one name")
    contents = scheduler.pool.prefix.contents
    if contents is not None:
        _require(contents.keys() == set(names.values()), "the contents that are kept are not those of the indexed blocks")
    _require(len(names) == len(scheduler.pool.prefix), "the two directions of the prefix index differ in size")


def rows_match_requests(scheduler: Scheduler) -> None:
    """One request per slot and one slot per request, and the phase column agrees with the requests."""
    slots = scheduler.slots
    requests: dict[int, Request] = {request.serial: request for request in scheduler.requests()}
    occupied = np.flatnonzero(slots.serial != NO_REQUEST).tolist()
    _require(len(occupied) == slots.occupied, f"{len(occupied)} slots are occupied, the table says {slots.occupied}")
    for slot in occupied:
        request = requests[int(slots.serial[slot])]
        if request.slot != slot:
            raise InvariantViolated(f"slot {slot} holds request {request.serial}, which says slot {request.slot}")
        if int(slots.phase[slot]) != request.phase:
            raise InvariantViolated(f"slot {slot} and its request disagree about the phase")
        if int(slots.epoch[slot]) != request.epoch:
            raise InvariantViolated(f"slot {slot} and its request disagree about the epoch")
    for request in requests.values():
        if (request.phase is Phase.WAITING) != (request.slot is None):
            raise InvariantViolated(f"request {request.serial} in {request.phase.name}: slot {request.slot}")
    idle = slots.serial == NO_REQUEST
    _require(all_true(slots.phase[idle] == FINISHED), "an empty slot has a phase")


def lengths_are_ordered(scheduler: Scheduler) -> None:
    """KV exists only for known tokens, never for the last sampled one, and only computed blocks are published."""
    slots, size = scheduler.slots, scheduler.config.block_size
    rows = np.flatnonzero(slots.serial != NO_REQUEST)
    _require(all_true(slots.known[rows] <= slots.limit[rows]), "a request grew past its limit")
    decoded = slots.known[rows] > slots.prompt[rows]
    _require(all_true(slots.computed[rows] <= slots.known[rows] - decoded), "KV of a token that was never fed")
    _require(all_true(slots.published[rows] * size <= slots.computed[rows]), "a block was named before it was whole")
    _require(all_true(slots.computed[rows] <= slots.held[rows] * size), "KV without a block")
    _require(all_true(slots.pending[rows] >= 0), "fewer than no tokens are in flight")


def promises_are_covered(scheduler: Scheduler) -> None:
    """The blocks promised to protected requests are available."""
    promised = scheduler.promised()
    _require(promised <= scheduler.pool.available, f"{promised} blocks are promised, {scheduler.pool.available} available")


def prefills_fit_together(scheduler: Scheduler) -> None:
    """The started prefills could all finish if everything else were gone, so none can wait for another for ever."""
    slots, size = scheduler.slots, scheduler.config.block_size
    prefilling = slots.phase == PREFILLING
    lacking = int(np.sum(np.maximum(0, -(-slots.known // size) - slots.held), where=prefilling))
    references = scheduler.pool.references()
    kept = np.zeros(scheduler.pool.blocks, dtype=np.bool_)
    for slot in np.flatnonzero(prefilling | ((slots.serial != NO_REQUEST) & slots.protected)).tolist():
        kept[slots.blocks(slot)] = True
    room = scheduler.pool.blocks - int(np.count_nonzero(kept & (references > 0)))
    _require(lacking <= room, f"started prefills lack {lacking} blocks and at most {room} can ever be free")


def pins_belong_to_leases(scheduler: Scheduler) -> None:
    """A block is pinned exactly while its row waits for KV from outside, and is not published then."""
    slots, pins = scheduler.slots, scheduler.pool.pins()
    if not any_true(pins != 0):
        return
    owned = np.zeros(scheduler.pool.blocks, dtype=np.bool_)
    for slot in np.flatnonzero(slots.serial != NO_REQUEST).tolist():
        blocks = slots.blocks(slot)
        pinned = blocks[pins[blocks] > 0]
        owned[pinned] = True
        phase = Phase(slots.phase[slot])
        waits = not slots.started[slot] and phase in (Phase.RECEIVING, Phase.RESTORING, Phase.PREEMPTING)
        _require(waits or not len(pinned), f"slot {slot} runs in blocks that may still be written from outside")
    _require(all_true(owned == (pins > 0)), "a block is pinned for nobody")
    _require(not any_true(pins[list(scheduler.pool.prefix.names())] != 0), "a pinned block has a name")


def copies_have_what_they_touch(scheduler: Scheduler) -> None:
    """Each copy out holds its blocks, each copy in has a row that waits for it in pinned blocks, and there are no others."""
    tiers = scheduler.tiers
    copy_references = np.zeros(scheduler.pool.blocks, dtype=np.int32)
    loading, pins = set(), scheduler.pool.pins()
    for transfer in tiers.open():
        if transfer.kind is TransferKind.OUT:
            np.add.at(copy_references, transfer.blocks, 1)
        if transfer.serial is not None:
            loading.add(int(transfer.serial))
            _require(all_true(pins[transfer.blocks] == _RECEIVING), "a copy writes to blocks that are not kept for it")
    _require(
        all_true(copy_references == scheduler.pool.copy_references()),
        "blocks are lent to other copies than those that are open",
    )
    slots = scheduler.slots
    waiting = set(slots.serial[slots.restoring & (slots.serial != NO_REQUEST)].tolist())
    _require(waiting == loading, f"requests {sorted(waiting)} wait for copies, {sorted(loading)} have one")
    tiers.host.audit([key for transfer in tiers.open() if transfer.kind in READS for key in transfer.keys])


def the_decodes_are_current(scheduler: Scheduler) -> None:
    """The decodes that the scheduler remembers from one plan to the next are those in the table."""
    slots, kept, rows = scheduler.slots, scheduler.running.remembered_decodes(), scheduler.slots.decoding()
    if kept is None:
        return
    _require(np.array_equal(kept.slots, rows), f"rows {kept.slots.tolist()} are taken to decode, {rows.tolist()} do")
    _require(np.array_equal(kept.epochs, slots.epoch[rows]), "a decode is remembered with another epoch")
    _require(np.array_equal(kept.serials, slots.serial[rows]), "a decode is remembered with another request")


def nobody_yields_too_often(scheduler: Scheduler) -> None:
    most = scheduler.config.max_preemptions
    for request in scheduler.requests():
        if request.bill.preemptions and request.preemptions > most:
            text = f"{request.bill.preemptions} times, and {request.submission.preemptions} times elsewhere"
            raise InvariantViolated(f"request {request.serial} yielded {text}")


def the_senior_wait_in_front(scheduler: Scheduler) -> None:
    waiting = [request.submission.seniority for request in scheduler.queued()]
    if waiting != sorted(waiting):
        raise InvariantViolated(f"requests wait in the order {waiting[:16]}")


LAWS: dict[str, Callable[[Scheduler], None]] = {
    "conservation": blocks_are_conserved,
    "references": references_equal_tables,
    "names": names_belong_to_blocks,
    "rows": rows_match_requests,
    "lengths": lengths_are_ordered,
    "promises": promises_are_covered,
    "prefills": prefills_fit_together,
    "yielding": nobody_yields_too_often,
    "seniority": the_senior_wait_in_front,
    "pins": pins_belong_to_leases,
    "copies": copies_have_what_they_touch,
    "crew": the_decodes_are_current,
}
