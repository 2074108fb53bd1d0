"""What peers order of each other, carried out on a network without faults: messages, and KV that leaves layer by layer.

Owns how long KV is on its way. Decides nothing: every message and every piece goes where a worker has ordered it.

    one lane out of and one into each instance, first come first served, `lane_bytes_per_s` each way
    a step's KV leaves as the step computes it: layer l of L is ready when (l + 1) / L of the step's time is over
    a piece takes the sender's lane, then the receiver's, then `delay_us`; blocks travel whole
    messages, as bytes, take `delay_us`, in order, and no bandwidth; opening a connection, checksums and fences take no time

So with lanes that are faster than KV is computed, about one layer of the last chunk is left when a prefill ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from baton.core.handover.messages import (
    Arriving,
    AttemptFailed,
    Expect,
    Fence,
    Fenced,
    Handover,
    HandoverMade,
    Heard,
    OpenShip,
    PeerEffect,
    PeerEvent,
    PeerId,
    PeerMessage,
    PeerOpened,
    Ship,
    Shipped,
    Tell,
    ToGiver,
    Verified,
    Verify,
)
from baton.sim.world import Host
from baton.wire.peer_messages import decode_to_giver, decode_to_taker, encode_peer

ARRIVING_EVERY_US = 200_000
"""How often a receiver is told that bytes still come."""
TO_GIVER = get_args(ToGiver)
NO_CHECKS = b""
"""Nothing is flipped here, and nothing is compared."""


@dataclass(frozen=True, slots=True)
class Road:
    """What KV is like, and how it travels."""

    layers: int
    block_bytes: int
    """All layers."""
    lane_bytes_per_s: float
    delay_us: int


class Lane:
    """One direction of an instance's network card."""

    def __init__(self, bytes_per_s: float) -> None:
        self._us_a_byte = 1e6 / bytes_per_s
        self._free_us = 0.0
        self.bytes = 0.0
        self.busy_us = 0.0

    def carry(self, from_us: float, size: float) -> float:
        """When a piece that is there at `from_us` has passed."""
        took_us = size * self._us_a_byte
        self._free_us = max(from_us, self._free_us) + took_us
        self.bytes += size
        self.busy_us += took_us
        return self._free_us


@dataclass(slots=True)
class _Arrival:
    """What one hand-over still lacks at its taker."""

    missing: int
    """Blocks."""
    asked: bool = False
    told_us: int = -ARRIVING_EVERY_US


class Carrier:
    """One instance's side of all its hand-overs."""

    def __init__(self, host: Host, name: PeerId, road: Road, tell: Callable[[PeerEvent], None]) -> None:
        self.name = name
        self.out, self.into = Lane(road.lane_bytes_per_s), Lane(road.lane_bytes_per_s)
        self.took_us: list[int] = []
        """Of hand-overs that were adopted here."""
        self.failures: list[AttemptFailed] = []
        self._host = host
        self._road = road
        self._tell = tell
        self._peers: dict[PeerId, Carrier] = {}
        self._open: set[Handover] = set()
        """Those whose KV leaves from here."""
        self._ships: dict[int, list[Ship]] = defaultdict(list)
        """By the step that will compute them."""
        self._arrivals: dict[Handover, _Arrival] = {}

    def meet(self, peer: Carrier) -> None:
        self._peers[peer.name] = peer
        self._tell(PeerOpened(peer.name))

    def carry(self, effect: PeerEffect) -> None:
        match effect:
            case Tell(peer, message):
                other = self._peers[peer]
                other._host.after(self._road.delay_us, other._hear, self.name, encode_peer(message), type(message))
            case Expect(handover=handover, blocks=blocks):
                self._arrivals[handover] = _Arrival(len(blocks))
            case Verify(handover=handover):
                self._arrivals[handover].asked = True
                self._look_at(handover)
            case OpenShip(handover=handover):
                self._open.add(handover)
            case Ship(step=step):
                if step is None:
                    self._send(effect, self._road.layers, begins=True, ends=True)
                else:
                    self._ships[step].append(effect)
            case Fence(handover):
                self._open.discard(handover)
                self._arrivals.pop(handover, None)
                self._host.after(0, self._tell, Fenced(handover))
            case AttemptFailed():
                self.failures.append(effect)
            case HandoverMade(took_us=took_us):
                self.took_us.append(took_us)

    def _hear(self, peer: PeerId, frame: bytes, kind: type[PeerMessage]) -> None:
        decode = decode_to_giver if kind in TO_GIVER else decode_to_taker
        self._tell(Heard(peer, decode(frame)))

    # ── out ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def launched(self, step: int, begin_us: int, end_us: int) -> None:
        """When a step will run; what was ordered with it leaves meanwhile."""
        ships = self._ships.pop(step, None)
        if ships is None:
            return
        layers = self._road.layers
        for layer in range(layers):
            self._host.at(begin_us + (end_us - begin_us) * (layer + 1) // layers, self._layer_done, ships, layer)

    def _layer_done(self, ships: list[Ship], layer: int) -> None:
        for ship in ships:
            self._send(ship, 1, begins=layer == 0, ends=layer == self._road.layers - 1)

    def _send(self, ship: Ship, layers: int, *, begins: bool, ends: bool) -> None:
        """So many layers of it, the first or last ones among them or not."""
        handover, road = ship.handover, self._road
        if handover not in self._open:
            return
        blocks, taker = ship.upto - ship.first, self._peers[handover.peer]
        size = blocks * road.block_bytes * layers / road.layers
        left_us = self.out.carry(self._host.world.now_us, size)
        landed_us = taker.into.carry(left_us - size * 1e6 / road.lane_bytes_per_s, size) + road.delay_us
        theirs = handover._replace(peer=self.name)
        if begins and blocks:
            taker._host.at(round(landed_us), taker._coming, theirs)
        if ends:
            taker._host.at(round(landed_us), taker._landed, theirs, blocks)
            if ship.last:
                self._host.at(round(left_us), self._shipped, handover)

    def _shipped(self, handover: Handover) -> None:
        if handover in self._open:
            self._open.remove(handover)
            self._tell(Shipped(handover, NO_CHECKS))

    # ── into ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _coming(self, handover: Handover) -> None:
        arrival, now_us = self._arrivals.get(handover), self._host.world.now_us
        if arrival is not None and now_us - arrival.told_us >= ARRIVING_EVERY_US:
            arrival.told_us = now_us
            self._tell(Arriving(handover))

    def _landed(self, handover: Handover, blocks: int) -> None:
        arrival = self._arrivals.get(handover)
        if arrival is not None:
            arrival.missing -= blocks
            self._look_at(handover)

    def _look_at(self, handover: Handover) -> None:
        arrival = self._arrivals[handover]
        if arrival.asked and not arrival.missing:
            del self._arrivals[handover]
            self._host.after(0, self._tell, Verified(handover))
