"""Injects faults at times drawn from the seed, and ends all faults at the end of a world.

Owns when a fault hits which instance. The instance hosts, the network and the disks carry it out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.sim.faults import Fault, FaultRates, log_uniform_us
from baton.sim.faulty_transfers import FaultyTransfers
from baton.sim.instance import SimulatedInstance
from baton.sim.instance_host import FRONT, InstanceHost
from baton.sim.network import SimulatedNetwork
from baton.sim.simulated_peers import listening_name
from baton.sim.storage_copies import StorageModel
from baton.sim.store import SimulatedStore
from baton.sim.story import PEER_STEPS
from baton.sim.strangers import send_stranger
from baton.sim.world import Host, World

MOMENT_EVERY_US = 300
OPENING_CRASH_SHARE = 0.15
PEER_STALL_SHARE = 0.4

STEP_LAST = 6
"""A fault at a hand-over step hits one of the first 6 times that the step is taken."""

MOMENTS: tuple[Callable[[SimulatedInstance], bool], ...] = (
    lambda _life: True,
    lambda life: life.device.in_flight > 0,
    lambda life: life.device.in_flight > 0 and life.last_plan is not None and bool(life.last_plan.chunks),
    lambda life: life.device.in_flight > 0 and life.last_plan is not None and bool(life.last_plan.stops),
)
"""Any moment; a step in flight; a step that prefills; a step with an order to stop or to yield."""


@dataclass(slots=True)
class _Aim:
    """A crash or pause when a hand-over step has been taken `left` more times."""

    step: str
    left: int
    stream: random.Random
    pauses: bool


class FaultInjector:
    def __init__(
        self,
        world: World,
        network: SimulatedNetwork,
        front: Host,
        nodes: Sequence[InstanceHost],
        rates: FaultRates,
        span_us: int,
        key: bytes,
        transfers: FaultyTransfers | None = None,
        storage_model: StorageModel | None = None,
    ) -> None:
        self._world = world
        self._network = network
        self._front = front
        self._nodes = nodes
        self._openings = world.stream("chaos openings")
        self._rates = rates
        self._span_us = span_us
        self._over = False
        self._key = key
        self._strangers = 0
        if rates.strangers:
            network.recorded = {}
        self._transfers = transfers
        self._storage_model = storage_model
        self._pairs = [(node, peer) for node in nodes for peer in node.peers if node.role.takes]
        self._aims: list[_Aim] = []

    def unleash(self) -> None:
        rates = self._rates
        for kind, times, begin in (
            ("partition", rates.partitions, self._partition),
            ("stall", rates.stalls, self._stall),
            ("stranger", rates.strangers, self._come_as_stranger),
            ("crash", rates.crashes, self._crash),
            ("pause", rates.pauses, self._pause),
            ("front-pause", rates.front_pauses, self._pause_front),
            ("rolling-restart", rates.rolling_restarts, self._roll),
            ("slow-device", rates.slow_devices, self._slow),
        ):
            for time in range(times):
                stream = self._world.stream(f"chaos {kind} {time}")
                self._world.at(stream.randrange(self._span_us), begin, stream, stream.choice(self._nodes))
        if self._pairs:
            self._unleash_on_peers()
        if self._storage_model is not None and self._storage_model.store is not None:
            self._unleash_on_store(self._storage_model.store)
        for node in self._nodes:
            node.set_device(disagreement=rates.disagreement)
            node.when_opened = self._crash_at_opening if rates.crashes else None

    def _unleash_on_peers(self) -> None:
        rates = self._rates
        for time in range(rates.peer_partitions):
            stream = self._world.stream(f"chaos peer-partition {time}")
            self._world.at(stream.randrange(self._span_us), self._part, stream, *stream.choice(self._pairs))
        for kind, times, pauses in (("step-crash", rates.step_crashes, False), ("step-pause", rates.step_pauses, True)):
            for time in range(times):
                stream = self._world.stream(f"chaos {kind} {time}")
                self._aims.append(_Aim(stream.choice(PEER_STEPS), stream.randint(1, STEP_LAST), stream, pauses))
        if self._aims:
            for node in self._nodes:
                node.at_step = self._step_taken

    def _unleash_on_store(self, store: SimulatedStore) -> None:
        rates, world = self._rates, self._world
        for time in range(rates.store_absences):
            stream = world.stream(f"chaos store-away {time}")
            world.at(stream.randrange(self._span_us), store.go_away, stream)
        for time in range(rates.store_wipes):
            world.at(world.stream(f"chaos store-wipe {time}").randrange(self._span_us), store.wipe)
        if rates.store_deaths:
            stream = world.stream("chaos store-dead")
            world.at(stream.randrange(self._span_us), store.die, stream)

    def heal(self) -> None:
        """End all faults: undo every cut, pause and slowdown, and start what is down."""
        self._over = True
        if self._transfers is not None:
            self._transfers.heal()
        if self._storage_model is not None:
            self._storage_model.heal()
        self._network.heal()
        self._resume_front()
        for node in self._nodes:
            node.disk.heal()
            node.set_device(slowness=1.0, disagreement=0.0)
            if node.host.paused and not node.stopped_for_good:
                node.resume()
            node.boot_if_down()

    def _partition(self, stream: random.Random, node: InstanceHost) -> None:
        """Cut the line in both directions, or in one."""
        ends = list(node.ends)
        stream.shuffle(ends)
        lasts_us = stream.randrange(20_000, 600_000)
        node.trouble(lasts_us)
        one, other = ends
        self._network.cut(one, other)
        if stream.random() < 0.7:
            self._network.cut(other, one)
        self._world.after(lasts_us, self._network.join, one, other)

    def _stall(self, stream: random.Random, node: InstanceHost) -> None:
        ends = list(node.ends)
        if self._pairs and stream.random() < PEER_STALL_SHARE:
            one, peer = stream.choice(self._pairs)
            ends = [one.name, listening_name(peer)]
        stream.shuffle(ends)
        lasts_us = stream.randrange(10_000, 600_000)
        node.trouble(lasts_us)
        self._network.stall(*ends)
        self._world.after(lasts_us, self._network.clear, *ends)

    def _come_as_stranger(self, stream: random.Random, node: InstanceHost) -> None:
        if self._over:
            return
        self._strangers += 1
        targets = [listening_name(node.name)] if node.role.gives else []
        targets.append(node.ends[1])
        send_stranger(self._network, stream, stream.choice(targets), self._key, self._strangers)

    def _part(self, stream: random.Random, node: InstanceHost, peer: str) -> None:
        """Cut two peers off from each other, in both directions or in one."""
        ends = [node.name, listening_name(peer)]
        stream.shuffle(ends)
        self._world.fire(Fault.PEER_PARTITION, f"{node.name} and {peer}")
        one, other = ends
        self._network.cut(one, other)
        if stream.random() < 0.7:
            self._network.cut(other, one)
        self._world.after(stream.randrange(20_000, 900_000), self._network.join, one, other)

    def _step_taken(self, node: InstanceHost, step: str) -> None:
        if self._over:
            return
        for aim in self._aims:
            if aim.step == step:
                aim.left -= 1
                if not aim.left:
                    self._strike(aim, node)

    def _strike(self, aim: _Aim, node: InstanceHost) -> None:
        """Hit the instance that took the step, or one of its peers, at once or up to 3 ms later."""
        stream = aim.stream
        whose = stream.random()
        others = [other for other in self._nodes if other.name in node.peers]
        target = node if whose < 0.6 else stream.choice(others)
        delay_us = stream.choice((0, 0, stream.randrange(3_000)))
        self._world.after(delay_us, self._pause_there if aim.pauses else self._crash_there, stream, target)

    def _crash_there(self, stream: random.Random, node: InstanceHost) -> None:
        if self._over or node.instance is None:
            return
        self._world.fire(Fault.STEP_CRASH, node.name)
        node.crash()
        self._world.after(log_uniform_us(stream, 300, 300_000), node.boot_if_down)

    def _pause_there(self, stream: random.Random, node: InstanceHost) -> None:
        if self._over or node.host.paused or node.instance is None:
            return
        self._world.fire(Fault.STEP_PAUSE, node.name)
        node.pause()
        self._world.after(log_uniform_us(stream, 3_000, 1_200_000), self._resume, node, node.host.lives)

    def _crash(self, stream: random.Random, node: InstanceHost) -> None:
        """Crash when one of MOMENTS holds, with or without a failure message."""
        self._crash_when(stream, node, stream.choice(MOMENTS))

    def _crash_when(self, stream: random.Random, node: InstanceHost, is_moment: Callable[[SimulatedInstance], bool]) -> None:
        if self._over or node.instance is None:
            return
        if node.host.paused or not is_moment(node.instance):
            self._world.after(MOMENT_EVERY_US, self._crash_when, stream, node, is_moment)
            return
        if stream.random() < 0.3:
            node.fail()
        else:
            self._world.fire(Fault.CRASH, node.name)
            node.crash()
        self._world.after(log_uniform_us(stream, 300, 300_000), node.boot_if_down)

    def _crash_at_opening(self, node: InstanceHost) -> None:
        """Crash right after an instance has accepted a session, so that bytes on their way find its next life."""
        stream = self._openings
        if not self._over and stream.random() < OPENING_CRASH_SHARE:
            self._world.after(stream.randrange(3_000), self._crash_when, stream, node, MOMENTS[0])

    def _pause_front(self, stream: random.Random, _node: InstanceHost) -> None:
        """Pause the front end and its clients."""
        if self._over or self._front.paused or not self._nodes[0].instance_table:
            return
        self._world.fire(Fault.FRONT_PAUSE, FRONT)
        self._front.pause()
        lasts_us = stream.randrange(10_000, 700_000)
        for node in self._nodes:
            node.trouble(lasts_us)
        self._world.after(lasts_us, self._resume_front)

    def _resume_front(self) -> None:
        if self._front.paused:
            self._front.resume()

    def _pause(self, stream: random.Random, node: InstanceHost) -> None:
        if self._over or node.host.paused or node.instance is None:
            return
        self._world.fire(Fault.PAUSE, node.name)
        node.pause()
        self._world.after(stream.randrange(10_000, 1_200_000), self._resume, node, node.host.lives)

    def _resume(self, node: InstanceHost, life: int) -> None:
        if node.host.paused and node.host.lives == life:
            node.resume()

    def _roll(self, stream: random.Random, node: InstanceHost) -> None:
        if self._over or node.instance is None or node.instance_table is None or not node.instance_table.serves:
            return
        node.instance_table.drain()
        node.restart_when_idle(stream.randrange(1_000, 200_000))

    def _slow(self, stream: random.Random, node: InstanceHost) -> None:
        if self._over:
            return
        self._world.fire(Fault.SLOW_DEVICE, node.name)
        node.set_device(slowness=stream.uniform(2, 20))
        lasts_us = stream.randrange(20_000, 400_000)
        node.slow_down(lasts_us)
        self._world.after(lasts_us, self._hurry, node)

    def _hurry(self, node: InstanceHost) -> None:
        node.set_device(slowness=1.0)
