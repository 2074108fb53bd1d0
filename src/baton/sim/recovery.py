"""Checks after faults have ended: every instance serves again, answers one more request, and then holds nothing.

Owns the probe requests.
"""

from __future__ import annotations

from baton.core.config import MIXED
from baton.sim.client_requests import VOCABULARY, probe_ask
from baton.sim.clients import SimulatedUser
from baton.sim.fuzzed_world import HEALED_WITHIN_US, FuzzedWorld
from baton.sim.instance_host import InstanceHost
from baton.sim.law_names import LIVENESS, RECOVERY, LawBroken
from baton.sim.scenario import HANDED_OVER_TOKENS
from baton.sim.world import stream_of

SAID_WITHIN_US = 350_000
IMPATIENT_US = 1_000_000
PROBE_FROM = 1_000_000
"""First index of probe requests."""


class Recovery:
    def __init__(self, site: FuzzedWorld) -> None:
        self._site = site

    def until_all_serve(self, bound_us: int) -> None:
        site = self._site
        while absent := [node.name for node in site.nodes if not (site.serves(node) and self._knows_its_peers(node))]:
            if site.world.next_us is None or site.world.now_us > bound_us:
                raise LawBroken(RECOVERY, f"{', '.join(absent)} do not serve")
            site.world.step()

    def _knows_its_peers(self, node: InstanceHost) -> bool:
        """Whether it and each of its peers have registered with each other in the same session."""
        others = [other for other in self._site.nodes if other.name in node.peers]
        for other in others:
            if node.neighbours is None or other.neighbours is None:
                return False
            sessions = node.neighbours.session_with(other.name), other.neighbours.session_with(node.name)
            if sessions[0] is None or sessions[0] != sessions[1]:
                return False
        return True

    def ask_each_instance(self) -> None:
        """Every serving instance must answer one more request in full."""
        site = self._site
        site.checker.calm = True
        if self._may_give_up_questions:
            return
        serving = [node for node in site.nodes if node.role.serves]
        probes = [site.user((probe_ask(PROBE_FROM + node.number),), site.entrance_of(node), False) for node in serving]
        self._until_answered(probes)
        self._ask_for_a_handover()
        self._ask_for_a_look()

    @property
    def _may_give_up_questions(self) -> bool:
        """Whether old heartbeats on a narrow line may delay probes beyond the router's short deadline."""
        router = self._site.scenario.router
        return router is not None and router.deadline_us < IMPATIENT_US and "narrow-line" in self._site.scenario.classes

    def _ask_for_a_handover(self) -> None:
        """Check that peers prefill again, with one probe after the other so that no queue is full."""
        site = self._site
        if not site.scenario.can_hand_over(HANDED_OVER_TOKENS):
            return
        if site.fleet is not None and MIXED in site.scenario.roles:
            return  # which may serve the probe instead
        stream = stream_of(site.scenario.seed, "probes")
        for node in site.nodes:
            if not (node.role.takes and node.peers) or node.instance is None:
                continue
            before = self._handovers()
            prompt = tuple(stream.randrange(VOCABULARY) for _ in range(HANDED_OVER_TOKENS))
            ask = probe_ask(PROBE_FROM * 2 + node.number, prompt)
            self._until_answered([site.user((ask,), site.entrance_of(node), False)])
            made = self._handovers()
            if made == before or (site.fleet is None and made[node.number] == before[node.number]):
                raise LawBroken(RECOVERY, f"{node.name} prefilled by itself, though {', '.join(node.peers)} were there")

    def _ask_for_a_look(self) -> None:
        """Check that the store is used again after its back-off, with a probe of a new prompt."""
        site = self._site
        store, scenario = site.storage_model.store, site.scenario
        if store is None or store.is_dead or not scenario.looks_in_store:
            return
        patience_us = max(config.tiers.retry_us_max for config in (scenario.config, scenario.giver))
        site.until(site.world.now_us + patience_us)
        before = self._looks()
        stream = stream_of(scenario.seed, "looks")
        prompt = tuple(stream.randrange(VOCABULARY) for _ in range(HANDED_OVER_TOKENS))
        node = next(node for node in site.nodes if node.role.serves)
        self._until_answered([site.user((probe_ask(PROBE_FROM * 3, prompt),), site.entrance_of(node), False)])
        if self._looks() == before:
            raise LawBroken(RECOVERY, "nobody asks the store any more, though it is there again")

    def _looks(self) -> int:
        return sum(
            0 if node.instance is None else self._site.checker.store_looks(node.instance) for node in self._site.nodes
        )

    def _handovers(self) -> list[int]:
        return [0 if node.instance is None else self._site.checker.handovers_to(node.instance) for node in self._site.nodes]

    def _until_answered(self, probes: list[SimulatedUser]) -> None:
        for probe in probes:
            probe.start(self._site.world.now_us)
        self._site.until_all_have_ended(probes, HEALED_WITHIN_US, RECOVERY)

    def until_nothing_is_held(self, bound_us: int) -> None:
        site = self._site
        while not self._nothing_open() and site.world.next_us is not None and site.world.now_us <= bound_us:
            site.world.step()
        if site.fleet is not None:
            site.until(site.world.now_us + SAID_WITHIN_US)  # heartbeats report what is cached
        site.audit_all()
        for node in site.nodes:
            if node.instance is not None:
                site.checker.nothing_held(node.instance)
            if node.neighbours is not None:
                site.checker.nothing_lands(node.name, node.neighbours.receiver.open, node.neighbours.sender.open)
        if site.fleet is not None:
            site.fleet.nothing_held(site.checker)
        if site.front.open_requests:
            raise LawBroken(LIVENESS, f"the front end still has {site.front.open_requests} open requests")

    def _nothing_open(self) -> bool:
        site = self._site
        workers = [node.instance.worker for node in site.nodes if node.instance is not None]
        ends = [node.neighbours for node in site.nodes if node.neighbours is not None]
        if any(end.receiver.open or end.sender.open for end in ends):
            return False
        if site.fleet is not None and not site.fleet.is_quiet:
            return False
        if any(worker is not None and worker.gauges().storage.transfers for worker in workers):
            return False
        return not site.front.open_requests and all(worker is not None and worker.is_idle for worker in workers)
