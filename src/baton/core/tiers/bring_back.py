"""Decides whether KV is fetched or computed again: whichever is quicker, by measured rates."""

from __future__ import annotations

from collections import Counter

from baton.core.config import BringBack, WorkerConfig
from baton.core.engine.victims import RecoveryRates
from baton.core.tiers.open_transfers import OpenTransfer, TransferKind

FADING = 0.98
"""Factor on a rate each time it rules fetching out, so that one bad measurement does not rule it out for ever."""
BETTER_SHARE, WORSE_SHARE = 0.3, 0.1
"""Weight of a measurement in the rate. Disturbances only make a measurement worse, so a worse one weighs less."""


class BringBackRule:
    def __init__(self, config: WorkerConfig, rates: RecoveryRates, counts: Counter[str]) -> None:
        self._always = config.tiers.bring_back is BringBack.ALWAYS
        self._block_size = config.block_size
        self._rates = rates
        self._counts = counts

    def copies(self, blocks: int) -> bool:
        """Whether to copy `blocks` from host memory rather than compute them; a refusal is counted."""
        rates = self._rates
        if self._always or rates.copy_us_per_block < self._block_size * rates.prefill_us_per_token:
            return True
        self._counts["recompute_cheaper"] += blocks
        rates.copy_us_per_block *= FADING
        return False

    def fetches(self, blocks: int) -> bool:
        """Whether to fetch `blocks` from the store rather than compute them; a refusal is counted."""
        if self._always:
            return True
        rates = self._rates
        fetching = rates.look_us + blocks * (rates.fetch_us_per_block + rates.copy_us_per_block)
        if fetching < blocks * self._block_size * rates.prefill_us_per_token:
            return True
        self._counts["recompute_cheaper"] += blocks
        rates.fetch_us_per_block *= FADING
        rates.look_us *= FADING
        return False

    def measure(self, transfer: OpenTransfer, now_us: int) -> None:
        took_us, rates = now_us - transfer.began_us, self._rates
        each = took_us / max(1, len(transfer.keys))
        match transfer.kind:
            case TransferKind.IN:
                rates.copy_us_per_block = _blend(rates.copy_us_per_block, each)
            case TransferKind.GET:
                rates.fetch_us_per_block = _blend(rates.fetch_us_per_block, each)
            case TransferKind.LOOK:
                rates.look_us = _blend(rates.look_us, took_us)
            case _:
                pass


def _blend(believed: float, measured: float) -> float:
    share = BETTER_SHARE if measured < believed else WORSE_SHARE
    return believed * (1 - share) + measured * share
