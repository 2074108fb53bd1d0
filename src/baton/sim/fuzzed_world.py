"""The objects of one fuzzed scenario: hosts, lines, instances, router, clients and fault injectors.

Owns their construction, the loop that advances time, and the answers to which losses and suspicions injected faults explain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from baton.core.routing.config import RouterConfig
from baton.core.tiers.transfers import TransferId
from baton.executor.constraints.compiled_cache import CompiledConstraints
from baton.executor.constraints.scripted_backend import ScriptedBackend
from baton.executor.contract import ExecutorShape
from baton.executor.scripted import SCRIPTED_CONSTRAINTS, ScriptedExecutor
from baton.sim.attempt_book import AttemptBook
from baton.sim.client_requests import VOCABULARY, ClientRequest
from baton.sim.clients import Entrance, SimulatedUser
from baton.sim.fault_injector import FaultInjector
from baton.sim.faults import Fault
from baton.sim.faulty_transfers import FaultyTransfers
from baton.sim.fleet_checks import FleetChecks
from baton.sim.front_end import FrontEnd, InstanceTable
from baton.sim.instance import InstanceSpec, SimulatedInstance
from baton.sim.instance_host import FRONT, InstanceHost
from baton.sim.law_checker import LawChecker
from baton.sim.law_names import DEADLOCK, LawBroken
from baton.sim.lines import LineEndpoint, StreamLines
from baton.sim.network import SimulatedNetwork
from baton.sim.router_faults import RouterFaults
from baton.sim.router_host import RouterHost
from baton.sim.scenario import OTHER_BACKEND_VERSION, Scenario
from baton.sim.storage_copies import StorageModel
from baton.sim.store import SimulatedStore
from baton.sim.world import Host, World

OTHER_VERSION_CONSTRAINTS = CompiledConstraints([ScriptedBackend(OTHER_BACKEND_VERSION)])

EVENTS_MAX = 200_000
HEALED_WITHIN_US = 20_000_000
STANDSTILL_US = 4_000_000
"""While a client waits, this long with nothing but heartbeats is a deadlock. A stopped engine is killed after 3 s."""
PEER_DEAD_US = 3_000_000
"""This long after an instance died, its peers may hold nothing for it."""
FRAME_ALLOWANCE = 1 << 16
"""A frame may begin just before its line is full, and signs of life are sent all the same."""
OUT_OF_REACH = frozenset(
    (
        "reset", "connect", "delay", "bit-flip", "tamper", "partition", "stall", "narrow-line", "pause", "router-crash",
        "router-pause", "old-life", "drain", "front-crash", "engine-stall", "forgery", "one-way",
    )
)  # fmt: skip
"""Classes of faults after which an instance may go on with a request that is elsewhere by now."""
SUSPECTED_WITHIN_US = 200_000
"""Allowance beyond the router's silence limit, for messages that arrive late."""


