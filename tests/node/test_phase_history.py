"""The phases of one request at one instance, as its engine's pulses and its tokens tell."""

from __future__ import annotations

from baton.api.engine import StreamEnd, TokenBurst
from baton.core.engine.request import FinishReason, Phase
from baton.core.routing.events import TimelineStage
from baton.node.phase_history import NOTES_MAX, PhaseHistories, PhaseHistory, TracedTokenStream


class Clock:
    now_us = 0

    def __call__(self) -> int:
        return self.now_us


class NoSource:
    def stop(self, key: int, keep: int) -> None:
        pass

    def abort(self, key: int) -> None:
        pass


def stages(history: PhaseHistory) -> list[tuple[str, int]]:
    return [(note.stage.value, note.at_us) for note in history.stage_notes()]


def test_a_pulse_that_comes_after_the_tokens_is_put_in_its_place() -> None:
    clock = Clock()
    histories = PhaseHistories("solo", clock)
    history = histories.begin(7)
    clock.now_us = 50
    history.delivered(clock.now_us)
    clock.now_us = 100
    prefill, decode = Phase.RUNNING_PREFILL.name, Phase.RUNNING_DECODE.name
    histories.record([(7, prefill, 80), (7, decode, 79), (8, prefill, 10)])
    assert stages(history) == [("placed", 0), ("prefill", 20), ("decode", 50)]


def test_what_comes_before_the_first_token_stays_before_it_however_late_its_pulse_is_read() -> None:
    clock = Clock()
    histories = PhaseHistories("solo", clock)
    history = histories.begin(7)
    clock.now_us = 50
    history.delivered(clock.now_us)
    clock.now_us = 500  # sent at 60, when the phases were 30 and 20 old
    told = ((Phase.RESTORING, 30), (Phase.RUNNING_PREFILL, 20), (Phase.RUNNING_DECODE, 15))
    histories.record([(7, phase.name, ago_us) for phase, ago_us in told])
    assert stages(history) == [("placed", 0), ("restore", 49), ("prefill", 49), ("decode", 50)]
    histories.record([(7, Phase.WAITING.name, 5), (7, Phase.RESTORING.name, 3)])
    assert stages(history)[4:] == [("preempted", 495), ("restore", 497)], "after a preemption others come"


def test_a_preempted_request_waits_again_and_prefills_again() -> None:
    history = PhaseHistory("solo", 0)
    for phase, at_us in ((Phase.WAITING, 0), (Phase.RUNNING_PREFILL, 10)):
        history.entered(phase.name, at_us)
    history.delivered(20)
    for phase, at_us in ((Phase.PREEMPTING, 30), (Phase.WAITING, 31), (Phase.RESTORING, 40), (Phase.RUNNING_PREFILL, 50)):
        history.entered(phase.name, at_us)
    history.delivered(60)
    assert stages(history) == [
        ("placed", 0), ("prefill", 10), ("decode", 20), ("preempted", 31), ("restore", 40), ("prefill", 50), ("decode", 60),
    ]  # fmt: skip


def test_notes_are_bounded() -> None:
    history = PhaseHistory("solo", 0)
    for at_us in range(1, 1000):
        history.entered((Phase.RUNNING_PREFILL if at_us % 2 else Phase.WAITING).name, at_us)
    assert len(history.stage_notes()) == NOTES_MAX


def test_the_end_of_a_stream_has_the_history_and_later_notes_still_come_in() -> None:
    clock = Clock()
    histories = PhaseHistories("solo", clock)
    stream = TracedTokenStream(NoSource(), 7, histories)
    heard: list[TokenBurst] = []
    stream.pour(heard.append)  # type: ignore[arg-type]
    clock.now_us = 30
    stream.push(TokenBurst((1,), (), None))
    stream.push(TokenBurst((2,), (), StreamEnd(FinishReason.LENGTH, 0)))
    del stream
    histories.record([(7, Phase.RUNNING_PREFILL.name, 20)])
    ended = heard[-1].ended
    assert ended is not None
    assert ended.history is not None
    assert [note.stage for note in ended.history.stage_notes()] == [
        TimelineStage.PLACED, TimelineStage.PREFILL, TimelineStage.DECODE,
    ]  # fmt: skip
    assert heard[0].ended is None
