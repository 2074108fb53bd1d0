"""What the tiers tell the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.engine.request import Serial


@dataclass(frozen=True, slots=True)
class Loaded:
    """A copy into a request's blocks is over: the first `blocks` of them hold what they should."""

    serial: Serial
    blocks: int


@dataclass(frozen=True, slots=True)
class Departed:
    """What a request that goes elsewhere leaves behind is stored, or will not be."""

    serial: Serial


Outcome = Loaded | Departed
