"""Counts over all instances that ever joined never decrease."""

from __future__ import annotations

from dataclasses import replace

from baton.core.engine.gauges import HandoverGauges, SchedulerGauges
from baton.core.routing.fleet_members import InstanceView
from baton.router.lifetime_totals import INCARNATIONS_MAX, LifetimeTotals
from tests.support.routing import facts


def seen(name: str, steps: int, incarnation: int = 1) -> InstanceView:
    return InstanceView(
        facts(name, incarnation=incarnation),
        "ready",
        SchedulerGauges(steps=steps, handovers=HandoverGauges(made=1)),
        0,
        0,
        0,
    )


def test_what_a_life_has_counted_stays_when_it_is_gone_and_is_not_counted_twice_when_it_is_back() -> None:
    totals = LifetimeTotals()
    totals.update([seen("a", 10), seen("b", 5)])
    totals.update([seen("b", 7)])
    assert totals.of("steps") == 17
    totals.update([replace(seen("a", 0), ledger=SchedulerGauges()), seen("b", 7)])
    assert totals.of("steps") == 17, "its first beat is yet to come"
    totals.update([seen("a", 12), seen("a", 3, incarnation=2)])
    assert (totals.of("steps"), totals.of("handovers")) == (22, 3)


def test_lives_are_bounded_and_their_counts_are_kept() -> None:
    totals = LifetimeTotals()
    for number in range(INCARNATIONS_MAX + 500):
        totals.update([seen("a", 1, incarnation=number)])
    assert totals.of("steps") == INCARNATIONS_MAX + 500
