"""The verdict on how quickly trouble is seen: what is beyond a limit fails the command."""

from __future__ import annotations

import pytest
import typer

from benchmarks import health
from benchmarks.health import AloneFigures, HttpAnswer, RoutedFigures, SlowFigures

GOOD, BAD = HttpAnswer(200, "{}"), HttpAnswer(503, "no instance")


def measured(
    monkeypatch: pytest.MonkeyPatch,
    *,
    alone_s: float = 3.1,
    routed_s: float = 0.7,
    router_s: float = 0.5,
    left_s: float = 0.5,
    answer: HttpAnswer = GOOD,
    slow: SlowFigures | None = None,
) -> int:
    """The exit code of the command by these figures."""
    seen = AloneFigures(alone_s, BAD, BAD, BAD, BAD, 1, "")
    monkeypatch.setattr(health, "alone", lambda: seen)
    monkeypatch.setattr(health, "routed", lambda **_: RoutedFigures(routed_s, 12.0, [answer]))
    monkeypatch.setattr(health, "router_back", lambda: router_s)
    monkeypatch.setattr(health, "left", lambda: left_s)
    monkeypatch.setattr(health, "slow_steps", lambda *_: slow or SlowFigures(30.0, answers=[GOOD]))
    with pytest.raises(typer.Exit) as ended:
        health.health()
    return ended.value.exit_code


def test_within_all_limits_it_ends_well(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert measured(monkeypatch) == 0
    assert "/health answers 503 after 3.10 s (limit 5 s)" in capsys.readouterr().out


@pytest.mark.parametrize("late", ["alone_s", "routed_s", "router_s", "left_s"])
def test_what_takes_longer_than_its_limit_fails_it(
    late: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measured(monkeypatch, **{late: 5.5}) == 1  # type: ignore[arg-type]
    assert "FAILED" in capsys.readouterr().err


def test_a_complaint_or_an_answer_that_failed_fails_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(monkeypatch, answer=BAD) == 1
    assert measured(monkeypatch, slow=SlowFigures(30.0, complaints=["/health: 503"], answers=[GOOD])) == 1
    assert measured(monkeypatch, slow=SlowFigures(30.0, answers=[BAD])) == 1
