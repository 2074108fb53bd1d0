"""How far a stage of a start has come, told to whoever shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class PartUnit(StrEnum):
    """What the parts of a stage are."""

    BYTES = "bytes"
    TENSORS = "tensors"
    PROCESSES = "processes"


@dataclass(frozen=True, slots=True)
class StageProgress:
    done: int
    total: int
    unit: PartUnit

    def __str__(self) -> str:
        if self.unit is PartUnit.BYTES:
            return f"{self.done / 1e6:.0f} of {self.total / 1e6:.0f} MB"
        return f"{self.done} of {self.total} {self.unit}"


class StageProgressSink(Protocol):
    """Is told of stages and of how far each has come."""

    def begin(self, stage: str) -> None:
        """A stage begins, which ends the one before."""

    def advance(self, progress: StageProgress) -> None:
        """The stage that began last has come so far."""


@dataclass(frozen=True, slots=True)
class StageNames:
    """Passes on what a stage is called when it begins, and nothing else."""

    say: Callable[[str], None]

    def begin(self, stage: str) -> None:
        self.say(stage)

    def advance(self, progress: StageProgress) -> None: ...


def _nothing(_: str) -> None:
    """Says nothing."""


UNTOLD = StageNames(_nothing)
"""For those who need not know."""
