"""KV transfers between instances of fuzzed worlds: real bytes from one scripted pool to another, with injected faults.

Owns data connections. A *piece* is one layer of one block. The giver is the instance that prefills, the taker the one that
decodes. With push, a piece holds the giver's bytes at the time of sending; with pull, at the time of arrival. Bytes are
written only to the blocks that the taker ordered.

The promises of a production driver hold under all faults: a token opens one connection, once; a fence is always answered,
after a while, and after its answer no byte of that hand-over is read or written. Before the answer, pieces may still land:
those on their way, and those of a giver that was paused and continues.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from baton.core.engine.plan import Int32s
from baton.core.handover.messages import Arriving, Fenced, Handover, PeerEvent, ShipFailed, Shipped, TransferBroken, Verified
from baton.executor.contract import KvView
from baton.sim.faults import Fault, KvRates, flip_bit, log_uniform_us
from baton.sim.law_names import ALIEN_BYTES, WHOLE_KV, LawBroken
from baton.sim.world import Host, World

ARRIVING_EVERY_US = 20_000
"""Least interval between two Arriving events of one hand-over."""
NOTICED_WITHIN_US = 200_000
"""Time within which a giver notices a broken or unanswered connection."""
FENCED_WITHIN_US = 400_000
"""The slowest fence."""
STALL_US_MAX = 1_200_000

Report = Callable[[PeerEvent], None]
_NUMBERS = struct.Struct("<II")
_CHECK = struct.Struct("<Q")


def check_of(layer: int, index: int, data: bytes) -> int:
    """Checksum of one piece and of its position."""
    digest = hashlib.blake2b(data, digest_size=8, person=_NUMBERS.pack(layer, index)).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True, slots=True)
class KvTimes:
    delay_us: int
    """One way, from a giver to a taker."""
    jitter_us: int
    """Largest extra delay; pieces may overtake each other by it."""
    piece_us: int
    """Time a giver takes to send one piece."""
    burst: int
    """Pieces sent together."""
    verify_us: int
    fence_us: int
    pulls: bool
    """Whether takers read the memory of givers; otherwise givers send."""


@dataclass(frozen=True, slots=True)
class _Fate:
    """The faults of one connection, by the number of the piece at which each happens."""

    refused: bool = False
    breaks_at: int | None = None
    taker_notices: bool = False
    flips_at: int | None = None
    loses_at: int | None = None
    stalls_at: int | None = None
    stall_us: int = 0


class FaultyTransfers:
    """All data connections of a world: the receiver and sender of each instance, and the faults of each connection."""

    def __init__(self, world: World, rates: KvRates, times: KvTimes) -> None:
        self.world = world
        self.rates = rates
        self.times = times
        self._receivers: dict[str, FaultyReceiver] = {}
        self._senders: dict[str, FaultySender] = {}

    @property
    def echo(self) -> float:
        """Chance that a message between peers is delivered twice."""
        return self.rates.echo

    def connect(self, name: str, host: Host, kv: KvView, report: Report) -> tuple[FaultyReceiver, FaultySender]:
        """A life of an instance begins."""
        receiver, sender = FaultyReceiver(self, name, host, kv, report), FaultySender(self, name, host, kv, report)
        self.enter(name, receiver, sender)
        return receiver, sender

    def enter(self, name: str, receiver: FaultyReceiver, sender: FaultySender) -> None:
        self._receivers[name] = receiver
        self._senders[name] = sender

    def leave(self, name: str) -> None:
        """A life of an instance ends: the other ends of its connections notice after a while, or not at all."""
        receiver, sender = self._receivers.pop(name, None), self._senders.pop(name, None)
        if receiver is not None:
            receiver.die()
        if sender is not None:
            sender.die()

    def receiver(self, name: str) -> FaultyReceiver | None:
        return self._receivers.get(name)

    def heal(self) -> None:
        self.rates = KvRates()

    def fate(self, stream: random.Random, pieces: int) -> _Fate:
        """Draw all values whatever the rates, so that one class of faults does not change another."""
        draws = [(stream.random(), int(stream.random() * pieces)) for _ in range(5)]
        stall_us, taker_notices = log_uniform_us(stream, 2_000, STALL_US_MAX), stream.random() < 0.5
        rates = self.rates
        chances = (rates.refused, rates.broken, rates.flipped, rates.lost, rates.stalled)
        refused, breaks, flips, loses, stalls = (
            at if draw < chance else None for (draw, at), chance in zip(draws, chances, strict=True)
        )
        return _Fate(refused is not None, breaks, taker_notices, flips, loses, stalls, stall_us)

    def fence_us(self, stream: random.Random, where: str) -> int:
        slow, share, long_us = stream.random(), stream.random(), stream.randrange(20_000, FENCED_WITHIN_US)
        if slow < self.rates.slow_fence:
            self.world.fire(Fault.FENCE_SLOW, where)
            return long_us
        return int(share * self.times.fence_us)


# ── takers ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, eq=False)
class _Inflow:
    """One hand-over at the receiver."""

    handover: Handover
    first: int
    blocks: list[int]
    token: bytes
    outflow: _Outflow | None = None
    arrived: set[tuple[int, int]] = field(default_factory=set)
    said_us: int | None = None
    """When the last Arriving event was reported."""
    checks: bytes | None = None
    flipped: bool = False
    fencing: bool = False
    over: bool = False
    """Nothing of it may be read or written any more."""


class FaultyReceiver:
    """The receiving end in one life of an instance."""

    def __init__(self, transfers: FaultyTransfers, name: str, host: Host, kv: KvView, report: Report) -> None:
        self.host = host
        self.life = host.lives
        self._transfers = transfers
        self._name = name
        self._kv = kv
        self._report = report
        self._stream = host.world.stream(f"receiver {name} life {host.lives}")
        self._inflows: dict[Handover, _Inflow] = {}
        self._by_token: dict[bytes, _Inflow] = {}
        """Tokens that have not opened a connection yet."""

    @property
    def open(self) -> int:
        return len(self._inflows)

    def expect(self, handover: Handover, token: bytes, first: int, blocks: Int32s) -> None:
        wanted = blocks.tolist()
        for other in self._inflows.values():
            if other.handover == handover or other.token == token or not set(wanted).isdisjoint(other.blocks):
                raise LawBroken(ALIEN_BYTES, f"{handover} shall land in {wanted}, where {other.handover} lands already")
        inflow = _Inflow(handover, first, wanted, token)
        self._inflows[handover] = inflow
        self._by_token[token] = inflow

    def verify(self, handover: Handover, checks: bytes) -> None:
        inflow = self._inflows.get(handover)
        if inflow is None:
            self._later(0, self._report, TransferBroken(handover, "nothing of the kind was expected"))
            return
        inflow.checks = checks
        self._verify_if_whole(inflow)

    def fence(self, handover: Handover) -> None:
        inflow = self._inflows.get(handover)
        if inflow is None:
            self._later(self._transfers.times.fence_us // 4, self._report, Fenced(handover))
        elif not inflow.fencing:
            inflow.fencing = True
            self._later(self._transfers.fence_us(self._stream, self._name), self._fenced, inflow)

    def connect(self, outflow: _Outflow) -> bool:
        """A giver presents a token; it opens one connection, once."""
        inflow = self._by_token.pop(outflow.token, None)
        if inflow is None or inflow.over:
            return False
        inflow.outflow = outflow
        outflow.inflow = inflow
        return True

    def land(self, inflow: _Inflow, pieces: list[Piece]) -> None:
        if inflow.over or inflow.outflow is None:
            self.host.world.fire(Fault.KV_TOO_LATE, self._name)
            return
        if inflow.fencing:
            self.host.world.fire(Fault.KV_WHILE_FENCING, self._name)
        for layer, index, pushed, flip in pieces:
            data = inflow.outflow.read(layer, index) if pushed is None else pushed
            if data is None:
                self._later(0, self._spoil, inflow, "the giver has closed its memory")
                return
            inflow.flipped = inflow.flipped or flip is not None
            self._write(inflow, layer, index, data if flip is None else flip_bit(data, flip))
        now_us = self.host.world.now_us
        if inflow.said_us is None or now_us - inflow.said_us >= ARRIVING_EVERY_US:
            inflow.said_us = now_us
            self._report(Arriving(inflow.handover))
        self._verify_if_whole(inflow)

    def spoil(self, inflow: _Inflow, reason: str) -> None:
        """The connection broke; report it within 5 ms."""
        self._later(self._stream.randrange(5_000), self._spoil, inflow, reason)

    def die(self) -> None:
        for inflow in self._inflows.values():
            inflow.over = True
            if inflow.outflow is not None:
                inflow.outflow.sender.fail(inflow.outflow, "the taker is gone")
        self._inflows.clear()

    def _write(self, inflow: _Inflow, layer: int, index: int, data: bytes) -> None:
        if not 0 <= index - inflow.first < len(inflow.blocks):
            raise LawBroken(
                ALIEN_BYTES, f"{self._name}: block {index} came for {inflow.handover}, which begins at {inflow.first}"
            )
        begin, end = self._kv.layers[layer]
        self._kv.pool[inflow.blocks[index - inflow.first], begin:end] = np.frombuffer(data, dtype=np.uint8)
        inflow.arrived.add((layer, index))

    def _verify_if_whole(self, inflow: _Inflow) -> None:
        if inflow.checks is not None and len(inflow.arrived) == len(inflow.blocks) * len(self._kv.layers):
            self._later(int(self._stream.random() * self._transfers.times.verify_us), self._verify, inflow)

    def _verify(self, inflow: _Inflow) -> None:
        if inflow.over or inflow.checks is None:
            return
        found = b"".join(_CHECK.pack(self._check(inflow, at)) for at in range(len(inflow.blocks)))
        if found != inflow.checks:
            if not (inflow.fencing or inflow.flipped):
                raise LawBroken(WHOLE_KV, f"{self._name}: what arrived for {inflow.handover} is not what was computed")
            self._spoil(inflow, "checks differ")
            return
        if inflow.flipped:
            raise LawBroken(WHOLE_KV, f"{self._name}: the checks of {inflow.handover} say nothing of a flipped bit")
        if not inflow.fencing:
            self._end(inflow)
        self._report(Verified(inflow.handover))

    def _check(self, inflow: _Inflow, at: int) -> int:
        """Checksum of one block in our pool, over all layers."""
        check, row = 0, self._kv.pool[inflow.blocks[at]]
        for layer, (begin, end) in enumerate(self._kv.layers):
            check ^= check_of(layer, inflow.first + at, row[begin:end].tobytes())
        return check

    def _spoil(self, inflow: _Inflow, reason: str) -> None:
        if not inflow.over:
            self._report(TransferBroken(inflow.handover, reason))

    def _fenced(self, inflow: _Inflow) -> None:
        self._end(inflow)
        self._report(Fenced(inflow.handover))
        if inflow.outflow is not None and self._stream.random() < 0.5:
            inflow.outflow.sender.fail(inflow.outflow, "the taker has closed the connection")

    def _end(self, inflow: _Inflow) -> None:
        inflow.over = True
        self._inflows.pop(inflow.handover, None)
        self._by_token.pop(inflow.token, None)
        if inflow.outflow is not None:
            inflow.outflow.read_by_nobody()

    def _later(self, delay_us: int, act: Callable[..., None], *arguments: object) -> None:
        self.host.after(delay_us, act, *arguments)


# ── givers ───────────────────────────────────────────────────────────────────────────────────────────────────────────────

Piece = tuple[int, int, bytes | None, int | None]
"""(layer, block of the sequence, its bytes if givers push, the bit that is flipped)."""


class _Outflow:
    """One hand-over at the sender."""

    def __init__(
        self, sender: FaultySender, handover: Handover, token: bytes, first: int, blocks: list[int], fate: _Fate
    ) -> None:
        self.sender = sender
        self.handover = handover
        self.token = token
        self.first = first
        self.blocks = blocks
        self.fate = fate
        self.inflow: _Inflow | None = None
        self.receiver: FaultyReceiver | None = None
        self.connected = False
        self.over = False
        """Whether it was fenced or has failed."""
        self.shipped = False
        self.ready: deque[tuple[int, int]] = deque()
        self.computing: dict[int, list[tuple[int, int]]] = {}
        """By step: the ranges of blocks of the sequence that wait for its layers."""
        self.ordered = self.sent = 0
        self.all_ordered = False
        self.busy = False
        self.not_before_us = 0
        """The end of a stall: no piece arrives earlier."""
        self.checks = [0] * len(blocks)
        self.sent_checks: dict[tuple[int, int], int] = {}

    def read(self, layer: int, index: int) -> bytes | None:
        """The bytes in our pool now; None if they may no longer be read."""
        return None if self.over else self.sender.read(self.blocks[index - self.first], layer)

    def read_by_nobody(self) -> None:
        """The taker has all of it, or has given it up."""
        if self.shipped:
            self.over = True
            self.sender.forget(self)


class FaultySender:
    """The sending end in one life of an instance."""

    def __init__(self, transfers: FaultyTransfers, name: str, host: Host, kv: KvView, report: Report) -> None:
        self.host = host
        self.life = host.lives
        self._transfers = transfers
        self._name = name
        self._kv = kv
        self._report = report
        self._stream = host.world.stream(f"sender {name} life {host.lives}")
        self._outflows: dict[Handover, _Outflow] = {}
        self._dead = False

    @property
    def open(self) -> int:
        return len(self._outflows)

    def read(self, block: int, layer: int) -> bytes:
        begin, end = self._kv.layers[layer]
        return self._kv.pool[block, begin:end].tobytes()

    def forget(self, outflow: _Outflow) -> None:
        if self._outflows.get(outflow.handover) is outflow:
            del self._outflows[outflow.handover]

    # ── orders ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def open_ship(self, handover: Handover, token: bytes, first: int, blocks: Int32s) -> None:
        if handover in self._outflows:
            raise LawBroken(ALIEN_BYTES, f"{handover} is opened twice at {self._name}")
        fate = self._transfers.fate(self._stream, len(blocks) * len(self._kv.layers))
        outflow = _Outflow(self, handover, token, first, blocks.tolist(), fate)
        self._outflows[handover] = outflow
        delay_us = self._transfers.times.delay_us + int(self._stream.random() * self._transfers.times.jitter_us)
        receiver = self._transfers.receiver(handover.peer)
        if receiver is None or fate.refused:
            if fate.refused:
                self.host.world.fire(Fault.KV_REFUSED, self._name)
            self.fail(outflow, "connection refused")
            return
        outflow.receiver = receiver
        self.host.world.after(delay_us, _on, receiver, self._knock, outflow, receiver)
        self.host.after(NOTICED_WITHIN_US, self._give_up, outflow)

    def ship(self, handover: Handover, step: int | None, first: int, upto: int, last: bool) -> None:
        outflow = self._outflows.get(handover)
        if outflow is None or outflow.over:
            return  # it has failed, and the event is on its way to the worker
        layers = len(self._kv.layers)
        outflow.ordered += (upto - first) * layers
        outflow.all_ordered = outflow.all_ordered or last
        if step is None:
            outflow.ready.extend((layer, index) for layer in range(layers) for index in range(first, upto))
            self._pump(outflow)
        elif upto > first:
            outflow.computing.setdefault(step, []).append((first, upto))
        else:
            self._pump(outflow)

    def fence(self, handover: Handover) -> None:
        delay_us = self._transfers.fence_us(self._stream, self._name)
        self.host.after(delay_us, self._fenced, self._outflows.get(handover), handover)

    # ── layers ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def awaits(self, step: int) -> bool:
        return any(step in outflow.computing for outflow in self._outflows.values())

    def layers_us(self, takes_us: int) -> Sequence[int]:
        layers = len(self._kv.layers)
        return [takes_us * (layer + 1) // (layers + 1) for layer in range(layers)]

    def layer_done(self, step: int, layer: int) -> None:
        for outflow in tuple(self._outflows.values()):
            ranges = outflow.computing.get(step)
            if ranges and not outflow.over:
                outflow.ready.extend((layer, index) for first, upto in ranges for index in range(first, upto))
                self._pump(outflow)

    def step_done(self, step: int) -> None:
        for outflow in self._outflows.values():
            outflow.computing.pop(step, None)

    # ── the connection ───────────────────────────────────────────────────────────────────────────────────────────────────

    def fail(self, outflow: _Outflow, reason: str) -> None:
        """Report the failure within 50 ms."""
        if not self._dead:
            self.host.after(self._stream.randrange(NOTICED_WITHIN_US // 4), self._failed, outflow, reason)

    def die(self) -> None:
        """Takers notice within 5 ms, or never: then their leases run out."""
        self._dead = True
        for outflow in self._outflows.values():
            if outflow.inflow is not None and outflow.receiver is not None and not outflow.inflow.over:
                outflow.over = outflow.over or not self._transfers.times.pulls  # mapped memory outlives its process
                if self._stream.random() < 0.5:
                    outflow.receiver.spoil(outflow.inflow, "the giver is gone")
        self._outflows.clear()

    def _knock(self, outflow: _Outflow, receiver: FaultyReceiver) -> None:
        """Present the token at the taker."""
        answered = receiver.connect(outflow)
        self.host.world.after(self._transfers.times.delay_us, _on, self, self._answered, outflow, answered)

    def _answered(self, outflow: _Outflow, connected: bool) -> None:
        outflow.connected = connected
        if connected:
            self._pump(outflow)
        else:
            self._failed(outflow, "nobody expects this connection")

    def _give_up(self, outflow: _Outflow) -> None:
        if not outflow.connected:
            self._failed(outflow, "nobody answers")

    def _failed(self, outflow: _Outflow, reason: str) -> None:
        if not (outflow.over or outflow.shipped):
            outflow.over = True
            self.forget(outflow)
            self._report(ShipFailed(outflow.handover, reason))
        elif outflow.shipped:
            outflow.read_by_nobody()

    def _fenced(self, outflow: _Outflow | None, handover: Handover) -> None:
        if outflow is not None and not outflow.over:
            self._still_as_sent(outflow)
            outflow.over = True
            self.forget(outflow)
            inflow = outflow.inflow
            if inflow is not None and not inflow.over and self._stream.random() < 0.5:
                self._tell_taker(outflow, inflow, "closed by the giver")
        self._report(Fenced(handover))

    def _still_as_sent(self, outflow: _Outflow) -> None:
        """Check that no block was written between its sending and the fence."""
        for (layer, index), check in outflow.sent_checks.items():
            if check != check_of(layer, index, self.read(outflow.blocks[index - outflow.first], layer)):
                raise LawBroken(ALIEN_BYTES, f"{self._name} wrote to block {index} of {outflow.handover} before its fence")

    def _tell_taker(self, outflow: _Outflow, inflow: _Inflow, reason: str) -> None:
        """Report a closed connection to the taker."""
        if outflow.receiver is not None:
            end = outflow.receiver
            self.host.world.after(self._transfers.times.delay_us, _on, end, end.spoil, inflow, reason)

    def _pump(self, outflow: _Outflow) -> None:
        if outflow.over or outflow.busy or not outflow.connected:
            return
        if outflow.ready:
            self._send_some(outflow)
        elif outflow.all_ordered and outflow.sent == outflow.ordered and not outflow.shipped:
            if outflow.sent != len(outflow.blocks) * len(self._kv.layers):
                raise LawBroken(
                    WHOLE_KV, f"{self._name} sends {outflow.sent} pieces of {outflow.handover}, and calls it all"
                )
            outflow.shipped = True
            self._report(Shipped(outflow.handover, b"".join(_CHECK.pack(check) for check in outflow.checks)))
            if not self._transfers.times.pulls or outflow.inflow is None or outflow.inflow.over:
                self.forget(outflow)

    def _send_some(self, outflow: _Outflow) -> None:
        times, fate, pieces = self._transfers.times, outflow.fate, list[Piece]()
        for _ in range(min(len(outflow.ready), times.burst)):
            layer, index = outflow.ready.popleft()
            data = self.read(outflow.blocks[index - outflow.first], layer)
            outflow.sent_checks[layer, index] = check = check_of(layer, index, data)
            outflow.checks[index - outflow.first] ^= check
            number, outflow.sent = outflow.sent, outflow.sent + 1
            if number == fate.breaks_at:
                self._break(outflow)
                return
            if number == fate.stalls_at:
                self.host.world.fire(Fault.KV_STALLED, self._name)
                outflow.not_before_us = self.host.world.now_us + fate.stall_us
            if number == fate.loses_at:
                self.host.world.fire(Fault.KV_LOST, self._name)
                continue
            flip = self._stream.randrange(len(data) * 8) if number == fate.flips_at else None
            if flip is not None:
                self.host.world.fire(Fault.KV_FLIPPED, self._name)
            pieces.append((layer, index, None if times.pulls else data, flip))
        outflow.busy = True
        took_us = times.piece_us * max(1, len(pieces))
        self.host.after(took_us, self._sent_some, outflow)
        receiver, inflow = outflow.receiver, outflow.inflow
        if receiver is not None and inflow is not None:
            arrives_us = self.host.world.now_us + took_us + times.delay_us + int(self._stream.random() * times.jitter_us)
            self.host.world.at(max(arrives_us, outflow.not_before_us), _on, receiver, receiver.land, inflow, pieces)

    def _sent_some(self, outflow: _Outflow) -> None:
        outflow.busy = False
        self._pump(outflow)

    def _break(self, outflow: _Outflow) -> None:
        self.host.world.fire(Fault.KV_BROKEN, self._name)
        outflow.busy = True  # it never continues
        self.fail(outflow, "connection broken")
        if outflow.fate.taker_notices and outflow.inflow is not None:
            self._tell_taker(outflow, outflow.inflow, "connection broken")


def _on(end: FaultyReceiver | FaultySender, act: Callable[..., None], *arguments: object) -> None:
    """Run `act` on the host of this end, if that life has not ended."""
    if end.life == end.host.lives:
        end.host.run(act, *arguments)
