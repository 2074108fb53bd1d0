"""One fuzzed world from its start to the verdict.

Owns the two phases:

    chaos    requests arrive and faults happen; safety laws are checked after each event
    heal     no more faults; every open request must end within a bound, every instance must serve again (each gets one
             more request), and then no resources may be held
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from baton.sim.faults import Fault
from baton.sim.fuzzed_world import HEALED_WITHIN_US, FuzzedWorld
from baton.sim.instance_host import FRONT
from baton.sim.law_checker import as_law
from baton.sim.law_names import LIVENESS, LawBroken
from baton.sim.recovery import Recovery
from baton.sim.scenario import Scenario, ScenarioTrim, draw_scenario

BOOTED_US = 30_000
"""Time for the instances to start before the first request."""
RECOVERED_WITHIN_US = 10_000_000
QUIET_WITHIN_US = 10_000_000


@dataclass(frozen=True, slots=True)
class WorldVerdict:
    seed: int
    broken: LawBroken | None
    digest: str
    events: int
    virtual_us: int
    asks: int
    fired: Counter[str]
    moves: Counter[str]
    ends: Counter[str]
    story: tuple[str, ...]
    scenario: Scenario


class FuzzedRun:
    """Runs one scenario."""

    def __init__(self, scenario: Scenario, *, tell_story: bool = False, always_audit: bool = False) -> None:
        self.scenario = scenario
        self.site = FuzzedWorld(scenario, tell_story=tell_story, always_audit=always_audit)
        self.when_healed: Callable[[], None] | None = None
        self._recovery = Recovery(self.site)

    def verdict(self) -> WorldVerdict:
        site = self.site
        broken = self._broken_law()
        self._gather_moves()
        if "overload" in site.scenario.classes:
            site.world.fire(Fault.OVERLOAD, FRONT)
        return WorldVerdict(
            seed=site.scenario.seed,
            broken=broken,
            digest=site.world.digest(),
            events=site.world.events,
            virtual_us=site.world.now_us,
            asks=sum(user.made for user in site.users),
            fired=site.world.fired,
            moves=site.checker.moves,
            ends=site.checker.ends,
            story=tuple(site.world.story),
            scenario=site.scenario,
        )

    def _gather_moves(self) -> None:
        site = self.site
        for node in site.nodes:
            if node.instance is not None:
                site.checker.buried(node.instance)
            for end in (*node.lines, *node.peer_lines):
                site.checker.took_moves("stream", end.moves())
            if node.instance_table is not None:
                for request_table in (node.instance_table.request_table, *node.instance_table.former_tables):
                    site.checker.took_moves("desk", request_table.moves())
        for line in site.lines:
            site.checker.took_moves("stream", line.moves())
        for lines in site.all_lines:
            site.checker.took_moves("stream", lines.moves())
        if site.fleet is not None:
            site.fleet.gather_moves(site.checker)

    def _broken_law(self) -> LawBroken | None:
        try:
            as_law(self._live)
        except LawBroken as broken:
            return broken
        return None

    def _live(self) -> None:
        site = self.site
        if site.fleet is None:
            for node in site.nodes:
                node.boot()
        else:
            site.fleet.boot()
        for line in site.lines:
            line.open()
        for user, plan in zip(site.users, site.scenario.users, strict=True):
            user.start(plan.at_us + BOOTED_US)
        site.fault_injector.unleash()
        site.until(site.scenario.span_us)
        if self.when_healed is not None:
            self.when_healed()
        site.world.note("world", "heals")
        site.fault_injector.heal()
        if site.fleet is not None:
            site.fleet.heal()
        for node in site.nodes:
            site.look_for_what_is_held(node)
        site.audit_all()
        site.until_all_have_ended(site.users, HEALED_WITHIN_US, LIVENESS)
        patience_us = site.noticed_us if site.fleet is None else site.fleet.noticed_us
        site.until(site.world.now_us + patience_us)  # every process has noticed a loss by then
        self._recovery.until_all_serve(site.world.now_us + RECOVERED_WITHIN_US)
        self._recovery.ask_each_instance()
        self._recovery.until_nothing_is_held(site.world.now_us + QUIET_WITHIN_US)


def run_seed(
    seed: int, trim: ScenarioTrim | None = None, *, tell_story: bool = False, always_audit: bool = False
) -> WorldVerdict:
    return FuzzedRun(draw_scenario(seed, trim), tell_story=tell_story, always_audit=always_audit).verdict()
