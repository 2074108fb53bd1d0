"""Injects faults of worlds with a router, beyond `fault_injector`: its crashes and pauses, drains, old lives, forged frames.

Owns when a fault hits which process. The hosts and `zombies` carry it out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from baton.core.engine.progress_watch import SILENT_US, STALL_STEPS
from baton.core.routing.events import Join, Session
from baton.sim.faults import Fault, FaultRates, log_uniform_us
from baton.sim.instance import SimulatedInstance
from baton.sim.instance_front_end import ROUTER, SEEN_WITHIN_US, join_of
from baton.sim.instance_host import InstanceHost
from baton.sim.law_names import FENCED, FENCED_ONCE, HEARS_IN_TIME, LawBroken
from baton.sim.lines import Lines
from baton.sim.network import SimulatedNetwork
from baton.sim.router_host import RouterHost
from baton.sim.world import World
from baton.sim.zombies import KnownStranger, ZombieInstance, forged, forged_by_a_member
from baton.wire.instance_sessions import InstanceSessions, SessionEffects

BY_MEMBER_SHARE = 0.3
BY_ROUTER_SHARE = 0.5
"""Share of drains ordered at the router; the others are ordered at the instance."""
FOR_GOOD_SHARE = 0.3
"""Share of stopped engines that never go on."""
HANG_US_MAX = 2_500_000
HEARS_WITHIN_US = 500_000
"""Allowance beyond the router's limit and two heartbeats until it has noticed that an instance does not hear it."""
CLOCK_TICKS, CLOCK_BACK_TICKS = 1_000, 1_300
"""A clock that is set back once is before the start of the former life, and after nothing that a router has invented."""


