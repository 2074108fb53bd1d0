"""Requests that continue elsewhere: their slots are free, and they end once their KV is stored, or will not be."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from baton.core.engine.ended import EndedRequest
from baton.core.engine.prefix import Key
from baton.core.engine.request import FinishReason, Serial
from baton.core.tiers.offload import AnyTiers


class DepartingRequests:
    def __init__(self, tiers: AnyTiers) -> None:
        self._tiers = tiers
        self._departing: dict[Serial, tuple[EndedRequest, int]] = {}
        """The end to report, and the time since which it waits."""

    def __contains__(self, serial: Serial) -> bool:
        return serial in self._departing

    def __len__(self) -> int:
        return len(self._departing)

    def serials(self) -> tuple[Serial, ...]:
        return tuple(self._departing)

    def depart(self, ended: EndedRequest, unstored: Sequence[Key], now_us: int) -> None:
        self._departing[ended.serial] = ended, now_us
        self._tiers.depart(ended.serial, unstored, now_us)

    def departed(self, serial: Serial, now_us: int) -> EndedRequest:
        """The wait is over: its end may be reported."""
        ended, since_us = self._departing.pop(serial)
        ended.bill.transfer_us += now_us - since_us
        return ended

    def end_at_once(self, serial: Serial, reason: FinishReason, keep: int | None, now_us: int) -> EndedRequest:
        """It was ended from outside while it waited for the store."""
        self._tiers.forget_departure(serial)
        ended = self.departed(serial, now_us)
        generated = ended.generated_tokens if keep is None else min(keep, ended.generated_tokens)
        return replace(ended, reason=reason, generated_tokens=generated, fault=None)
