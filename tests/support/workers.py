"""Several Workers that prefill and decode for each other, driven in one thread, messages and bytes moving in any order.

The ways between them are as bad as a test asks for: messages can come twice or late, transfers can fail or be spoilt, bytes
land until a fence is answered, an instance can lose its peer. What a driver must promise (Fenced is always answered, after
it nothing lands) it keeps.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from baton.core.config import DECODE, PREFILL, WorkerConfig
from baton.core.engine.plan import Int32s
from baton.core.engine.worker import Effect
from baton.core.handover.messages import (
    Arriving,
    Expect,
    Fence,
    Fenced,
    Handover,
    Heard,
    OpenShip,
    PeerId,
    PeerLost,
    PeerOpened,
    Ship,
    ShipFailed,
    Shipped,
    Tell,
    TransferBroken,
    Verified,
    Verify,
)
from baton.executor.scripted import ScriptedExecutor
from tests.support.driver import VOCABULARY, Driver, shape_of

LAYERS = 3


@dataclass
class Rates:
    repeated: float = 0.0
    late: float = 0.0
    """Messages that are overtaken by the next one."""
    failed: float = 0.0
    """Ship orders that fail."""
    flipped: float = 0.0
    """Pieces that arrive with another byte."""
    torn: float = 0.0
    """Connections that break while bytes arrive."""


@dataclass
class Incoming:
    """A transfer as D knows it."""

    first: int
    blocks: Int32s
    arrived: set[tuple[int, int]] = field(default_factory=set)
    """(layer, block of the sequence)"""
    checks: bytes | None = None
    fenced: bool = False


@dataclass
class Outgoing:
    """A transfer as P knows it."""

    first: int
    blocks: Int32s
    sent: set[tuple[int, int]] = field(default_factory=set)
    ordered: int = 0
    pieces: int = 0
    last: bool = False
    failed: bool = False


class Node(Driver):
    """A Driver with a name, and with bytes to send or receive."""

    def __init__(self, cluster: Cluster, name: str, config: WorkerConfig) -> None:
        super().__init__(config, ScriptedExecutor(shape_of(config), VOCABULARY, layers=LAYERS))
        self.name = PeerId(name)
        self.cluster = cluster
        self.incoming: dict[Handover, Incoming] = {}
        self.outgoing: dict[Handover, Outgoing] = {}
        self.fenced_out: set[Handover] = set()

    def _take(self, effect: Effect) -> None:
        super()._take(effect)
        match effect:
            case Tell(peer, message):
                self.cluster.post(self, peer, message)
            case Expect(handover, _, first, blocks):
                self.incoming[handover] = Incoming(first, blocks)
            case Verify(handover, checks):
                self.incoming[handover].checks = checks
                self.cluster.later(lambda: self._compare(handover))
            case OpenShip(handover, _, first, blocks):
                self.outgoing[handover] = Outgoing(first, blocks)
            case Ship(handover, step, first, upto, last):
                self.cluster.ship(self, handover, step, range(first, upto), last)
            case Fence(handover):
                self.cluster.later(lambda: self._fence(handover))

    def _fence(self, handover: Handover) -> None:
        self.fenced_out.add(handover)
        if handover in self.incoming:
            self.incoming[handover].fenced = True
        self.send(Fenced(handover))

    def _compare(self, handover: Handover) -> None:
        way = self.incoming[handover]
        if way.fenced or way.checks is None:
            return
        if len(way.arrived) < LAYERS * len(way.blocks):
            self.cluster.later(lambda: self._compare(handover))
        elif self.digest(way.blocks) == way.checks:
            way.fenced = True
            self.send(Verified(handover))
        else:
            self.send(TransferBroken(handover, "checks differ"))

    def digest(self, blocks: Int32s) -> bytes:
        return b"".join(blake2b(self.pool[block].tobytes(), digest_size=8).digest() for block in blocks.tolist())

    @property
    def pool(self) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
        return self.executor.kv.pool


class Cluster:
    def __init__(
        self, seed: int, prefills: list[WorkerConfig], decodes: list[WorkerConfig], rates: Rates | None = None
    ) -> None:
        self.stream = random.Random(seed)
        self.rates = rates or Rates()
        self.now_us = 0
        self.ps = [Node(self, f"p{n}", config) for n, config in enumerate(prefills)]
        self.ds = [Node(self, f"d{n}", config) for n, config in enumerate(decodes)]
        self.nodes = {node.name: node for node in (*self.ps, *self.ds)}
        self._mail: dict[tuple[PeerId, PeerId], list[object]] = {}
        self._acts: list[Callable[[], None]] = []
        self.cut: set[frozenset[PeerId]] = set()
        for p in self.ps:
            for d in self.ds:
                self.join(p, d)

    def join(self, p: Node, d: Node) -> None:
        self.cut.discard(frozenset((p.name, d.name)))
        p.send(PeerOpened(d.name))
        d.send(PeerOpened(p.name))

    def lose(self, p: Node, d: Node) -> None:
        """The session between the two ends; each side hears of it in its own time, and what was on the way is gone."""
        pair = frozenset((p.name, d.name))
        if pair in self.cut:
            return
        self.cut.add(pair)
        self._mail.pop((p.name, d.name), None)
        self._mail.pop((d.name, p.name), None)
        p.send(PeerLost(d.name, "cut"))
        d.send(PeerLost(p.name, "cut"))

    # ── ways ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def post(self, source: Node, target: PeerId, message: object) -> None:
        if frozenset((source.name, target)) in self.cut:
            return
        box = self._mail.setdefault((source.name, target), [])
        at = len(box) - 1 if box and self.stream.random() < self.rates.late else len(box)
        box.insert(at, message)
        if self.stream.random() < self.rates.repeated:
            box.append(message)

    def later(self, act: Callable[[], None]) -> None:
        self._acts.append(act)

    def ship(self, source: Node, handover: Handover, step: int | None, blocks: range, last: bool) -> None:
        way = source.outgoing[handover]
        way.last = last
        if self.stream.random() < self.rates.failed:
            way.failed = True
            self.later(lambda: source.send(ShipFailed(handover, "broken")))
            return
        for block in blocks:
            for layer in range(LAYERS):
                way.pieces += 1
                self.later(lambda layer=layer, block=block: self._move_piece(source, handover, step, layer, block))

    def _move_piece(self, source: Node, handover: Handover, step: int | None, layer: int, block: int) -> None:
        way = source.outgoing[handover]
        if handover in source.fenced_out or way.failed:
            return
        if step is not None and source.in_flight and step >= source.in_flight[0]:
            self.later(lambda: self._move_piece(source, handover, step, layer, block))
            return
        way.sent.add((layer, block))
        begin, end = source.executor.kv.layers[layer]
        piece = source.pool[way.blocks[block - way.first], begin:end].copy()
        self._land(source, handover, layer, block, piece)
        if way.last and len(way.sent) == way.pieces:
            checks = source.digest(way.blocks)
            self.later(lambda: source.send(Shipped(handover, checks)))

    def _land(self, source: Node, handover: Handover, layer: int, block: int, piece: np.ndarray) -> None:
        target = self.nodes[handover.peer]
        theirs = Handover(source.name, handover.request, handover.attempt)
        way = target.incoming.get(theirs)
        if way is None or way.fenced:
            return
        if self.stream.random() < self.rates.torn:
            way.checks = None
            target.send(TransferBroken(theirs, "connection lost"))
            return
        if self.stream.random() < self.rates.flipped:
            piece[0] ^= 1
        begin, end = target.executor.kv.layers[layer]
        target.pool[way.blocks[block - way.first], begin:end] = piece
        way.arrived.add((layer, block))
        target.send(Arriving(theirs))

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def turn(self) -> bool:
        """One thing that can happen, drawn; False when nothing can but the passing of time."""
        choices: list[Callable[[], None]] = []
        for key, box in self._mail.items():
            if box:
                choices.append(lambda key=key: self._deliver(*key))
        if self._acts:
            choices.append(self._act)
        for node in self.nodes.values():
            node.now_us = self.now_us
            if node.is_due:
                choices.append(node.tick)
            elif node.in_flight:
                choices.append(node.settle_one)
        if not choices:
            return False
        self.stream.choice(choices)()
        return True

    def _deliver(self, source: PeerId, target: PeerId) -> None:
        self.nodes[target].send(Heard(source, self._mail[source, target].pop(0)))

    def _act(self) -> None:
        self._acts.pop(self.stream.randrange(len(self._acts)))()

    @property
    def is_idle(self) -> bool:
        return all(node.worker.is_idle for node in self.nodes.values())

    def run(self, turns_max: int = 200_000) -> None:
        for _ in range(turns_max):
            if not self.turn():
                if self.is_idle:
                    return
                due = [at for node in self.nodes.values() if (at := node.worker.next_deadline()) is not None]
                if not due:
                    raise RuntimeError(f"deadlock: {[node.worker.gauges() for node in self.nodes.values()]}")
                self.now_us = max(self.now_us + 1, min(due))
        raise RuntimeError("did not finish")

    def nothing_is_held(self) -> None:
        for node in self.nodes.values():
            gauges = node.worker.gauges()
            blocks = gauges.blocks
            assert (blocks.running, blocks.leased, blocks.receiving) == (0, 0, 0), f"{node.name}: {gauges}"
            assert gauges.running == gauges.waiting == gauges.handovers.open == 0, f"{node.name}: {gauges}"


def prefill_config(**changes: object) -> WorkerConfig:
    return _config(role=PREFILL, **changes)


def decode_config(**changes: object) -> WorkerConfig:
    return _config(role=DECODE, **changes)


def _config(**changes: object) -> WorkerConfig:
    settings: dict[str, object] = {
        "slots": 4, "blocks": 48, "block_size": 4, "context_tokens": 96, "step_tokens": 16, "depth": 2,
    }  # fmt: skip
    return WorkerConfig(**(settings | changes))  # type: ignore[arg-type]