class RouterFaults:
    def __init__(
        self,
        world: World,
        lines: Lines,
        router_host: RouterHost,
        nodes: Sequence[InstanceHost],
        rates: FaultRates,
        span_us: int,
        network: SimulatedNetwork,
    ) -> None:
        self._world = world
        self._lines = lines
        self._network = network
        self._router_host = router_host
        self._nodes = nodes
        self._rates = rates
        self._span_us = span_us
        self._over = False
        self._old_lives: list[ZombieInstance] = []
        self._forgers = 0
        self._downs = world.stream("upheaval downs")
        self._exceeded: set[tuple[str, int, int]] = set()
        self._welcomed: set[tuple[str, int, int]] = set()
        """Lives of front ends that a router has welcomed."""
        """Lives of instances, by name, number and life of the router, that have taken a higher incarnation."""
        for node in nodes:
            node.when_told = self._told
            node.clock_ticks = CLOCK_TICKS if rates.clock_steps else 1

    def unleash(self) -> None:
        rates = self._rates
        kinds: tuple[tuple[str, int, Callable[[random.Random, InstanceHost], None]], ...] = (
            ("router-crash", rates.router_crashes, self._crash_router),
            ("router-pause", rates.router_pauses, self._pause_router),
            ("old-life", rates.old_lives, self._old_life),
            ("drain", rates.drains, self._drain),
            ("engine-stall", rates.engine_stalls, self._stall),
            ("engine-hang", rates.engine_hangs, self._hang),
            ("busy-machine", rates.busy_spells, self._starve),
            ("front-crash", rates.front_crashes, self._crash_front),
            ("forgery", rates.forgeries, self._forge),
            ("one-way", rates.swallowings, self._swallow),
            ("lost-order", rates.lost_orders, self._lose_order),
            ("clock-back", rates.clock_steps, self._set_clock_back),
        )
        for kind, times, begin in kinds:
            for time in range(times):
                stream = self._world.stream(f"upheaval {kind} {time}")
                self._world.at(stream.randrange(self._span_us), begin, stream, stream.choice(self._nodes))

    def boot(self) -> None:
        """Start all instances; one of them may start later, under load."""
        late = self._nodes[-1] if self._rates.late_joins and len(self._nodes) > 1 else None
        for node in self._nodes:
            if node is late:
                stream = self._world.stream("upheaval late-join")
                self._world.at(stream.randrange(self._span_us // 2), self._join_late, node)
            else:
                node.boot()

    def instance_sessions(self) -> list[InstanceSessions]:
        return [old.sessions for old in self._old_lives]

    def heal(self) -> None:
        self._over = True
        for node in self._nodes:
            if node.instance is not None:
                node.instance.device.heal()
            if node.front_end is not None:
                node.front_end.when_order_lost = None
        for old in self._old_lives:
            old.stop()
        if self._router_host.host.paused:
            self._wake_router()
        self._router_host.boot_if_down()

    # ── instances ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _join_late(self, node: InstanceHost) -> None:
        if node.instance is None and not self._over:
            self._world.fire(Fault.LATE_JOIN, node.name)
            node.boot()

    def _told(self, node: InstanceHost, out: SessionEffects) -> None:
        if out.welcomed is not None:
            self._welcomed.add((node.name, node.host.lives, node.front.lives))
        if out.fenced is not None:
            self._fenced(node, out.fenced)
            return
        if out.rejoins_as is not None:
            self._joins_above(node, out.rejoins_as)
        if out.drain:
            self._world.fire(Fault.DRAINED, node.name)
            node.restart_when_idle(self._downs.randrange(1_000, 200_000))

    def _fenced(self, node: InstanceHost, reason: str) -> None:
        """A member, by the late Join of a former life, whose clock was ahead. The process ends, and is started again."""
        was_welcomed = (node.name, node.host.lives, node.front.lives) in self._welcomed
        if not (node.clock_back_ticks and was_welcomed):
            raise LawBroken(FENCED, f"{node.name} was fenced, and no later life of it has ever been: {reason}")
        node.crash()
        self._world.after(self._downs.randrange(1_000, 200_000), node.boot_if_down)

    def _joins_above(self, node: InstanceHost, incarnation: int) -> None:
        self._world.fire(Fault.CLOCK_BACK, node.name)
        life = node.name, node.host.lives, self._router_host.host.lives
        if life in self._exceeded:
            raise LawBroken(FENCED_ONCE, f"{node.name} was turned away again, and joins as incarnation {incarnation}")
        self._exceeded.add(life)

    def _set_clock_back(self, stream: random.Random, node: InstanceHost) -> None:
        """The instance crashes, and starts again with a clock that is before its former start."""
        if self._over or node.instance is None or node.host.paused:
            return
        node.clock_back_ticks += CLOCK_BACK_TICKS
        node.crash()
        self._world.after(log_uniform_us(stream, 300, 300_000), node.boot_if_down)

    # ── one direction ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _swallow(self, _stream: random.Random, node: InstanceHost) -> None:
        """Somebody in between swallows what the router says to this instance, until that connection ends."""
        connection = self._router_host.connection_of(node.name)
        if self._over or connection is None or node.front_end is None or not node.front_end.serves:
            return
        config = self._router_host.config
        within_us = config.deaf_us + 2 * config.beat_us + HEARS_WITHIN_US
        node.trouble(within_us)
        front, router = node.ends
        self._network.swallow(router, front)
        self._world.after(within_us, self._deafness_noticed, node, connection.session, self._world.now_us)

    def _deafness_noticed(self, node: InstanceHost, session: Session | None, since_us: int) -> None:
        """Law: the router has given up this session, unless one of the two stood still meanwhile."""
        connection, router_host = self._router_host.connection_of(node.name), self._router_host
        if connection is None or connection.session != session:
            return
        stood_still = node.front.paused or (node.instance is not None and node.instance.hindered_us > since_us)
        if not (stood_still or router_host.host.paused or router_host.disturbed_us > since_us):
            raise LawBroken(HEARS_IN_TIME, f"{node.name} hears nothing since {since_us}, and is still a member")

    def _lose_order(self, _stream: random.Random, node: InstanceHost) -> None:
        """The next leg that comes there is lost. Only where its client need not wait for long."""
        life, front_end = node.instance, node.front_end
        if self._over or life is None or front_end is None or not front_end.serves:
            return
        if _step_limit_us(life) + SEEN_WITHIN_US <= HANG_US_MAX:
            front_end.when_order_lost = lambda: self._world.fire(Fault.ORDER_LOST, node.name)

    # ── draining and standing still ──────────────────────────────────────────────────────────────────────────────────────

    def _drain(self, stream: random.Random, node: InstanceHost) -> None:
        if self._over or node.front_end is None or not node.front_end.serves or node.front_end.drains:
            return
        if stream.random() < BY_ROUTER_SHARE:
            self._router_host.host.run(self._router_host.drain, node.name)
        elif not node.host.paused:
            self._world.fire(Fault.LEFT, node.name)
            node.leave()
            node.restart_when_idle(stream.randrange(1_000, 200_000))

    def _stall(self, stream: random.Random, node: InstanceHost) -> None:
        if self._over or node.host.paused or node.instance is None or node.front_end is None:
            return
        self._world.fire(Fault.ENGINE_STALL, node.name)
        node.stall()
        lasts_us = log_uniform_us(stream, 20_000, 1_800_000)
        if stream.random() < FOR_GOOD_SHARE and node.front_end.progress.is_watching:
            node.stopped_for_good, node.stopped_us = True, self._world.now_us
            within_us = SILENT_US + SEEN_WITHIN_US
            self._world.after(within_us, node.seen_to_hang, node.instance, self._world.now_us, within_us)
        else:
            self._world.after(lasts_us, self._wake, node, node.host.lives)

    def _starve(self, stream: random.Random, node: InstanceHost) -> None:
        """Its engine does not get a core for a while: it is late, and nobody may suspect it for that."""
        if self._over or node.host.paused or node.instance is None or node.front_end is None:
            return
        self._world.fire(Fault.ENGINE_LATE, node.name)
        node.starve()
        self._world.after(log_uniform_us(stream, 20_000, 2_000_000), self._wake, node, node.host.lives)

    def _hang(self, _stream: random.Random, node: InstanceHost) -> None:
        """From now on no step of this life ends. Only where that is seen before a client's wait looks like a deadlock."""
        life = node.instance
        if (
            self._over
            or life is None
            or life.worker is None
            or node.front_end is None
            or not node.front_end.progress.is_watching
        ):
            return
        if _step_limit_us(life) + SEEN_WITHIN_US <= HANG_US_MAX and not life.device.hangs:
            life.device.hangs = True
            life.device.when_hung = lambda: self._hung(node, life)

    def _hung(self, node: InstanceHost, life: SimulatedInstance) -> None:
        within_us = _step_limit_us(life) + SEEN_WITHIN_US  # steps may have become longer since it was to hang
        self._world.after(within_us, node.seen_to_hang, life, self._world.now_us, within_us)

    def _crash_front(self, stream: random.Random, node: InstanceHost) -> None:
        """The front end dies, and its engine with it: at once where the kernel ends it, else when it notices."""
        if self._over or node.instance is None or node.instance.worker is None or node.front_end is None or node.host.paused:
            return
        self._world.fire(Fault.FRONT_CRASH, node.name)
        alone_us, down_us = stream.choice((0, 100, stream.randrange(100_000))), log_uniform_us(stream, 300, 300_000)
        node.crash_front(alone_us)
        self._world.after(alone_us, self._end_engine, node, node.host.lives, down_us)

    def _end_engine(self, node: InstanceHost, life: int, down_us: int) -> None:
        if node.host.lives == life:
            node.crash()
            self._world.after(down_us, node.boot_if_down)

    def _wake(self, node: InstanceHost, life: int) -> None:
        if node.host.paused and node.host.lives == life:
            node.resume()

    # ── the router ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _crash_router(self, stream: random.Random, _node: InstanceHost) -> None:
        if self._over or not self._router_host.host.up:
            return
        self._world.fire(Fault.ROUTER_CRASH, ROUTER)
        down_us = log_uniform_us(stream, 300, 600_000)
        for node in self._nodes:
            node.trouble(down_us, of_router=True)
        self._router_host.crash()
        self._world.after(down_us, self._router_host.boot_if_down)

    def _pause_router(self, stream: random.Random, _node: InstanceHost) -> None:
        if self._over or self._router_host.host.paused or not self._router_host.host.up:
            return
        self._world.fire(Fault.ROUTER_PAUSE, ROUTER)
        self._router_host.host.pause()
        lasts_us = stream.randrange(10_000, 1_300_000)
        for node in self._nodes:
            node.trouble(lasts_us, of_router=True)
        self._world.after(lasts_us, self._wake_router)

    def _wake_router(self) -> None:
        if self._router_host.host.paused:
            for node in self._nodes:
                node.trouble(of_router=True)
            self._router_host.wake()

    # ── old lives and forged frames ──────────────────────────────────────────────────────────────────────────────────────

    def _old_life(self, stream: random.Random, node: InstanceHost) -> None:
        """Start an old life while the present one is a member, or while the router is down, so that it may join first."""
        join = self._join_of(node)
        known = node.front_end is not None and node.front_end.serves
        if self._over or join is None or (self._router_host.host.up and not known):
            return
        number = len(self._nodes) + len(self._old_lives)
        old = ZombieInstance(self._world, self._lines, self._router_host, _before(join, stream.random() < 0.5), number)
        self._old_lives.append(old)
        old.come_back()

    def _forge(self, stream: random.Random, node: InstanceHost) -> None:
        join = self._join_of(node)
        if self._over or join is None or node.front_end is None or not node.front_end.serves or node.front.paused:
            return
        if self._router_host.connection_of(node.name) is None:
            return
        if stream.random() < BY_MEMBER_SHARE:
            node.trouble()
            frame = forged_by_a_member(stream)
            self._world.fire(Fault.FORGED_BY_MEMBER, node.name)
            self._router_host.forged.add((node.front_end.line.session, frame))
            node.front_end.line.send(frame)
        else:
            self._world.fire(Fault.FORGED, ROUTER)
            self._forgers += 1
            KnownStranger(self._world, self._lines, f"stranger with the key {self._forgers}", forged(stream, join))

    def _join_of(self, node: InstanceHost) -> Join | None:
        life = node.instance
        return None if life is None or life.worker is None else join_of(life, node.role)


def _before(join: Join, draining: bool) -> Join:
    return Join(
        join.name, 1, join.role, join.fingerprint, "", "", join.slots, join.blocks, join.block_size, join.context_tokens,
        join.vocabulary, 0, draining,
    )  # fmt: skip


def _step_limit_us(life: SimulatedInstance) -> int:
    """The limit that a front end which has heard of all its engine's steps has for one of them."""
    return max(life.spec.stall_us, STALL_STEPS * max(life.spec.tried_step_us, life.device.longest_us))
