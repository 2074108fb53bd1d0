"""Moves KV between two instances: the protocols of a Sender on P and a Receiver on D, with three kinds of each.

Owns the protocols, the layout that both sides must share, and the names of the kinds. Every method returns at once; outcomes
are reported through `report`, from a thread of the transfer. The rules for every kind:

- Sizes and offsets come from our own layout. A peer's message only names (block of the sequence, layer) ranges, which are
  checked against what was expected.
- Only D's own process writes D's pool, and nothing is written for a hand-over after Fenced.
- Reasons name no address: clients may see them.
- A stalled transfer ends with ShipFailed or TransferBroken. Silence between two pieces is not a stall: P may be computing.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypedDict, Unpack

import numpy as np

from baton.core.engine.plan import Int32s
from baton.core.errors import InvariantViolated
from baton.core.handover.messages import Handover, PeerEvent
from baton.kv.block_access import Bytes2d, DeviceSharing, Spans, span_of
from baton.kv.host_mirror import HostMirror

KINDS = ("shm", "tcp", "mooncake")


@dataclass(frozen=True)
class KvLayout:
    """The format of a block of KV. Two instances can hand over to each other only if theirs are equal."""

    fingerprint: bytes
    """Fingerprint of the model."""
    dtype: str
    block_size: int
    """Tokens a block."""
    layer_bytes: tuple[int, ...]
    """Bytes a block of each layer; layers lie one after the other."""

    @cached_property
    def block_bytes(self) -> int:
        return sum(self.layer_bytes)

    @cached_property
    def spans(self) -> Spans:
        """[begin, end) of each layer inside a block."""
        ends = np.cumsum(self.layer_bytes, dtype=np.int64).tolist()
        return tuple((end - size, end) for end, size in zip(ends, self.layer_bytes, strict=True))

    @cached_property
    def digest(self) -> bytes:
        """A hash of 16 bytes over all fields."""
        text = f"{self.dtype} {self.block_size} {' '.join(map(str, self.layer_bytes))} ".encode()
        return hashlib.blake2b(text + self.fingerprint, digest_size=16).digest()


@dataclass
class KvMemory:
    """A pool of blocks as bytes, which a transfer reads on P and writes on D."""

    layout: KvLayout
    pool: Bytes2d
    spans: Spans
    """[begin, end) of each layer inside a block; equal to `layout.spans`."""
    fd: int | None = None
    """The sealed memfd of a shared pool; `shm` can send only from such a pool."""
    mirror: HostMirror | None = None
    """Set where the blocks are on a device and `pool` is their mirror in host memory."""
    sharing: DeviceSharing | None = None
    """Set where other processes of this host can read that device."""

    def __post_init__(self) -> None:
        if self.spans != self.layout.spans:
            raise InvariantViolated(f"layers at {self.spans} are not those of {self.layout.layer_bytes} bytes")
        if self.pool.ndim != 2 or self.pool.shape[1] != self.layout.block_bytes or not self.pool.flags.c_contiguous:
            raise InvariantViolated(f"a pool of shape {self.pool.shape} has no blocks of {self.layout.block_bytes} bytes")

    @property
    def blocks(self) -> int:
        return int(self.pool.shape[0])

    def span(self, layers: range) -> tuple[int, int]:
        """[begin, end) of these neighbouring layers inside a block."""
        return span_of(self.spans, layers)


Report = Callable[[PeerEvent], None]
"""Called from any thread; never blocks."""


class ReceiverOptions(TypedDict, total=False):
    host: str
    """Numeric address to listen on [127.0.0.1]. Not for `shm`."""
    verified: bool
    """False compares no checksums; for measurements only [True]."""
    stall_s: float
    """Longest pause in the middle of a piece [5]."""
    hello_s: float
    """Longest time from connecting to a valid hello [2]."""
    strangers_max: int
    """Most connections without a hello; beyond it the oldest is closed [64]."""
    expected_max: int
    """Hand-overs at once [4096]."""


class SenderOptions(TypedDict, total=False):
    host: str
    """Numeric address at which a `mooncake` peer reaches us [127.0.0.1]."""
    verified: bool
    """False computes no checksums; for measurements only [True]."""
    stall_s: float
    """Longest time that the peer may take no byte while some are waiting [5]."""
    bytes_per_s: float
    """Rate limit; for measurements only."""
    run_layers_max: int
    """Most layers sent as one piece; for measurements only."""
    handovers_max: int
    """Hand-overs at once [1024]."""


class Receiver(Protocol):
    """The side of D."""

    address: str
    """Published at registration; only a Sender of the same kind can read it."""
    arrived_bytes: int
    """Bytes put into our pool since the start, by all hand-overs."""
    refused: Counter[str]
    """Rejected connections and pieces, by reason."""

    def expect(self, handover: Handover, token: bytes, first: int, blocks: Int32s) -> None:
        """Let one connection that shows `token` fill `blocks` with blocks `first`… of the sequence."""

    def verify(self, handover: Handover, checks: bytes) -> None:
        """Report Verified or TransferBroken once everything expected has arrived."""

    def fence(self, handover: Handover) -> None:
        """Report Fenced, soon and always, also for unknown hand-overs. After that no byte of it is written."""

    def close(self) -> None: ...


class Sender(Protocol):
    """The side of P."""

    sent_bytes: int
    """Bytes of KV sent by all hand-overs so far; where D fetches it, bytes that were announced."""

    def open(self, handover: Handover, address: str, token: bytes, first: int, blocks: Int32s) -> None:
        """Connect to D. Our block `blocks[i]` is block `first + i` of the sequence."""

    def ship(self, handover: Handover, step: int | None, first: int, upto: int, last: bool) -> None:
        """Send blocks [first, upto) of the sequence. Reports Shipped or ShipFailed after the last."""

    def layer_done(self, step: int, layer: int) -> None:
        """A step has written this layer. Steps count upwards; the signal may come before the orders that wait for it."""

    def step_done(self, step: int) -> None:
        """This step and all before it are over: all their layers are written."""

    def fence(self, handover: Handover) -> None:
        """Report Fenced; after that nothing of it is read or sent."""

    def close(self) -> None: ...


def available(kind: str) -> str | None:
    """None if this kind can be used here, else the reason why not."""
    match kind:
        case "tcp":
            return None
        case "shm":
            from baton.kv.shared_memory import why_not_shared

            return why_not_shared()
        case "mooncake":
            from baton.kv.mooncake_engine import why_unavailable

            return why_unavailable()
        case _:
            return f"there is no transfer called {kind!r}, only {', '.join(KINDS)}"


def make_receiver(kind: str, memory: KvMemory, report: Report, **options: Unpack[ReceiverOptions]) -> Receiver:
    _demand(kind)
    match kind:
        case "shm":
            from baton.kv.transfer_shm import shm_receiver

            return shm_receiver(memory, report, options)
        case "mooncake":
            from baton.kv.transfer_mooncake import mooncake_receiver

            return mooncake_receiver(memory, report, options)
        case _:
            from baton.kv.transfer_tcp import tcp_receiver

            return tcp_receiver(memory, report, options)


def make_sender(kind: str, memory: KvMemory, report: Report, **options: Unpack[SenderOptions]) -> Sender:
    _demand(kind)
    match kind:
        case "shm":
            from baton.kv.transfer_shm import shm_sender

            return shm_sender(memory, report, options)
        case "mooncake":
            from baton.kv.transfer_mooncake import mooncake_sender

            return mooncake_sender(memory, report, options)
        case _:
            from baton.kv.transfer_tcp import tcp_sender

            return tcp_sender(memory, report, options)


class TransferUnavailable(RuntimeError):
    """This kind of transfer cannot work here; the message says why."""


def _demand(kind: str) -> None:
    reason = available(kind)
    if reason is not None:
        raise TransferUnavailable(reason)
