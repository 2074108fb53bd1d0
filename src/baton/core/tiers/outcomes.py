"""Outcomes that the tiers report to the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.engine.request import Serial


@dataclass(frozen=True, slots=True)
class Loaded:
    """A copy into a request's blocks has ended: the first `blocks` of them are filled."""

    serial: Serial
    blocks: int


@dataclass(frozen=True, slots=True)
class Departed:
    """The KV of a request that continues elsewhere is stored, or will not be."""

    serial: Serial


Outcome = Loaded | Departed
