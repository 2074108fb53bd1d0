"""KV on its way between the device's blocks, rows of host memory and a store: what is ordered and what is answered.

    CopyOut   blocks → rows      Put   rows → store
    CopyIn    rows → blocks      Get   store → rows      Look   which of these has the store?

Each order is a transfer with a number of its own. It ends in exactly one of three ways, each an event: TransferDone,
TransferFailed, or, after the core ordered FenceTransfer, TransferFenced. Then the driver has let go: nothing of the transfer
reads or writes a block or a row any more. Fences are always answered soon, whatever the store does. A transfer that ended
meanwhile may be answered twice; the second answer is ignored.

The store is behind the host's rows and never meets a block: one that hangs can hold up rows, and no step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from baton.core.engine.plan import Int32s
from baton.core.engine.prefix import Key

TransferId = NewType("TransferId", int)
"""Never reused while the worker lives."""


# ── orders ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, eq=False)
class CopyOut:
    """Copy device block `blocks[i]` to host row `rows[i]`."""

    haul: TransferId
    blocks: Int32s
    rows: Int32s


@dataclass(frozen=True, slots=True, eq=False)
class CopyIn:
    """Copy host row `rows[i]` to device block `blocks[i]`."""

    haul: TransferId
    rows: Int32s
    blocks: Int32s


@dataclass(frozen=True, slots=True)
class Look:
    """Which of these does the store have?"""

    haul: TransferId
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Get:
    """Fetch what is stored under `keys[i]` into row `rows[i]`, if it is sound."""

    haul: TransferId
    keys: tuple[Key, ...]
    rows: Int32s


@dataclass(frozen=True, slots=True, eq=False)
class Put:
    """Store row `rows[i]` under `keys[i]`."""

    haul: TransferId
    keys: tuple[Key, ...]
    rows: Int32s


@dataclass(frozen=True, slots=True)
class FenceTransfer:
    """Let go of whatever this haul reads and writes, and answer TransferFenced."""

    haul: TransferId


StorageEffect = CopyOut | CopyIn | Look | Get | Put | FenceTransfer


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class TransferDone:
    haul: TransferId
    came: tuple[bool, ...]
    """One for each key or row: the store has it; it arrived sound; it was stored; it was copied."""


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The store or the copy itself failed, as opposed to having nothing or no room."""

    haul: TransferId
    reason: str


@dataclass(frozen=True, slots=True)
class TransferFenced:
    haul: TransferId


StorageEvent = TransferDone | TransferFailed | TransferFenced
