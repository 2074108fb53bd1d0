"""Transfers of KV between device blocks, rows of host memory and a store: orders to the driver and its answers.

    CopyOut   blocks → rows      Put   rows → store
    CopyIn    rows → blocks      Get   store → rows      Look   which of these has the store?

Each order is a transfer with a number of its own. It ends in exactly one of three ways, each an event: TransferDone,
TransferFailed, or, after the core ordered FenceTransfer, TransferFenced. Then the driver has released it: nothing
of the transfer reads or writes any more. Fences are always answered soon, whatever the store does. A transfer that ended
meanwhile may be answered twice; the second answer is ignored.

The store reads and writes only rows of host memory, never device blocks: one that hangs can delay rows, but no step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from baton.core.engine.plan import Int32s
from baton.core.engine.prefix import Key

TransferId = NewType("TransferId", int)
"""Never reused while the worker runs."""


# ── orders ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, eq=False)
class CopyOut:
    """Copy device block `blocks[i]` to host row `rows[i]`."""

    transfer: TransferId
    blocks: Int32s
    rows: Int32s


@dataclass(frozen=True, slots=True, eq=False)
class CopyIn:
    """Copy host row `rows[i]` to device block `blocks[i]`."""

    transfer: TransferId
    rows: Int32s
    blocks: Int32s


@dataclass(frozen=True, slots=True)
class Look:
    """Ask which of these keys the store has."""

    transfer: TransferId
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Get:
    """Fetch what is stored under `keys[i]` into row `rows[i]`, if it is sound."""

    transfer: TransferId
    keys: tuple[Key, ...]
    rows: Int32s


@dataclass(frozen=True, slots=True, eq=False)
class Put:
    """Store row `rows[i]` under `keys[i]`."""

    transfer: TransferId
    keys: tuple[Key, ...]
    rows: Int32s


@dataclass(frozen=True, slots=True)
class FenceTransfer:
    """Release everything that this transfer reads and writes, and answer TransferFenced."""

    transfer: TransferId


StorageEffect = CopyOut | CopyIn | Look | Get | Put | FenceTransfer


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class TransferDone:
    transfer: TransferId
    came: tuple[bool, ...]
    """One for each key or row: the store has it; it arrived sound; it was stored; it was copied."""


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The store or the copy itself failed, as opposed to having nothing or no room."""

    transfer: TransferId
    reason: str


@dataclass(frozen=True, slots=True)
class TransferFenced:
    transfer: TransferId


StorageEvent = TransferDone | TransferFailed | TransferFenced
