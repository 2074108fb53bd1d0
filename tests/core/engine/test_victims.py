"""Whom the policies choose, and when the answer is nobody."""

from __future__ import annotations

from baton.core.config import VictimPolicy
from baton.core.engine.request import Phase
from baton.core.engine.slots import Slots
from baton.core.engine.victims import choose_victim

DECODE, PREFILL = Phase.RUNNING_DECODE, Phase.RUNNING_PREFILL
NEWEST, CHEAPEST = VictimPolicy.NEWEST, VictimPolicy.CHEAPEST


def table(*rows: tuple[Phase, int, int]) -> tuple[Slots, list[int]]:
    """Rows of (phase, tokens known, priority), oldest first."""
    slots = Slots(8, 10, 16)
    made = []
    for serial, (phase, known, priority) in enumerate(rows):
        slot = slots.claim(serial)
        slots.phase[slot] = phase
        slots.known[slot] = known
        slots.priority[slot] = priority
        made.append(slot)
    return slots, made


def test_the_newest_decoding_request_yields() -> None:
    slots, rows = table((DECODE, 10, 0), (DECODE, 10, 0), (PREFILL, 10, 0))
    assert choose_victim(NEWEST, slots, rows[0], slots.known.take) == rows[1]


def test_the_asker_may_be_its_own_victim() -> None:
    slots, rows = table((DECODE, 10, 0), (DECODE, 10, 0))
    assert choose_victim(NEWEST, slots, rows[1], slots.known.take) == rows[1]


def test_nobody_yields_when_all_that_run_are_prefilling() -> None:
    slots, rows = table((PREFILL, 10, 0), (PREFILL, 10, 0))
    assert choose_victim(NEWEST, slots, rows[0], slots.known.take) is None
    assert choose_victim(CHEAPEST, slots, rows[0], slots.known.take) is None


def test_protected_and_leaving_requests_are_no_victims() -> None:
    slots, rows = table((DECODE, 10, 0), (Phase.PREEMPTING, 10, 0), (Phase.FINISHED, 10, 0))
    slots.protected[rows[0]] = True
    assert choose_victim(NEWEST, slots, rows[0], slots.known.take) is None


def test_nobody_yields_for_a_less_important_request() -> None:
    slots, rows = table((DECODE, 10, 0), (DECODE, 10, 5))
    assert choose_victim(NEWEST, slots, rows[1], slots.known.take) == rows[1]
    slots.protected[rows[1]] = True
    assert choose_victim(NEWEST, slots, rows[1], slots.known.take) is None
    assert choose_victim(CHEAPEST, slots, rows[1], slots.known.take) is None


def test_the_less_important_yields_before_the_newer() -> None:
    slots, rows = table((DECODE, 10, 5), (DECODE, 10, 0))
    assert choose_victim(NEWEST, slots, rows[1], slots.known.take) == rows[0]


def test_the_cheapest_to_bring_back_yields_and_ties_go_to_the_newest() -> None:
    slots, rows = table((DECODE, 50, 0), (DECODE, 10, 0), (DECODE, 70, 0), (DECODE, 10, 0))
    assert choose_victim(CHEAPEST, slots, rows[0], slots.known.take) == rows[3]
    slots.known[rows[3]] = 90
    assert choose_victim(CHEAPEST, slots, rows[0], slots.known.take) == rows[1]
