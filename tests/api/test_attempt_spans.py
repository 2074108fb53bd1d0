"""Attempts and intervals, from notes and from bills: where they lie, whatever was noted."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from baton.api.tracing.attempts import TracedAttempt, attempts_of
from baton.api.tracing.request_trace import AnswerFacts, AskedParameters, FinishedTrace, RequestTrace
from baton.api.tracing.spans import FinishedSpan, spans_of
from baton.api.tracing.stage_notes import StageNote
from baton.api.tracing.trace_context import TraceContext
from baton.core.engine.ended import Bill
from baton.core.routing.events import TimelineStage as Stage

MOVED = [
    StageNote(Stage.QUEUED, "", 10),
    StageNote(Stage.PLACED, "d1", 20),
    StageNote(Stage.HANDOVER, "d1", 30, "from p1"),
    StageNote(Stage.DECODE, "d1", 60),
    StageNote(Stage.PREEMPTED, "d1", 70),
    StageNote(Stage.PREFILL, "d1", 80),
    StageNote(Stage.DECODE, "d1", 90),
    StageNote(Stage.MOVED, "d1", 100, "lost: d1 was lost: the connection was closed"),
    StageNote(Stage.PLACED, "d2", 120),
    StageNote(Stage.RESUMED, "d2", 121),
    StageNote(Stage.RESTORE, "d2", 130),
    StageNote(Stage.PREFILL, "d2", 140),
    StageNote(Stage.DECODE, "d2", 150),
]


def shown(attempt: TracedAttempt) -> list[tuple[str, str, int, int]]:
    return [(one.name, one.where, one.began_us, one.ended_us) for one in attempt.intervals]


def test_a_moved_choice_has_an_attempt_for_each_place_without_a_gap_between() -> None:
    first, second = attempts_of(MOVED, 5, 200, None)
    assert (first.began_us, first.ended_us, first.where, first.cause) == (10, 100, "d1", "lost")
    assert first.reason == "d1 was lost: the connection was closed"
    assert (second.began_us, second.ended_us, second.where, second.cause) == (100, 200, "d2", "")
    assert shown(first) == [
        ("queue", "", 10, 20), ("queue", "d1", 20, 30), ("handover", "d1", 30, 60), ("decode", "d1", 60, 70),
        ("preempted", "d1", 70, 80), ("prefill", "d1", 80, 90), ("decode", "d1", 90, 100),
    ]  # fmt: skip
    assert shown(second) == [
        ("queue", "", 100, 120), ("queue", "d2", 120, 130), ("restore", "d2", 130, 140), ("prefill", "d2", 140, 150),
        ("decode", "d2", 150, 200),
    ]  # fmt: skip


def test_the_bill_tells_the_prefill_of_a_peer_from_the_transfer() -> None:
    (attempt,) = attempts_of(MOVED[:4], 5, 200, Bill(transfer_us=8, attempts=1))
    assert shown(attempt)[2:] == [("prefill", "p1", 30, 52), ("handover", "d1", 52, 60), ("decode", "d1", 60, 200)]


def test_the_bill_of_several_attempts_is_not_taken_for_that_of_the_last() -> None:
    notes = [*MOVED[:7], StageNote(Stage.PREEMPTED, "d1", 95, "preempted: no room"), *MOVED[8:9]]
    notes += [StageNote(Stage.HANDOVER, "d2", 130), StageNote(Stage.DECODE, "d2", 150)]
    *_, last = attempts_of(notes, 5, 200, Bill(transfer_us=8, attempts=2))
    assert ("handover", "d2", 130, 150) in shown(last)


def test_a_choice_that_moved_and_ended_while_it_waited_has_no_empty_attempt() -> None:
    assert [one.cause for one in attempts_of(MOVED[:8], 5, 100, None)] == ["lost"]
    assert [one.where for one in attempts_of(MOVED[:8], 5, 110, None)] == ["d1", ""]


def test_a_choice_that_is_found_where_it_was_has_an_attempt_there() -> None:
    notes = [StageNote(Stage.RESUMED, "d1", 10), StageNote(Stage.DECODE, "d1", 30)]
    (attempt,) = attempts_of(notes, 20, 100, None)
    assert (attempt.where, attempt.began_us, shown(attempt)) == ("d1", 20, [("decode", "d1", 30, 100)])


def test_without_notes_the_bill_tells_the_stages_in_their_usual_order() -> None:
    bill = Bill(queue_us=10, transfer_us=20, prefill_us=30, decode_us=100)
    (attempt,) = attempts_of((), 0, 150, bill, "solo")
    assert shown(attempt) == [
        ("queue", "solo", 0, 10), ("restore", "solo", 10, 30), ("prefill", "solo", 30, 60), ("decode", "solo", 60, 150),
    ]  # fmt: skip
    bill = Bill(queue_us=10, transfer_us=20, prefill_us=30, decode_us=100, attempts=1)
    assert [name for name, *_ in shown(attempts_of((), 0, 150, bill)[0])] == ["queue", "prefill", "handover", "decode"]


def test_sums_over_a_preemption_are_not_taken_for_intervals() -> None:
    (attempt,) = attempts_of((), 0, 150, Bill(queue_us=10, decode_us=100, preemptions=1))
    assert attempt.intervals == []


WHERE = st.sampled_from(["", "a", "b"])
WHY = st.sampled_from(["", "lost: gone", "refused: full", "from p"])
NOTES = st.lists(st.builds(StageNote, st.sampled_from(Stage), WHERE, st.integers(-50, 300), WHY), max_size=30)
TIMES = st.integers(0, 100)
BILLS = st.none() | st.builds(
    Bill, queue_us=TIMES, prefill_us=TIMES, transfer_us=TIMES, decode_us=TIMES, attempts=st.integers(0, 2)
)


@given(notes=NOTES, ended_us=st.integers(0, 250), bill=BILLS)
def test_intervals_lie_in_their_attempt_and_attempts_in_the_request_whatever_was_noted(
    notes: list[StageNote], ended_us: int, bill: Bill | None
) -> None:
    attempts = attempts_of(notes, 0, ended_us, bill)
    assert all(0 <= one.began_us <= one.ended_us <= ended_us for one in attempts)
    assert all(before.ended_us == after.began_us for before, after in pairwise(attempts))
    for attempt in attempts:
        assert all(attempt.began_us <= one.began_us <= one.ended_us <= attempt.ended_us for one in attempt.intervals)
        assert all(before.ended_us <= after.began_us for before, after in pairwise(attempt.intervals))


# ── spans ────────────────────────────────────────────────────────────────────────────────────────────────────────────────

ASKED = AskedParameters("chat", None, "chatcmpl-x", "smollm2", True, 2, temperature=0.5, max_tokens=7)


def finished(status: int = 200, notes: int = 1, resumed: bool = False) -> FinishedTrace:
    trace = RequestTrace(TraceContext("a" * 32, "b" * 16, True), "", "POST", "/v1/chat/completions", 0, "id", "t")
    trace.status, trace.ended_us, trace.asked, trace.resumed = status, 200, ASKED, resumed
    trace.answer = AnswerFacts(["stop", "length"], 3, 9, 2, Bill(preemptions=1), [None] * notes, [None] * notes)
    return FinishedTrace(trace, (tuple(MOVED),) * notes, 1_000_000)


def named(spans: list[FinishedSpan], name: str) -> list[FinishedSpan]:
    return [span for span in spans if span.name == name]


def test_each_attempt_is_linked_to_the_one_before_of_its_choice() -> None:
    spans = spans_of(finished(notes=2))
    assert spans[0].is_server
    assert len({span.context.span_id for span in spans}) == len(spans)
    for choice in (0, 1):
        first, second = [one for one in named(spans, "attempt") if one.attributes["baton.choice"] == choice]
        assert first.links == ()
        assert [link.to for link in second.links] == [first.context]
        assert second.links[0].attributes == {"baton.move.cause": "lost"}
        assert (first.failure, first.attributes["error.type"], second.failure) == ("lost", "lost", "")


def test_times_are_unix_times() -> None:
    server = spans_of(finished())[0]
    assert (server.began_ns, server.ended_ns) == (1_000_000_000, 1_000_200_000)


def test_attributes_that_nobody_gave_are_left_out() -> None:
    attributes = spans_of(finished())[0].attributes
    assert attributes["gen_ai.request.model"] == attributes["gen_ai.response.model"] == "smollm2"
    assert attributes["gen_ai.request.choice.count"] == 2
    assert attributes["baton.preemptions"] == 1
    assert not attributes.keys() & {"gen_ai.request.top_p", "gen_ai.request.seed", "error.type", "baton.resumed"}


def test_only_errors_of_the_server_are_failures() -> None:
    by_status = {status: spans_of(finished(status))[0] for status in (200, 429, 503)}
    assert {status: span.failure for status, span in by_status.items()} == {200: "", 429: "", 503: "503"}
    assert {status: span.attributes.get("error.type") for status, span in by_status.items()} == {
        200: None, 429: "429", 503: "503",
    }  # fmt: skip


def test_a_stream_that_fails_after_its_first_bytes_is_a_failure_though_its_status_was_sent() -> None:
    given = finished()
    given.trace.fail("request_failed", 503)
    server = spans_of(given)[0]
    assert (server.failure, server.attributes["http.response.status_code"]) == ("request_failed", 200)


def test_a_bill_of_an_answer_that_ended_before_it_was_resumed_makes_no_attempt() -> None:
    given = finished(resumed=True)
    assert len(spans_of(FinishedTrace(given.trace, ((),), 0))) == 1
