"""Injects faults of worlds with a router, beyond `fault_injector`: its crashes and pauses, drains, old lives, forged frames.

Owns when a fault hits which process. The hosts and `zombies` carry it out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from baton.core.routing.events import Join
from baton.sim.faults import Fault, FaultRates, log_uniform_us
from baton.sim.instance_front_end import ROUTER, join_of
from baton.sim.instance_host import InstanceHost
from baton.sim.law_names import FENCED, LawBroken
from baton.sim.lines import Lines
from baton.sim.router_host import RouterHost
from baton.sim.world import World
from baton.sim.zombies import ZombieInstance, forged, forged_by_a_member
from baton.wire.instance_sessions import InstanceSessions, SessionEffects

BY_MEMBER_SHARE = 0.3
BY_ROUTER_SHARE = 0.5
"""Share of drains ordered at the router; the others are ordered at the instance."""
NOTICED_US = 1_000
"""Time within which a connection reset arrives after a crash."""


class RouterFaults:
    def __init__(
        self, world: World, lines: Lines, gate: RouterHost, seats: Sequence[InstanceHost], rates: FaultRates, span_us: int
    ) -> None:
        self._world = world
        self._lines = lines
        self._gate = gate
        self._seats = seats
        self._rates = rates
        self._span_us = span_us
        self._over = False
        self._old_lives: list[ZombieInstance] = []
        self._resets = world.stream("upheaval resets")
        self._downs = world.stream("upheaval downs")
        for seat in seats:
            seat.when_told = self._told
            seat.when_cut_off = self._cut_off

    def unleash(self) -> None:
        rates = self._rates
        kinds: tuple[tuple[str, int, Callable[[random.Random, InstanceHost], None]], ...] = (
            ("router-crash", rates.router_crashes, self._crash_gate),
            ("router-pause", rates.router_pauses, self._pause_gate),
            ("old-life", rates.old_lives, self._old_life),
            ("drain", rates.drains, self._drain),
            ("engine-stall", rates.engine_stalls, self._stall),
            ("forgery", rates.forgeries, self._forge),
        )
        for kind, times, begin in kinds:
            for time in range(times):
                stream = self._world.stream(f"upheaval {kind} {time}")
                self._world.at(stream.randrange(self._span_us), begin, stream, stream.choice(self._seats))

    def boot(self) -> None:
        """Start all instances; one of them may start later, under load."""
        late = self._seats[-1] if self._rates.late_joins and len(self._seats) > 1 else None
        for seat in self._seats:
            if seat is late:
                stream = self._world.stream("upheaval late-join")
                self._world.at(stream.randrange(self._span_us // 2), self._join_late, seat)
            else:
                seat.boot()

    def relays(self) -> list[InstanceSessions]:
        return [old.relay for old in self._old_lives]

    def heal(self) -> None:
        self._over = True
        for old in self._old_lives:
            old.stop()
        if self._gate.host.paused:
            self._wake_gate()
        self._gate.boot_if_down()

    # ── instances ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _join_late(self, seat: InstanceHost) -> None:
        if seat.instance is None and not self._over:
            self._world.fire(Fault.LATE_JOIN, seat.name)
            seat.boot()

    def _told(self, seat: InstanceHost, out: SessionEffects) -> None:
        if out.fenced is not None:
            raise LawBroken(FENCED, f"{seat.name} was fenced, and no later life of it has ever been: {out.fenced}")
        if out.drain:
            self._world.fire(Fault.DRAINED, seat.name)
            seat.restart_when_idle(self._downs.randrange(1_000, 200_000))

    def _drain(self, stream: random.Random, seat: InstanceHost) -> None:
        if self._over or seat.member is None or not seat.member.serves or seat.member.drains:
            return
        if stream.random() < BY_ROUTER_SHARE:
            self._gate.host.run(self._gate.drain, seat.name)
        elif not seat.host.paused:
            self._world.fire(Fault.LEFT, seat.name)
            seat.leave()
            seat.restart_when_idle(stream.randrange(1_000, 200_000))

    def _stall(self, stream: random.Random, seat: InstanceHost) -> None:
        if self._over or seat.host.paused or seat.instance is None or seat.member is None:
            return
        self._world.fire(Fault.ENGINE_STALL, seat.name)
        seat.stall()
        self._world.after(log_uniform_us(stream, 20_000, 1_800_000), self._wake, seat, seat.host.lives)

    def _wake(self, seat: InstanceHost, life: int) -> None:
        if seat.host.paused and seat.host.lives == life:
            seat.resume()

    def _cut_off(self, seat: InstanceHost, session: int | None) -> None:
        """An instance crashed. If its machine is up, the router gets a connection reset."""
        if not self._over and self._resets.random() < self._rates.resets and session is not None:
            self._gate.host.after(self._resets.randrange(NOTICED_US), self._reset_door, seat.number, session)

    def _reset_door(self, number: int, session: int) -> None:
        door = self._gate.doors[number]
        if door.session is not None and door.line.session == session:
            self._world.fire(Fault.RESET, ROUTER)
        door.line.reset(session, "connection reset")

    # ── the router ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _crash_gate(self, stream: random.Random, _seat: InstanceHost) -> None:
        if self._over or not self._gate.host.up:
            return
        self._world.fire(Fault.ROUTER_CRASH, ROUTER)
        down_us = log_uniform_us(stream, 300, 600_000)
        tells = stream.random() < self._rates.resets
        for seat in self._seats:
            seat.trouble(down_us, of_router=True)
            if tells and seat.member is not None and seat.line is not None:
                session = seat.line.session
                seat.front.after(stream.randrange(NOTICED_US), seat.line.reset, session, "connection reset")
        self._gate.crash()
        self._world.after(down_us, self._gate.boot_if_down)

    def _pause_gate(self, stream: random.Random, _seat: InstanceHost) -> None:
        if self._over or self._gate.host.paused or not self._gate.host.up:
            return
        self._world.fire(Fault.ROUTER_PAUSE, ROUTER)
        self._gate.host.pause()
        lasts_us = stream.randrange(10_000, 1_300_000)
        for seat in self._seats:
            seat.trouble(lasts_us, of_router=True)
        self._world.after(lasts_us, self._wake_gate)

    def _wake_gate(self) -> None:
        if self._gate.host.paused:
            for seat in self._seats:
                seat.trouble(of_router=True)
            self._gate.wake()

    # ── old lives and forged frames ──────────────────────────────────────────────────────────────────────────────────────

    def _old_life(self, stream: random.Random, seat: InstanceHost) -> None:
        """Start an old life while the present one is a member, or while the router is down, so that it may join first."""
        join = self._join_of(seat)
        known = seat.member is not None and seat.member.serves
        if self._over or join is None or (self._gate.host.up and not known):
            return
        number = len(self._seats) + len(self._old_lives)
        old = ZombieInstance(self._world, self._lines, self._gate, _before(join, stream.random() < 0.5), number)
        self._old_lives.append(old)
        old.come_back()

    def _forge(self, stream: random.Random, seat: InstanceHost) -> None:
        join, door = self._join_of(seat), self._gate.doors[seat.number]
        if self._over or join is None or seat.member is None or not seat.member.serves or door.session is None:
            return
        if stream.random() < BY_MEMBER_SHARE:
            seat.trouble()
            self._gate.host.run(self._forge_as_member, stream, seat)
        else:
            self._gate.host.run(self._forge_as_stranger, seat.name, forged(stream, join))

    def _forge_as_member(self, stream: random.Random, seat: InstanceHost) -> None:
        door = self._gate.doors[seat.number]
        if door.session is not None and self._gate.knows(seat.name):
            self._world.fire(Fault.FORGED_BY_MEMBER, seat.name)
            self._gate.forged_by_member(door, forged_by_a_member(stream))

    def _forge_as_stranger(self, name: str, frames: list[bytes]) -> None:
        if self._gate.knows(name):
            self._world.fire(Fault.FORGED, ROUTER)
            self._gate.strangers(frames)

    def _join_of(self, seat: InstanceHost) -> Join | None:
        life = seat.instance
        return None if life is None or life.worker is None else join_of(life, seat.role)


def _before(join: Join, draining: bool) -> Join:
    return Join(
        join.name, 1, join.role, join.fingerprint, "", "", join.slots, join.blocks, join.block_size, join.context_tokens,
        join.vocabulary, 0, draining,
    )  # fmt: skip
