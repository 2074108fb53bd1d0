"""Copies from host memory to blocks of the device: host ──CopyIn──▶ device, for a request that is admitted."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.engine.plan import Int32s
from baton.core.engine.prefix import Key
from baton.core.engine.request import Serial
from baton.core.tiers.open_transfers import OpenTransfer, OpenTransfers, TransferKind, leading
from baton.core.tiers.outcomes import Loaded, Outcome
from baton.core.tiers.transfers import CopyIn


class KvLoading:
    def __init__(self, transfers: OpenTransfers, outcomes: list[Outcome]) -> None:
        self._transfers = transfers
        self._outcomes = outcomes

    def load(self, serial: Serial, keys: Sequence[Key], rows: Int32s, blocks: Int32s) -> None:
        """Copy these rows, which hold the blocks of `keys`, into the request's blocks. Loaded follows at its end."""
        transfers = self._transfers
        transfer = transfers.begin(TransferKind.IN, tuple(keys), transfers.config.copy_us, blocks, serial=serial)
        transfers.host.read(keys)
        transfers.order(CopyIn(transfer, rows, blocks))

    def give_up(self, serial: Serial) -> None:
        """Fence its copy. Loaded still follows, once nothing writes to the blocks."""
        for transfer in self._transfers:
            if transfer.serial == serial and not transfer.fencing:
                self._transfers.fence(transfer)

    def copied_in(self, transfer: OpenTransfer, came: Sequence[bool]) -> None:
        self._transfers.host.let_go(transfer.keys)
        blocks = leading(came)
        self._transfers.counts["loaded"] += blocks
        if transfer.serial is not None:
            self._outcomes.append(Loaded(transfer.serial, blocks))
