"""Transfers in progress, under ids that are never reused.

A transfer has a time limit. A late one is fenced, and its blocks and rows are reused only after the fence is answered:
a slow copy and a dead one take the same path. Orders to the store are bounded for each kind, and a store that fails or is
late several times in a row gets no orders for a while.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from baton.core.config import TierConfig
from baton.core.engine.plan import NO_INT32S, Int32s
from baton.core.engine.prefix import Key
from baton.core.engine.request import Serial
from baton.core.state_machine import FastEnum
from baton.core.tiers.circuit_breaker import CircuitBreaker
from baton.core.tiers.host_rows import HostRows
from baton.core.tiers.transfers import FenceTransfer, StorageEffect, TransferId


class TransferKind(FastEnum):
    OUT = "copy to host"
    IN = "copy to device"
    LOOK = "look"
    GET = "get"
    PUT = "put"


OF_STORE = (TransferKind.LOOK, TransferKind.GET, TransferKind.PUT)
FILLS = (TransferKind.OUT, TransferKind.GET)
"""Kinds that write rows of host memory."""
READS = (TransferKind.IN, TransferKind.PUT)
"""Kinds that read rows of host memory."""


@dataclass(slots=True)
class OpenTransfer:
    id: TransferId
    kind: TransferKind
    keys: tuple[Key, ...]
    began_us: int
    deadline_us: int
    blocks: Int32s = field(default_factory=lambda: NO_INT32S)
    serial: Serial | None = None
    """IN: the request that it is for."""
    requester: Hashable = None
    """LOOK: the request that it is for."""
    fencing: bool = False


class OpenTransfers:
    def __init__(self, config: TierConfig) -> None:
        self.config = config
        self.host = HostRows(config.host_rows)
        self.now_us = 0
        self.counts: Counter[str] = Counter()
        """Counters of `StorageGauges`, by field name."""
        limits = config.failures_max, config.retry_us, config.retry_us_max
        self.breakers = {kind: CircuitBreaker(*limits) for kind in OF_STORE}
        """One for each kind of order: a store may answer look-ups and hang in everything else."""
        self.filling: dict[Key, TransferId] = {}
        """Key → the transfer that brings it into host memory."""
        self._open: dict[TransferId, OpenTransfer] = {}
        self._at_store = dict.fromkeys(OF_STORE, 0)
        """Open orders to the store, by kind."""
        self._orders: list[StorageEffect] = []
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenTransfer]:
        return iter(self._open.values())

    def get(self, transfer: TransferId) -> OpenTransfer | None:
        return self._open.get(transfer)

    def late(self) -> list[OpenTransfer]:
        return [transfer for transfer in self if not transfer.fencing and transfer.deadline_us <= self.now_us]

    def may_ask(self, kind: TransferKind) -> bool:
        """Whether one more order of this kind may go to the store now."""
        return self._at_store[kind] < self.config.transfers_max and self.breakers[kind].allows(self.now_us)

    def begin(
        self,
        kind: TransferKind,
        keys: tuple[Key, ...],
        limit_us: int,
        blocks: Int32s = NO_INT32S,
        serial: Serial | None = None,
        requester: Hashable = None,
    ) -> TransferId:
        transfer = TransferId(self._next_id)
        self._next_id += 1
        self._open[transfer] = OpenTransfer(
            transfer, kind, keys, self.now_us, self.now_us + limit_us, blocks, serial, requester
        )
        if kind in FILLS:
            self.filling.update(dict.fromkeys(keys, transfer))
        if kind in OF_STORE:
            self._at_store[kind] += 1
            self.breakers[kind].asked()
        return transfer

    def order(self, effect: StorageEffect) -> None:
        self._orders.append(effect)

    def take_orders(self) -> list[StorageEffect]:
        orders, self._orders = self._orders, []
        return orders

    def fence(self, transfer: OpenTransfer) -> None:
        transfer.fencing = True
        self.order(FenceTransfer(transfer.id))

    def close(self, transfer: OpenTransfer) -> None:
        """The driver has released it."""
        del self._open[transfer.id]
        if transfer.kind in OF_STORE:
            self._at_store[transfer.kind] -= 1

    def fill(self, transfer: OpenTransfer, came: Sequence[bool]) -> None:
        """Its rows are filled where `came` is True, and free again where it is False."""
        for key in transfer.keys:
            del self.filling[key]
        self.host.filled([key for key, is_there in zip(transfer.keys, came, strict=True) if is_there])
        self.host.spoilt([key for key, is_there in zip(transfer.keys, came, strict=True) if not is_there])


def leading(came: Sequence[bool]) -> int:
    """Number of leading True values."""
    return came.index(False) if False in came else len(came)
