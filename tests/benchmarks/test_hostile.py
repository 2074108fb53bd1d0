"""The judging of attacks, and what an attacker tells of itself."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec
import pytest

from baton.bench.child_processes import Child, ChildFailed, started
from baton.bench.stats import Distribution, describe
from benchmarks import hostile
from benchmarks.attacks import AttackTally
from benchmarks.hostile import HEALTH_S_MAX, TTFT_RATIO_MAX, TTFT_S_MAX, AttackFigures, _Seen, judged, last_tally
from tests.support.waiting import wait_until

REACHED = AttackTally(connections=3, sent_bytes=100, answers=1)


def figures(
    attack: str = "flood",
    ttft_s: float | None = 0.1,
    health_s: float | None = 0.01,
    failed: tuple[str, ...] = (),
    tally: AttackTally = REACHED,
) -> AttackFigures:
    return AttackFigures(
        server="serve", attack=attack, ttft_s=_of(ttft_s), health_s=_of(health_s), failed=list(failed),
        memory_mib_before=1.0, memory_mib_max=2.0, tally=tally,
    )  # fmt: skip


def _of(seconds: float | None) -> Distribution | None:
    return None if seconds is None else describe([seconds] * 10)


def test_a_tenant_that_notices_nothing_does_not_complain() -> None:
    assert judged(figures(), 0.1) == []
    assert judged(figures(attack="", tally=AttackTally()), 0.1) == []


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (figures(ttft_s=TTFT_S_MAX + 0.01), "first token"),
        (figures(health_s=HEALTH_S_MAX + 0.01), "/health"),
        (figures(failed=("503 no",)), "1 failed, first 503 no"),
        (figures(tally=AttackTally()), "has not reached the server"),
        (figures(ttft_s=None), "nothing was measured"),
        (figures(health_s=None), "nothing was measured"),
    ],
)
def test_each_complaint_is_told(row: AttackFigures, told: str) -> None:
    (complaint,) = judged(row, 0.0)
    assert complaint.startswith("serve, flood: ")
    assert told in complaint


def test_a_slow_quiet_server_raises_the_limit() -> None:
    assert judged(figures(ttft_s=1.0), 1.0 / TTFT_RATIO_MAX + 0.01) == []


def test_the_last_whole_line_of_an_attacker_counts() -> None:
    first, last = (msgspec.json.encode(AttackTally(count, 1, 1)).decode() for count in (1, 2))
    assert last_tally("") == AttackTally()
    assert last_tally(f'{first}\n{last}\na warning\n{{"connections": 3') == AttackTally(2, 1, 1)


class _Attacked:
    """In place of the second tenant: measures until something has happened."""

    def __init__(self, until: Callable[[], bool]) -> None:
        self._until = until

    async def measure(self, requests: int) -> _Seen:
        wait_until(self._until)
        return _Seen([0.1] * requests, [0.1])


class _Server:
    pid = 1

    def check_alive(self) -> None:
        pass


@pytest.fixture
def attackers(monkeypatch: pytest.MonkeyPatch) -> list[Child]:
    """Those that a measurement has started."""
    made: list[Child] = []

    @contextmanager
    def noted(name: str, command: Sequence[str], environment: Mapping[str, str]) -> Iterator[Child]:
        with started(name, command, environment) as child:
            made.append(child)
            yield child

    monkeypatch.setattr(hostile, "WARM_UP_S", 0.0)
    monkeypatch.setattr(hostile, "started", noted)
    return made


async def _measured(attack: str, url: str, until: Callable[[], bool]) -> AttackFigures:
    return await hostile._measured("serve", attack, _Server(), url, "m", _Attacked(until), 1)  # type: ignore[arg-type]


def _has_ended(child: Child) -> bool:
    try:
        child.check_alive()
    except ChildFailed:
        return True
    return False


async def test_an_attacker_that_has_ended_is_seen_after_the_measurement(attackers: list[Child]) -> None:
    with pytest.raises(ChildFailed, match="no-such-attack"):
        await _measured("no-such-attack", "http://127.0.0.1:1", lambda: _has_ended(attackers[0]))


async def test_what_an_attacker_did_is_in_the_figures(attackers: list[Child]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        made = await _measured("half-bodies", url, lambda: last_tally(attackers[0].output()).connections > 0)
    assert made.tally.connections > 0
    assert judged(made, 1.0) == []
