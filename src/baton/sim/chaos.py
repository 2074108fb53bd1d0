"""Chaos: episodes of faults at times that the seed has drawn, and the healing at the end.

Owns when something happens to which seat. What happens is done by the seat, the network and the disk themselves.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from baton.sim.faults import Fault, Rates
from baton.sim.network import Network
from baton.sim.seats import FRONT, Seat
from baton.sim.world import World


class Chaos:
    def __init__(self, world: World, network: Network, seats: Sequence[Seat], rates: Rates, span_us: int) -> None:
        self._world = world
        self._network = network
        self._seats = seats
        self._rates = rates
        self._span_us = span_us
        self._over = False

    def unleash(self) -> None:
        rates = self._rates
        for kind, times, begin in (
            ("partition", rates.partitions, self._partition),
            ("clog", rates.clogs, self._clog),
            ("crash", rates.crashes, self._crash),
            ("pause", rates.pauses, self._pause),
            ("rolling-restart", rates.rolling_restarts, self._roll),
            ("slow-device", rates.slow_devices, self._slow),
        ):
            for time in range(times):
                stream = self._world.stream(f"chaos {kind} {time}")
                self._world.at(stream.randrange(self._span_us), begin, stream, stream.choice(self._seats))
        for seat in self._seats:
            seat.set_device(disagreement=rates.disagreement)

    def heal(self) -> None:
        """No fault any more: everything that was cut, stopped or slowed is as it was."""
        self._over = True
        self._network.heal()
        for seat in self._seats:
            seat.disk.heal()
            seat.set_device(slowness=1.0, disagreement=0.0)
            if seat.host.paused:
                seat.host.resume()
            seat.boot_if_down()

    def _partition(self, stream: random.Random, seat: Seat) -> None:
        ends = seat.name, f"{FRONT} {seat.counter.number}"
        self._network.cut(*ends)
        self._world.after(stream.randrange(20_000, 600_000), self._network.join, *ends)

    def _clog(self, stream: random.Random, seat: Seat) -> None:
        ends = [seat.name, f"{FRONT} {seat.counter.number}"]
        stream.shuffle(ends)
        self._network.clog(*ends)
        self._world.after(stream.randrange(10_000, 600_000), self._network.clear, *ends)

    def _crash(self, stream: random.Random, seat: Seat) -> None:
        """At any moment, or just when a step is on the device; with last words or without."""
        if self._over or seat.instance is None:
            return
        if stream.random() < 0.5 and not seat.instance.device.in_flight:
            self._world.after(500, self._crash, stream, seat)
            return
        if stream.random() < 0.3:
            seat.fail()
        else:
            self._world.fire(Fault.CRASH, seat.name)
            seat.crash()
        self._world.after(stream.randrange(5_000, 300_000), seat.boot_if_down)

    def _pause(self, stream: random.Random, seat: Seat) -> None:
        if self._over or seat.host.paused or seat.instance is None:
            return
        self._world.fire(Fault.PAUSE, seat.name)
        seat.host.pause()
        self._world.after(stream.randrange(10_000, 1_200_000), self._resume, seat, seat.host.lives)

    def _resume(self, seat: Seat, life: int) -> None:
        if seat.host.paused and seat.host.lives == life:
            seat.host.resume()

    def _roll(self, stream: random.Random, seat: Seat) -> None:
        if self._over or seat.instance is None or not seat.counter.serves:
            return
        seat.counter.drain()
        seat.restart_when_idle(stream.randrange(1_000, 200_000))

    def _slow(self, stream: random.Random, seat: Seat) -> None:
        if self._over:
            return
        self._world.fire(Fault.SLOW_DEVICE, seat.name)
        seat.set_device(slowness=stream.uniform(2, 20))
        self._world.after(stream.randrange(20_000, 400_000), self._hurry, seat)

    def _hurry(self, seat: Seat) -> None:
        seat.set_device(slowness=1.0)
