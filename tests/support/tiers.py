"""Host memory and a store for a Worker under test: real bytes of the scripted pool, and answers when the test says so."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from baton.core.config import WorkerConfig
from baton.core.engine.prefix import Key
from baton.core.engine.worker import Effect
from baton.core.tiers.transfers import (
    CopyIn,
    CopyOut,
    FenceTransfer,
    Get,
    Look,
    Put,
    StorageEvent,
    TransferDone,
    TransferFailed,
    TransferFenced,
)
from tests.support.driver import IDLE_PASSES_MAX, Driver

Order = CopyOut | CopyIn | Look | Get | Put


@dataclass
class Shelf:
    """A store that several workers may share."""

    objects: dict[Key, bytes] = field(default_factory=dict)
    fails: bool = False
    full: bool = False
    hangs: bool = False


class TieredDriver(Driver):
    """A worker with host memory, and with a store where its configuration says so."""

    def __init__(self, config: WorkerConfig, shelf: Shelf | None = None) -> None:
        super().__init__(config)
        self.shelf = shelf or Shelf()
        self.host = np.zeros((config.tiers.host_rows, self.executor.kv.pool.shape[1]), dtype=np.uint8)
        self.orders: list[Order] = []
        """Under way, in the order in which they were given."""
        self.seen: list[Order] = []
        """All that ever were."""
        self.fences: list[FenceTransfer] = []

    def _take(self, effect: Effect) -> None:
        match effect:
            case CopyOut() | CopyIn() | Look() | Get() | Put():
                self.orders.append(effect)
                self.seen.append(effect)
            case FenceTransfer():
                self.fences.append(effect)
            case _:
                super()._take(effect)

    def finish(self, at: int = 0) -> None:
        """Carry out an order that is under way."""
        order = self.orders.pop(at)
        of_store = isinstance(order, Look | Get | Put)
        self.send(TransferFailed(order.transfer, "broken") if of_store and self.shelf.fails else self._carried_out(order))

    def fail(self, at: int = 0) -> None:
        """Half of what it would have written is nonsense."""
        order = self.orders.pop(at)
        self._scribble(order)
        self.send(TransferFailed(order.transfer, "broken"))

    def answer_fence(self, at: int = 0) -> None:
        """What was being written by then is nonsense."""
        fence = self.fences.pop(at)
        for order in [order for order in self.orders if order.transfer == fence.transfer]:
            self.orders.remove(order)
            self._scribble(order)
        self.send(TransferFenced(fence.transfer))

    def go_on(self) -> None:
        """A millisecond of planning and computing; what is under way between the tiers stays so."""
        self.now_us += 1_000
        self.tick()
        self.settle_one()

    def settle_all(self) -> None:
        """Until nothing is under way between the tiers."""
        while self.orders or self.fences:
            self.answer_fence() if self.fences else self.finish()

    def run(self, steps_max: int = 100_000) -> None:
        idle_passes = 0
        for _ in range(steps_max):
            if self.worker.is_idle and not (self.orders or self.fences):
                return
            if self.is_due:
                self.tick()
            elif self.fences:
                self.answer_fence()
            elif (at := self._answerable()) is not None:
                self.finish(at)
            elif self.in_flight:
                self.settle_one()
            else:
                idle_passes += 1
                if idle_passes > IDLE_PASSES_MAX:
                    raise RuntimeError(f"deadlock: {self.worker.gauges()}")
                self.now_us = self.worker.next_deadline() or self.now_us
        raise RuntimeError("did not finish")

    def _answerable(self) -> int | None:
        """The first order that is not the store's, where that hangs."""
        kinds = (CopyOut, CopyIn) if self.shelf.hangs else (CopyOut, CopyIn, Look, Get, Put)
        return next((at for at, order in enumerate(self.orders) if isinstance(order, kinds)), None)

    def _carried_out(self, order: Order) -> StorageEvent:
        pool, objects = self.executor.kv.pool, self.shelf.objects
        match order:
            case CopyOut(haul, blocks, rows):
                self.host[rows] = pool[blocks]
                return TransferDone(haul, (True,) * len(rows))
            case CopyIn(haul, rows, blocks):
                pool[blocks] = self.host[rows]
                return TransferDone(haul, (True,) * len(rows))
            case Look(haul, keys):
                return TransferDone(haul, tuple(key in objects for key in keys))
            case Get(haul, keys, rows):
                for key, row in zip(keys, rows.tolist(), strict=True):
                    if key in objects:
                        self.host[row] = np.frombuffer(objects[key], dtype=np.uint8)
                return TransferDone(haul, tuple(key in objects for key in keys))
            case Put(haul, keys, rows):
                if not self.shelf.full:
                    objects.update((key, self.host[row].tobytes()) for key, row in zip(keys, rows.tolist(), strict=True))
                return TransferDone(haul, (not self.shelf.full,) * len(keys))

    def _scribble(self, order: Order) -> None:
        match order:
            case CopyOut(_, _, rows) | Get(_, _, rows):
                self.host[rows[: len(rows) // 2 + 1]] = 0xEE
            case CopyIn(_, _, blocks):
                self.executor.kv.pool[blocks[: len(blocks) // 2 + 1]] = 0xEE
            case _:
                pass
