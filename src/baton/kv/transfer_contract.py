"""What moves KV between two instances, as its driver sees it: a Sender on P, a Receiver on D, three kinds of each.

Owns the protocols, the layout that both sides must share, and the names of the kinds. Every method returns at once; what
happened is told through `report`, from a thread of the transfer's own. The laws, the same for every kind:

- Sizes and offsets come from our own layout. A peer's message only names (block of the sequence, layer) ranges, and those
  are held against what was expected.
- Nobody but D's own process writes D's pool, and after Fenced nothing does for that hand-over.
- Reasons name no address: a client may come to read them.
- Whatever stalls ends as ShipFailed or Spoilt. Silence between two pieces is not a stall: P may be computing.
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
from baton.kv.block_access import Bytes2d, DeviceSharing
from baton.kv.host_mirror import HostMirror

KINDS = ("shm", "tcp", "mooncake")


@dataclass(frozen=True)
class KvLayout:
    """What a block of KV is. Two instances can hand over to each other only when theirs are equal."""

    fingerprint: bytes
    """Of the model."""
    dtype: str
    block_size: int
    """Tokens a block."""
    layer_bytes: tuple[int, ...]
    """Bytes a block of each layer; layers lie one after the other."""

    @cached_property
    def block_bytes(self) -> int:
        return sum(self.layer_bytes)

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """[begin, end) of each layer inside a block."""
        ends = np.cumsum(self.layer_bytes, dtype=np.int64).tolist()
        return tuple((end - size, end) for end, size in zip(ends, self.layer_bytes, strict=True))

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that stand for all of it."""
        text = f"{self.dtype} {self.block_size} {' '.join(map(str, self.layer_bytes))} ".encode()
        return hashlib.blake2b(text + self.fingerprint, digest_size=16).digest()

    def differences(self, other: KvLayout) -> list[str]:
        """What is not the same, each with the name of the field and both values, ours first."""
        found = []
        if self.fingerprint != other.fingerprint:
            found.append(f"fingerprint: {self.fingerprint.hex()} here, {other.fingerprint.hex()} there")
        if self.dtype != other.dtype:
            found.append(f"dtype: {self.dtype} here, {other.dtype} there")
        if self.block_size != other.block_size:
            found.append(f"block_size: {self.block_size} here, {other.block_size} there")
        return found + self._layer_differences(other)

    def _layer_differences(self, other: KvLayout) -> list[str]:
        ours, theirs = self.layer_bytes, other.layer_bytes
        if len(ours) != len(theirs):
            return [f"layers: {len(ours)} here, {len(theirs)} there"]
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [f"bytes of layer {layer}: {ours} here, {theirs} there" for layer, (ours, theirs) in pairs if ours != theirs][
            :1
        ]


@dataclass
class KvMemory:
    """A pool of blocks as bytes: what a transfer reads on P and writes on D."""

    layout: KvLayout
    pool: Bytes2d
    spans: tuple[tuple[int, int], ...]
    """[begin, end) of each layer inside a block; `layout.spans`, and no other."""
    fd: int | None = None
    """The sealed memfd that the pool lies in, where it is shared; `shm` sends from no other."""
    mirror: HostMirror | None = None
    """Where the blocks themselves lie on a device, and this is what stands for them."""
    sharing: DeviceSharing | None = None
    """That device, where others on this host may read from it."""

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
        return self.spans[layers.start][0], self.spans[layers.stop - 1][1]


Report = Callable[[PeerEvent], None]
"""Called from any thread; never blocks."""


class ReceiverOptions(TypedDict, total=False):
    host: str
    """Where to listen: a numeric address [127.0.0.1]. Not for `shm`."""
    verified: bool
    """False compares no checks: for measuring only [True]."""
    stall_s: float
    """How long half a piece may stay half [5]."""
    hello_s: float
    """How long a connection may take to show a token [2]."""
    strangers_max: int
    """Connections that have not shown one yet; beyond it the oldest goes [64]."""
    expected_max: int
    """Hand-overs at once [4096]."""


class SenderOptions(TypedDict, total=False):
    host: str
    """What a `mooncake` peer reaches us by: a numeric address [127.0.0.1]."""
    verified: bool
    """False computes no checks: for measuring only [True]."""
    stall_s: float
    """How long the peer may take no byte while there are some [5]."""
    bytes_per_s: float
    """Send no faster: for measuring only."""
    run_layers_max: int
    """Send no more layers as one piece, however many are ready: for measuring only."""
    handovers_max: int
    """Hand-overs at once [1024]."""


class Receiver(Protocol):
    """On D."""

    address: str
    """Told at registration; opaque to all but a Sender of the same kind."""
    arrived_bytes: int
    """Put into our pool since the start, of whatever hand-over."""
    refused: Counter[str]
    """Connections and pieces that were turned away, by reason."""

    def expect(self, handover: Handover, token: bytes, first: int, blocks: Int32s) -> None:
        """Let one connection that shows `token` fill `blocks` with blocks `first`… of the sequence."""

    def verify(self, handover: Handover, checks: bytes) -> None:
        """Answer Verified or Spoilt, once everything expected is there."""

    def fence(self, handover: Handover) -> None:
        """Answer Fenced, soon and always, also for what is not known here. From then on no byte of it lands."""

    def close(self) -> None: ...


class Sender(Protocol):
    """On P."""

    sent_bytes: int
    """KV that has left, of all hand-overs so far; where D fetches it, KV that D was told it may fetch."""

    def open(self, handover: Handover, address: str, token: bytes, first: int, blocks: Int32s) -> None:
        """Connect. Our block `blocks[i]` is block `first + i` of the sequence."""

    def ship(self, handover: Handover, step: int | None, first: int, upto: int, last: bool) -> None:
        """Send blocks [first, upto) of the sequence; see `core.peers.Ship`. After the last: Shipped, or ShipFailed."""

    def layer_done(self, step: int, layer: int) -> None:
        """A step has written this layer. Steps count upwards; a signal may come before the orders that wait for it."""

    def step_done(self, step: int) -> None:
        """This step and all before it are over: all their layers are written, and their signals need not be kept."""

    def fence(self, handover: Handover) -> None:
        """Answer Fenced; nothing of it is read or sent from then on."""

    def close(self) -> None: ...


def available(kind: str) -> str | None:
    """Why this kind cannot be used here; None when it can."""
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
