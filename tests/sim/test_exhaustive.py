"""A crash, or a long pause, after every single event of a small world with hand-overs, a router or a store in it.

Every law holds.

The whole walk (every event, both instances, both blows, all kinds of worlds) runs with BATON_TEST_EXHAUSTIVE=1; without it,
a sample. `make test-long` runs every crash in one kind of world.
"""

from __future__ import annotations

import os

import pytest

from baton.core.config import DECODE, MIXED, PREFILL, OnPreempt, PrefillPath, Role
from baton.sim.exhaustive import BlowKind, InjectedBlow, events_of, fleet_world, shelved_world, small_world, strikes, struck
from baton.sim.fuzzed_run import FuzzedRun
from baton.sim.scenario import Scenario

WHOLE = os.environ.get("BATON_TEST_EXHAUSTIVE") == "1"
SAMPLED_EVERY = 1 if WHOLE else 53
EVERY = [5, pytest.param(1, marks=pytest.mark.slow)]
"""Each fifth event in `make test`, every one in `make test-long`."""
KINDS = [(pulls, on_preempt, path) for pulls in (False, True) for on_preempt in OnPreempt for path in PrefillPath]


def world(pulls: bool = False, on_preempt: OnPreempt = OnPreempt.RESUME, path: PrefillPath = PrefillPath.SHORT) -> Scenario:
    return small_world(pulls=pulls, on_preempt=on_preempt, path=path)


def test_the_small_world_hands_over_in_one_chunk_in_several_and_behind_a_cached_prefix() -> None:
    verdict = FuzzedRun(world(), tell_story=True).verdict()
    assert verdict.broken is None
    assert verdict.moves["taker: CHECKING ─verified and adopted→"] >= 4
    story = "\n".join(verdict.story)
    assert " for 3 and on" in story
    assert "[0, 2) of step 2\n" in story
    assert "abort" in verdict.ends


@pytest.mark.slow
def test_a_crash_after_any_event_of_either_instance_breaks_no_law() -> None:
    scenario = world()
    for event in range(1, events_of(scenario) + 1):
        for target in range(scenario.instances):
            strike = InjectedBlow(event, target, BlowKind.CRASH)
            broken = struck(scenario, strike).broken
            assert broken is None, f"{strike}: {broken}"


@pytest.mark.slow
@pytest.mark.parametrize(("pulls", "on_preempt", "path"), KINDS)
def test_neither_do_pauses_nor_other_kinds_of_worlds(pulls: bool, on_preempt: OnPreempt, path: PrefillPath) -> None:
    scenario = world(pulls, on_preempt, path)
    for strike in strikes(scenario, SAMPLED_EVERY):
        broken = struck(scenario, strike).broken
        assert broken is None, f"{strike}: {broken}"


def test_a_strike_hits_the_event_it_names() -> None:
    scenario = world()
    verdict = struck(scenario, InjectedBlow(40, 1, BlowKind.CRASH), tell_story=True)
    assert verdict.fired["instance crashed"] == 1
    assert any("instance 1 is down" in line for line in verdict.story)


# ── behind a router ──────────────────────────────────────────────────────────────────────────────────────────────────────

EQUALS, PAIR = (MIXED, MIXED), (DECODE, PREFILL)
ROUTER = 2
"""In the place of an instance: both worlds have two instances."""


def holds(scenario: Scenario, strike: InjectedBlow) -> None:
    broken = struck(scenario, strike).broken
    assert broken is None, f"{strike}: {broken}"


@pytest.mark.parametrize("every", EVERY)
def test_a_crash_of_an_instance_after_any_event_costs_nobody_a_token(every: int) -> None:
    scenario = fleet_world(EQUALS)
    for event in range(1, events_of(scenario) + 1, every):
        verdict = struck(scenario, InjectedBlow(event, 0, BlowKind.CRASH))
        assert verdict.broken is None, f"event {event}: {verdict.broken}"
        assert set(map(str, verdict.ends)) <= {"length", "left", "left early"}


@pytest.mark.parametrize("every", EVERY)
def test_a_crash_of_the_router_after_any_event_breaks_no_law(every: int) -> None:
    scenario = fleet_world(EQUALS)
    for event in range(1, events_of(scenario) + 1, every):
        holds(scenario, InjectedBlow(event, ROUTER, BlowKind.CRASH))


@pytest.mark.parametrize("roles", [EQUALS, PAIR], ids=["equals", "pair"])
def test_neither_do_pauses_nor_both_crashes_nor_a_pair(roles: tuple[Role, ...]) -> None:
    scenario = fleet_world(roles)
    for strike in strikes(scenario, SAMPLED_EVERY):
        holds(scenario, strike)
    for event in range(1, events_of(scenario) + 1, SAMPLED_EVERY):
        holds(scenario, InjectedBlow(event, 0, BlowKind.CRASH, then_router=True))


# ── with host memory and a store ─────────────────────────────────────────────────────────────────────────────────────────


def test_the_shelved_world_saves_stores_fetches_restores_and_preempts() -> None:
    verdict = FuzzedRun(shelved_world(OnPreempt.RESUME)).verdict()
    assert verdict.broken is None
    for move in (
        "haul: OUT ─all of it done→",
        "haul: PUT ─all of it done→",
        "haul: GET ─all of it done→",
        "haul: IN ─all of it done→",
        "request: RESTORING ─admit→",
        "request: RUNNING_DECODE ─order to yield→",
    ):
        assert verdict.moves[move] >= 1, move


@pytest.mark.slow
def test_a_crash_after_any_event_of_an_instance_with_a_store_breaks_no_law() -> None:
    scenario = shelved_world(OnPreempt.RESUME)
    for event in range(1, events_of(scenario) + 1):
        holds(scenario, InjectedBlow(event, 0, BlowKind.CRASH))


@pytest.mark.slow
@pytest.mark.parametrize("roles", [EQUALS, PAIR], ids=["equals", "pair"])
@pytest.mark.parametrize("on_preempt", OnPreempt)
def test_neither_do_pauses_nor_a_pair_with_a_store(roles: tuple[Role, ...], on_preempt: OnPreempt) -> None:
    scenario = shelved_world(on_preempt, roles)
    for strike in strikes(scenario, SAMPLED_EVERY):
        holds(scenario, strike)
