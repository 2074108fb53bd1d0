"""Health tells the truth, with real processes: what hangs is seen and replaced, what is slow is left in peace.

`benchmarks/health.py` measures; here are the limits, with three times the room for a busy machine. `python -m benchmarks
health` shows the exact figures.
"""

from __future__ import annotations

import pytest

from benchmarks import health
from benchmarks.health import HttpAnswer

ROOM = 3

pytestmark = [pytest.mark.slow, pytest.mark.timed]


def _is_retryable(answer: HttpAnswer) -> bool:
    error = answer.json()["error"]
    return answer.status == 503 and error["type"] == "engine_dead" and error["retryable"] is True


def test_a_lone_engine_that_stands_still_is_seen_and_ends_the_server_with_the_reason() -> None:
    seen = health.alone()
    assert seen.seen_s < 5 * ROOM
    assert all(map(_is_retryable, (seen.health, seen.ready, seen.whole)))
    assert "no beat of the engine for 3." in seen.health.json()["error"]["message"]
    events = [line for line in seen.streamed.body.splitlines() if line.startswith("data:")]
    assert [event for event in events if '"error"' in event] == events[-1:], "one error, the last event"
    assert '"retryable":true' in events[-1]
    assert seen.exit_code == 1
    assert "the engine died: it stalled and was killed; no beat of the engine" in seen.output


@pytest.mark.parametrize("whole_instance", [False, True], ids=["engine", "instance"])
def test_what_hangs_behind_a_router_is_taken_out_and_started_again_and_no_answer_suffers(whole_instance: bool) -> None:
    seen = health.routed(whole_instance=whole_instance)
    assert seen.seen_s < 5 * ROOM
    assert [answer.status for answer in seen.answers] == [200] * 4
    assert {answer.json()["usage"]["completion_tokens"] for answer in seen.answers} == {600}


def test_a_router_that_was_killed_has_its_instances_again_two_seconds_after_its_port() -> None:
    assert health.router_back() < 2 * ROOM


def test_three_seconds_after_its_client_left_nothing_is_held_on_either_side() -> None:
    assert health.left() < 3 * ROOM


def test_steps_longer_than_the_limit_for_silence_are_no_alarm() -> None:
    slow = health.slow_steps(4.0, 4, "--stall-timeout", "1")
    assert slow.complaints == []
    assert [answer.status for answer in slow.answers] == [200]
    assert slow.served_s > 12
