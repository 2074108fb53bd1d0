"""Worlds in which a law is known to be broken: each test fails until its bug is mended, and then its mark must go."""

from __future__ import annotations

import pytest

from baton.sim.fuzzed_run import FuzzedRun
from baton.sim.law_names import DRAINS_IN_TIME, FORGOTTEN, WAITS_IN_TIME, LawBroken
from baton.sim.scenario import Scenario, draw_scenario
from tests.sim.known_failures import STAYS_AT_A_DRAINING_INSTANCE, WAITS_TOO_LONG

KEEPS_FOR_A_LOST_ROUTER = draw_scenario(406954596)
"""Drawn, not written out: a change in how scenarios are drawn loses this one."""


def live_through(scenario: Scenario) -> None:
    """Raise the law that the world breaks, if it breaks one."""
    broken = FuzzedRun(scenario, always_audit=True).verdict().broken
    if broken is not None:
        raise broken


@pytest.mark.xfail(strict=True, raises=LawBroken, reason=f"breaks: {WAITS_IN_TIME}")
def test_a_request_waits_no_longer_than_promised_while_instances_drain() -> None:
    live_through(WAITS_TOO_LONG)


@pytest.mark.xfail(strict=True, raises=LawBroken, reason=f"breaks: {DRAINS_IN_TIME}")
def test_requests_leave_a_draining_instance_in_time_after_a_router_crash() -> None:
    live_through(STAYS_AT_A_DRAINING_INSTANCE)


@pytest.mark.xfail(strict=True, raises=LawBroken, reason=f"breaks: {FORGOTTEN}")
def test_an_instance_keeps_nothing_for_a_router_that_stayed_away() -> None:
    live_through(KEEPS_FOR_A_LOST_ROUTER)


@pytest.mark.parametrize(
    ("scenario", "law"),
    [
        (WAITS_TOO_LONG, WAITS_IN_TIME),
        (STAYS_AT_A_DRAINING_INSTANCE, DRAINS_IN_TIME),
        (KEEPS_FOR_A_LOST_ROUTER, FORGOTTEN),
    ],
    ids=["waits-too-long", "stays-at-a-draining-instance", "keeps-for-a-lost-router"],
)
def test_each_known_failure_breaks_the_law_it_is_known_for(scenario: Scenario, law: str) -> None:
    """Goes with the marks above: another law broken would otherwise count as the expected failure."""
    with pytest.raises(LawBroken) as caught:
        live_through(scenario)
    assert caught.value.law == law