class FuzzedWorld:
    def __init__(self, scenario: Scenario, *, tell_story: bool = False, always_audit: bool = False) -> None:
        self.scenario = scenario
        self.world = World(scenario.seed, events_max=EVENTS_MAX, tell_story=tell_story)
        self._mask_stream = self.world.stream("late masks")
        line_max = scenario.line.window_bytes + FRAME_ALLOWANCE if scenario.router is None else None
        self.checker = LawChecker(self.world, self, VOCABULARY, line_max, always_audit)
        line = scenario.line
        self.network = SimulatedNetwork(
            self.world,
            scenario.rates.network,
            window_bytes=line.window_bytes,
            unacknowledged_us=line.unacknowledged_us,
            connect_us=line.connect_us,
        )
        cluster_key = self.world.stream("key of the cluster").randbytes(32)
        config = line.with_heartbeat() if scenario.router is None else line.of_router()
        self._connections = StreamLines(self.network, cluster_key, config)
        self._peer_connections = StreamLines(self.network, cluster_key, line.with_heartbeat())
        self.all_lines = (self._connections, self._peer_connections)
        self._front_host = Host(self.world, FRONT)
        self.transfers = FaultyTransfers(self.world, scenario.rates.kv, scenario.kv)
        serving = [number for number, role in enumerate(scenario.roles) if role.serves]
        self.front = FrontEnd([InstanceTable(number) for number in range(scenario.instances)], serving)
        self.storage_model = self._make_storage_model()
        self.lines: list[LineEndpoint] = []
        self._secret = self.world.stream("key of the fleet").randbytes(32)
        self.nodes = [self._node(number) for number in range(scenario.instances)]
        self.fleet = None if scenario.router is None else self._fleet(scenario.router)
        self.fault_injector = FaultInjector(
            self.world,
            self.network,
            self._front_host,
            self.nodes,
            scenario.rates,
            scenario.span_us,
            cluster_key,
            self.transfers,
            self.storage_model,
        )
        self.storage_model.when_hasty = self._lose_patience
        entrance = self.front if self.fleet is None else self.fleet.router_host
        self.users = [self.user(plan.asks, entrance, plan.converses) for plan in scenario.users]

    def may_be_lost(self, instance: int, accepted: bool) -> bool:
        now_us = self.world.now_us
        noisy = self.scenario.rates.network.may_silence and now_us <= self.scenario.span_us + self.noticed_us
        if noisy or instance >= len(self.nodes):  # numbers beyond the instances are old lives
            return True
        return now_us <= self.nodes[instance].troubled_until_us(rolling_too=not accepted) + self.noticed_us

    def may_be_suspected(self, instance: int) -> bool:
        router = self.scenario.router
        if router is None or instance >= len(self.nodes):  # numbers beyond the instances are old lives
            return True
        now_us, noticed_us = self.world.now_us, router.suspect_us + 2 * router.beat_us + SUSPECTED_WITHIN_US
        noisy = self.scenario.rates.network.may_silence and now_us <= self.scenario.span_us + noticed_us
        return noisy or now_us <= self.nodes[instance].hurt_until_us() + noticed_us

    def may_be_forgotten(self, origin: bytes, lost_us: int) -> bool:
        return self.fleet is None or self.fleet.may_be_forgotten(origin, lost_us)

    def fire(self, fault: Fault, where: str) -> None:
        self.world.fire(fault, where)

    @property
    def noticed_us(self) -> int:
        """Time until both sides have noticed a lost session, and half a second for late bytes."""
        return self.scenario.line.noticed_us + 500_000

    def until(self, until_us: int) -> None:
        while (next_us := self.world.next_us) is not None and next_us < until_us:
            self.world.step()
        self.world.now_us = until_us

    def until_all_have_ended(self, users: Sequence[SimulatedUser], within_us: int, law: str) -> None:
        bound_us = self.world.now_us + within_us
        self.world.progressed()
        while waiting := [user for user in users if not user.done]:
            client = next((user.client for user in waiting if user.client is not None), None)
            who = f"{len(waiting)} users wait, {client.name if client else 'between two asks'} first"
            if self.world.next_us is None or self.world.now_us > self._stands_still_us():
                raise LawBroken(DEADLOCK, who)
            if self.world.now_us > bound_us:
                raise LawBroken(law, who)
            for _ in range(32):  # checking all users after each event would take longer than the event
                if self.world.next_us is not None:
                    self.world.step()

    def _stands_still_us(self) -> int:
        """From when on nothing happens any more, if nothing does until then."""
        return max(self.world.progress_us + STANDSTILL_US, *(node.stuck_until_us for node in self.nodes))

    def look_for_what_is_held(self, node: InstanceHost) -> None:
        """After a death or the end of faults: check in three seconds that no peer holds what it held for it by now."""
        if node.peers:
            self.world.after(PEER_DEAD_US, self._nothing_held_for, node, self.world.now_us)

    def _nothing_held_for(self, node: InstanceHost, since_us: int) -> None:
        for other in self.nodes:
            life = other.instance
            if other.name not in node.peers or life is None or life.worker is None:
                continue
            if other.host.paused or life.hindered_us > since_us:
                self.world.after(PEER_DEAD_US, self._nothing_held_for, node, since_us)
                return
        for other in self.nodes:
            if other.name in node.peers and other.instance is not None and other.instance.worker is not None:
                self.checker.nothing_held_for(other.instance, node.name, node.instance, since_us)

    def audit_all(self) -> None:
        for node in self.nodes:
            if node.instance is not None and node.instance.worker is not None:
                self.checker.audit(node.instance.worker)

    def serves(self, node: InstanceHost) -> bool:
        return _serves(node, self.lines[node.number]) if self.fleet is None else self.fleet.serves(node)

    def entrance_of(self, node: InstanceHost) -> Entrance:
        """The entrance for a request that this instance shall answer; behind a router, any instance may."""
        if self.fleet is not None:
            return self.fleet.router_host
        if node.instance_table is None:
            raise RuntimeError(f"{node.name} has no front end and no router")
        return FrontEnd([node.instance_table])

    def user(self, asks: tuple[ClientRequest, ...], front: Entrance, converses: bool) -> SimulatedUser:
        config = self.scenario.config
        return SimulatedUser(
            self._front_host,
            front,
            self.checker,
            asks,
            converses=converses,
            tokens_max=config.sequence_tokens_max,
            preemptions_max=config.max_preemptions * self._unaware_instances,
        )

    @property
    def _unaware_instances(self) -> int:
        """Instances that may run one request at a time, not knowing how often the others have preempted it."""
        is_reached = self.scenario.router is None or OUT_OF_REACH.isdisjoint(self.scenario.classes)
        return 1 if is_reached else len(self.scenario.roles)

    def _node(self, number: int) -> InstanceHost:
        scenario = self.scenario
        router = scenario.router
        spec = InstanceSpec(
            number,
            scenario.config_of(number),
            partial(self._executor, number),
            scenario.times,
            None if router is None and not scenario.has_store else self._secret,
            stall_us=scenario.stall_us,
            constraints=self._constraints_of(number),
        )
        instance_table = self.front.instance_tables[number] if router is None else None
        node = InstanceHost(
            self.world,
            self._connections,
            spec,
            instance_table,
            scenario.rates.disk,
            self.checker,
            self.transfers,
            scenario.peers_of(number),
            0 if router is None else router.orphan_grace_us,
            self.storage_model,
            self._peer_connections,
        )
        node.when_dead = self.look_for_what_is_held
        if instance_table is not None:
            instance_table.line = line = self._connections.dial(self._front_host, *node.ends, instance_table)
            self.lines.append(line)
        return node

    def _executor(self, number: int, shape: ExecutorShape) -> ScriptedExecutor:
        is_late = partial(self._is_late, f"instance {number}") if self.scenario.rates.late_masks else None
        constraints = self._constraints_of(number)
        return ScriptedExecutor(shape, VOCABULARY, self.scenario.layers, constraints=constraints, is_late=is_late)

    def _constraints_of(self, number: int) -> CompiledConstraints:
        return OTHER_VERSION_CONSTRAINTS if self.scenario.has_other_version(number) else SCRIPTED_CONSTRAINTS

    def _is_late(self, name: str) -> bool:
        """Whether a mask is late at this instance."""
        if self.world.now_us > self.scenario.span_us or self._mask_stream.random() >= self.scenario.rates.late_masks:
            return False
        self.world.fire(Fault.MASK_LATE, name)
        return True

    def _make_storage_model(self) -> StorageModel:
        scenario = self.scenario
        store = SimulatedStore(self.world, scenario.rates.store, scenario.store) if scenario.has_store else None
        self.checker.peers_share_a_store = store is not None and any(role.takes for role in scenario.roles)
        return StorageModel(self.world, scenario.rates.copies, scenario.copies, store, self.checker.names_of)

    def _lose_patience(self, instance: SimulatedInstance, transfer: TransferId, delay_us: int) -> None:
        """Let the client whose KV is copied back disconnect after `delay_us`."""
        waiting = self.checker.waits_for(instance, transfer)
        index = None if waiting is None else int(waiting.partition(".")[0])
        for user in self.users:
            client = user.client
            if client is not None and client.ask.index == index:
                self.world.fire(Fault.HASTY, client.name)
                self._front_host.after(delay_us, client.leave)

    def _fleet(self, router: RouterConfig) -> FleetChecks:
        scenario = self.scenario
        self.checker.behind_router = True
        # As in production: without the mark, whoever comes first to a router that has just started decides on its model.
        router = replace(router, model_mark=ScriptedExecutor.mark)
        router_host = RouterHost(self.world, self._connections, router, self._secret, AttemptBook(router, self))
        router_host.has_masks = scenario.rates.version_skew != 2
        router_faults = RouterFaults(
            self.world, self._connections, router_host, self.nodes, scenario.rates, scenario.span_us, self.network
        )
        return FleetChecks(router_host, router_faults, self.nodes, scenario.line)


def _serves(node: InstanceHost, line: LineEndpoint) -> bool:
    """Whether both ends are in the same session, and the instance has reported ready in it."""
    if node.instance is None or node.instance.is_leaving or node.line is None or node.instance_table is None:
        return False
    return node.line.session == line.session and node.instance_table.serves and not line.undelivered
