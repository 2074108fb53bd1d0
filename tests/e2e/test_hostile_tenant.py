"""One tenant attacks real servers, another one notices little: `benchmarks hostile` with few requests of a few attacks.

The limits are those of the benchmark, with three times the room for a busy machine; `python -m benchmarks hostile` shows the
exact figures of all attacks.
"""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.hostile import HEALTH_S_MAX, TTFT_RATIO_MAX, TTFT_S_MAX, AttackFigures, HostileOptions, run_hostile
from benchmarks.runner import Progress

pytestmark = [pytest.mark.slow, pytest.mark.timed]

ROOM = 3
QUIET = Progress(say=print, doing=print, done=lambda: None)
ATTACKS = ("long-prompts", "flood", "pipelined", "half-bodies", "hostile-schemas")


@pytest.mark.parametrize("server", ["serve", "router"])
def test_a_tenant_is_served_while_another_attacks(server: str) -> None:
    report = asyncio.run(run_hostile(HostileOptions(requests=40, servers=(server,), attacks=ATTACKS), QUIET))
    quiet, *attacked = report.figures
    assert [row.attack for row in attacked] == list(ATTACKS)
    for row in attacked:
        assert row.failed == [], row.attack
        assert row.tally.connections > 0, row.attack
        first_token_s, health_s = _p99_s(row)
        assert first_token_s < ROOM * max(TTFT_S_MAX, TTFT_RATIO_MAX * _p99_s(quiet)[0]), row.attack
        assert health_s < ROOM * HEALTH_S_MAX, row.attack


def _p99_s(row: AttackFigures) -> tuple[float, float]:
    assert row.ttft_s is not None
    assert row.health_s is not None
    return row.ttft_s.p99, row.health_s.p99
