"""Failure of an attempt to hand a prefill over: a code, the stage in which it failed, and a reason."""

from __future__ import annotations

from enum import IntEnum, StrEnum

from msgspec import Struct


class PdCode(IntEnum):
    """Kind of failure. All of these may be retried."""

    REFUSED = 500
    """The decode side had no room."""
    NOT_DELIVERED = 501
    """The KV did not arrive, or not as it was computed."""
    PREEMPTED = 502
    """The decode side could not hold it to its end."""
    TIMEOUT = 408
    """The prefill never arrived."""


class PdStage(StrEnum):
    OFFER = "offer"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"


class PdFault(Struct, array_like=True, frozen=True, gc=False):
    """Why an attempt in which one instance prefills and another decodes ended early."""

    code: PdCode
    stage: PdStage
    reason: str

    @property
    def message(self) -> str:
        """Shown to the client."""
        return f"PD Error {int(self.code)} ({self.stage}): {self.reason}"
