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
    def __init__(self, hauls: OpenTransfers, outcomes: list[Outcome]) -> None:
        self._hauls = hauls
        self._outcomes = outcomes

    def load(self, serial: Serial, keys: Sequence[Key], rows: Int32s, blocks: Int32s) -> None:
        """Copy these rows, which hold the blocks of `keys`, into the request's blocks. Loaded follows at its end."""
        hauls = self._hauls
        haul = hauls.begin(TransferKind.IN, tuple(keys), hauls.config.copy_us, blocks, serial=serial)
        hauls.host.read(keys)
        hauls.order(CopyIn(haul, rows, blocks))

    def give_up(self, serial: Serial) -> None:
        """Fence its copy. Loaded still follows, once nothing writes to the blocks."""
        for haul in self._hauls:
            if haul.serial == serial and not haul.fencing:
                self._hauls.fence(haul)

    def copied_in(self, haul: OpenTransfer, came: Sequence[bool]) -> None:
        self._hauls.host.let_go(haul.keys)
        blocks = leading(came)
        self._hauls.counts["loaded"] += blocks
        if haul.serial is not None:
            self._outcomes.append(Loaded(haul.serial, blocks))
