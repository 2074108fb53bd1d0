"""Simulated worlds whose router was told how many instances to expect, and the laws that see when it waits wrongly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.routing.expected_instances import ExpectedInstances
from baton.sim.fuzzed_run import FuzzedRun, WorldVerdict
from baton.sim.law_names import DESERVED_END, WAITS_IN_TIME
from baton.sim.scenario import draw_scenario

FOR_EVER_US = 10**12
WAITING = 4002
"""A world in which requests are declined for want of an instance unless they wait for those that are expected."""
ABSENT = 4133
"""One in which nobody serves for long."""


def world(seed: int, *, more: int = 0, start_us: int = 1_500_000) -> WorldVerdict:
    """`more`: instances that are expected and never come."""
    scenario = draw_scenario(seed)
    assert scenario.router is not None
    expected = sum(role.serves for role in scenario.roles) + more
    router = replace(scenario.router, expected_instances=expected, start_us=start_us)
    return FuzzedRun(replace(scenario, router=router)).verdict()


@pytest.mark.parametrize("seed", [WAITING, ABSENT, 4013, 4019])
def test_a_router_that_expects_instances_breaks_no_law(seed: int) -> None:
    assert world(seed).broken is None
    assert world(seed, more=1, start_us=200_000).broken is None


def test_requests_are_answered_that_would_have_been_declined() -> None:
    declined = "refused: no_instance"
    assert FuzzedRun(draw_scenario(WAITING)).verdict().ends[declined] == 2
    assert world(WAITING).ends[declined] == 0


def test_a_law_sees_a_router_that_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExpectedInstances, "awaited_until_us", 0)
    broken = world(WAITING).broken
    assert broken is not None
    assert broken.law == DESERVED_END


def test_a_law_sees_a_router_that_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExpectedInstances, "awaited_until_us", FOR_EVER_US)
    broken = world(ABSENT, more=1, start_us=200_000).broken
    assert broken is not None
    assert broken.law == WAITS_IN_TIME
