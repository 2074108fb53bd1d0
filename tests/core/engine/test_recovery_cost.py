"""The cost of a victim: the least over the ways back that it has, each by its measured rate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.engine.plan import Int64s
from baton.core.engine.recovery_cost import (
    ABSENT_US,
    LostRows,
    RecoveryEstimate,
    WayBack,
    recovery_costs_us,
    recovery_estimate,
)
from baton.core.engine.victims import RecoveryRates

SIZE = 16
RATES = RecoveryRates(100.0, 50.0, 200.0, 1000.0, 10.0)


def int64s(*values: int) -> Int64s:
    return np.array(values, dtype=np.int64)


def one_row(
    known: int, shared: int = 0, kept: int | None = None, *, leaves: bool = False, saved: bool = False, stored: bool = False
) -> LostRows:
    """A row of `known` tokens, of which `shared` blocks are held by others and `kept` blocks would be saved."""
    kept_blocks = known // SIZE if kept is None else kept
    lost = max(0, known - shared * SIZE)
    return LostRows(int64s(known), int64s(lost), int64s(kept_blocks), np.array([leaves]), saved, stored)


def costs(row: LostRows, rates: RecoveryRates = RATES) -> dict[WayBack, int]:
    """The ways that exist."""
    table = recovery_costs_us(row, SIZE, rates)[:, 0].tolist()
    return {way: table[way] for way in WayBack if table[way] != ABSENT_US}


def test_alone_a_request_can_only_be_computed_again() -> None:
    assert costs(one_row(40)) == {WayBack.COMPUTE: 4000}
    assert costs(one_row(40, shared=2)) == {WayBack.COMPUTE: 800}


def test_host_memory_brings_back_whole_blocks_and_the_rest_is_computed() -> None:
    assert costs(one_row(40, saved=True))[WayBack.HOST] == 2 * 50 + 800
    assert costs(one_row(40, shared=1, saved=True))[WayBack.HOST] == 50 + 800
    assert costs(one_row(40, kept=1, saved=True))[WayBack.HOST] == 50 + 2400, "the other block does not fit there"
    assert costs(one_row(40, shared=2, kept=1, saved=True))[WayBack.HOST] == 800, "what is kept is here anyway"


def test_the_store_costs_a_look_up_a_fetch_and_a_copy() -> None:
    assert costs(one_row(40, saved=True, stored=True))[WayBack.STORE] == 1000 + 2 * (200 + 50) + 800


def test_a_request_that_leaves_has_no_host_memory_and_takes_no_shared_block_along() -> None:
    row = one_row(40, shared=1, leaves=True, saved=True, stored=True)
    assert costs(row) == {WayBack.COMPUTE: 4000, WayBack.STORE: 1000 + 2 * 250 + 800, WayBack.MOVE: 400}


def test_a_move_is_no_way_back_before_one_was_measured_or_where_the_request_stays() -> None:
    assert WayBack.MOVE not in costs(one_row(40, leaves=True), replace(RATES, move_us_per_token=None))
    assert WayBack.MOVE not in costs(one_row(40))


rates_drawn = st.builds(
    RecoveryRates,
    *[st.floats(0, 1e6)] * 4,
    st.none() | st.floats(0, 1e9),
)


@st.composite
def rows_drawn(draw: st.DrawFn) -> LostRows:
    known = draw(st.integers(1, 100_000))
    shared = draw(st.integers(0, known // SIZE))
    kept = draw(st.integers(0, known // SIZE))
    flags = {name: draw(st.booleans()) for name in ("leaves", "saved", "stored")}
    return one_row(known, shared, kept, **flags)


@given(rows_drawn(), rates_drawn)
def test_the_least_is_never_more_than_computing_and_never_negative(row: LostRows, rates: RecoveryRates) -> None:
    found = costs(row, rates)
    assert 0 <= min(found.values()) <= found[WayBack.COMPUTE]


@given(rows_drawn(), rates_drawn)
def test_a_way_that_is_absent_is_not_counted(row: LostRows, rates: RecoveryRates) -> None:
    found = set(costs(row, rates))
    leaves = bool(row.leaves[0])
    assert (WayBack.HOST in found) == (row.is_saved and not leaves)
    assert (WayBack.STORE in found) == row.is_stored
    assert (WayBack.MOVE in found) == (leaves and rates.move_us_per_token is not None)


@given(rows_drawn(), rates_drawn, st.integers(0, 10_000))
def test_a_longer_request_costs_at_least_as_much(row: LostRows, rates: RecoveryRates, more: int) -> None:
    longer = replace(row, known=row.known + more, lost=row.lost + more)
    before, after = costs(row, rates), costs(longer, rates)
    assert all(after[way] >= before[way] for way in before)


@pytest.mark.parametrize("field", ["prefill_us_per_token", "copy_us_per_block", "fetch_us_per_block", "look_us"])
@given(row=rows_drawn(), rates=rates_drawn, factor=st.floats(1, 100))
def test_a_slower_rate_makes_nothing_cheaper(field: str, row: LostRows, rates: RecoveryRates, factor: float) -> None:
    slower = replace(rates, **{field: getattr(rates, field) * factor})
    before, after = costs(row, rates), costs(row, slower)
    assert all(after[way] >= before[way] for way in before)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (one_row(40), RecoveryEstimate(WayBack.COMPUTE, 40, 0, 4000)),
        (one_row(40, shared=2), RecoveryEstimate(WayBack.COMPUTE, 8, 0, 800)),
        (one_row(40, saved=True), RecoveryEstimate(WayBack.HOST, 8, 2, 900)),
        (one_row(40, shared=1, saved=True), RecoveryEstimate(WayBack.HOST, 8, 1, 850)),
        (one_row(40, stored=True), RecoveryEstimate(WayBack.STORE, 8, 2, 2300)),
        (one_row(40, leaves=True), RecoveryEstimate(WayBack.MOVE, 40, 0, 400)),
    ],
)
def test_the_quickest_way_is_told_with_what_it_computes_and_copies(row: LostRows, expected: RecoveryEstimate) -> None:
    assert recovery_estimate(row, SIZE, RATES) == expected


def test_one_that_leaves_and_finds_its_blocks_in_the_store_computes_the_rest() -> None:
    row, rates = one_row(40, shared=1, leaves=True, stored=True), replace(RATES, move_us_per_token=None)
    assert recovery_estimate(row, SIZE, rates) == RecoveryEstimate(WayBack.STORE, 8, 2, 1000 + 2 * 250 + 800)


@given(rows_drawn(), rates_drawn)
def test_the_estimate_is_the_least_of_the_ways(row: LostRows, rates: RecoveryRates) -> None:
    found = recovery_estimate(row, SIZE, rates)
    assert found.cost_us == min(costs(row, rates).values())
    assert found.compute_tokens >= 0 <= found.restore_blocks
