"""The simulated network between hosts: packets with a delay, and faults.

Owns packets between `send` and their arrival. Without faults, packets of one direction arrive in order after a delay with
jitter. Each direction has its own random stream. Every fault is counted and noted in the story.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.sim.faults import Fault, NetworkRates, flip_bit
from baton.sim.world import Host, World
from baton.wire.link import described

Receive = Callable[[str, bytes], None]

IN_TRANSIT_MAX = 100_000
"""Bound on packets in transit; further ones are dropped."""


@dataclass(slots=True)
class _Direction:
    source: str
    target: str
    stream: random.Random
    last_us: int = 0
    """When the last packet arrives: the next one arrives after it, unless it is reordered."""
    clogged: list[bytes] | None = None
    """Packets that wait while the direction is clogged; None: it is not."""
    cut: bool = False


@dataclass(slots=True)
class _Endpoint:
    host: Host
    life: int
    receive: Receive


@dataclass(slots=True)
class SimulatedNetwork:
    world: World
    rates: NetworkRates
    _endpoints: dict[str, _Endpoint] = field(default_factory=dict)
    _directions: dict[tuple[str, str], _Direction] = field(default_factory=dict)
    _in_transit: int = 0

    def attach(self, name: str, host: Host, receive: Receive) -> None:
        """`receive(sender, packet)` is called for each packet to `name`, as long as this life of the host lasts."""
        self._endpoints[name] = _Endpoint(host, host.lives, receive)

    def send(self, source: str, target: str, packet: bytes) -> None:
        way, rates = self._direction(source, target), self.rates
        draw = way.stream.random
        if way.cut:
            self._fire(Fault.PARTITION, way, packet)
            return
        if rates.loss and draw() < rates.loss:
            self._fire(Fault.LOSS, way, packet)
            return
        if rates.bit_flip and draw() < rates.bit_flip:
            self._fire(Fault.BIT_FLIP, way, packet)
            packet = flip_bit(packet, way.stream.randrange(len(packet) * 8))
        self._carry(way, packet)
        if rates.duplication and draw() < rates.duplication:
            self._fire(Fault.DUPLICATION, way, packet)
            self._carry(way, packet, late_us=int(draw() * rates.late_us))

    def cut(self, source: str, target: str) -> None:
        """Drop all packets of this direction until `heal` or `join`."""
        self._direction(source, target).cut = True

    def join(self, one: str, other: str) -> None:
        """Undo `cut` in both directions."""
        for ends in ((one, other), (other, one)):
            self._direction(*ends).cut = False

    def clog(self, source: str, target: str) -> None:
        """Hold the packets of this direction until it is cleared."""
        way = self._direction(source, target)
        if way.clogged is None:
            way.clogged = []
            self.world.fire(Fault.CLOG, f"{source}→{target}")

    def clear(self, source: str, target: str) -> None:
        way = self._direction(source, target)
        waiting, way.clogged = way.clogged, None
        for packet in waiting or ():
            self._carry(way, packet)

    def heal(self) -> None:
        self.rates = NetworkRates(delay_us=self.rates.delay_us)
        for way in self._directions.values():
            way.cut = False
            if way.clogged is not None:
                self.clear(way.source, way.target)

    def _direction(self, source: str, target: str) -> _Direction:
        way = self._directions.get((source, target))
        if way is None:
            way = _Direction(source, target, self.world.stream(f"network {source}→{target}"))
            self._directions[source, target] = way
        return way

    def _carry(self, way: _Direction, packet: bytes, late_us: int = 0) -> None:
        if way.clogged is not None:
            if len(way.clogged) < IN_TRANSIT_MAX:
                way.clogged.append(packet)
            return
        if self._in_transit >= IN_TRANSIT_MAX:
            return  # as a network router with full queues does
        rates, draw = self.rates, way.stream.random
        arrives_us = self.world.now_us + late_us + rates.delay_us + int(draw() * rates.jitter_us)
        if rates.spike and draw() < rates.spike:
            arrives_us += int(draw() * rates.spike_us)
            self._fire(Fault.DELAY, way, packet)
        if rates.reordering and draw() < rates.reordering:
            arrives_us += int(draw() * rates.late_us)
            self._fire(Fault.REORDERING, way, packet)
        elif not late_us:
            arrives_us = way.last_us = max(arrives_us, way.last_us)
        self._in_transit += 1
        self.world.at(arrives_us, self._arrive, way, packet)

    def _fire(self, fault: Fault, way: _Direction, packet: bytes) -> None:
        where = f"{way.source}→{way.target} {described(packet)}" if self.world.keeps_notes else way.source
        self.world.fire(fault, where)

    def _arrive(self, way: _Direction, packet: bytes) -> None:
        self._in_transit -= 1
        end = self._endpoints.get(way.target)
        if end is not None and end.life == end.host.lives:
            end.host.run(end.receive, way.source, packet)
