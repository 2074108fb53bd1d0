"""The dashboard's state: ordered by time, bounded, and only changes."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from typing import Any

import pytest

from baton.api.original_request import OriginalRequest
from baton.core.engine.ended import Bill
from baton.core.engine.gauges import SchedulerGauges, StorageGauges
from baton.core.engine.request import FinishReason
from baton.core.errors import Refusal, RefusalCode
from baton.core.routing.events import (
    ChoiceOutcome,
    DeliverTokens,
    FleetChanged,
    Instance,
    Join,
    RequestDeclined,
    TimelineNoted,
    TimelineStage,
    UnclaimedDropped,
    UnclaimedFound,
)
from baton.core.routing.identity import RequestNumber
from baton.node import choice_timeline as lanes
from baton.node import dashboard_state as state
from baton.node.choice_timeline import ChoiceTimeline
from baton.node.dashboard_state import DashboardState
from baton.node.quantiles import QuantileWindow, middle_of, size_of

S = 1_000_000


LEDGER = SchedulerGauges(
    free_blocks=90,
    evictable_blocks=4,
    running_blocks=3,
    leased_blocks=2,
    receiving_blocks=1,
    leaving_blocks=5,
    storage=StorageGauges(host_rows=40, host_used=7),
)


@dataclass
class View:
    facts: Join
    ledger: SchedulerGauges = LEDGER
    state: str = "ready"
    open: int = 0


def view(name: str = "d1", incarnation: int = 1, **changes: Any) -> View:
    facts = Join(Instance(name), incarnation, "decode", b"", "http://127.0.0.1:1", "", 8, 100, 16, 1024, 257, 4321)
    return View(facts, **changes)


def noted(
    stage: TimelineStage, where: str | None, at_us: int, why: str = "", body: int = 1, choice: int = 0
) -> TimelineNoted:
    return TimelineNoted(RequestNumber(body), choice, stage, None if where is None else Instance(where), at_us, why)


def delivered(tokens: int, body: int = 1, choice: int = 0, end: FinishReason | None = None) -> DeliverTokens:
    outcome = None if end is None else ChoiceOutcome(end, tokens, Bill())
    return DeliverTokens(RequestNumber(body), choice, [7] * tokens, None, None, outcome)


def asked(router: DashboardState, body: int = 1, at_us: int = 0, choices: int = 1) -> None:
    router.request_received(RequestNumber(body), f"r{body}", "/v1/completions", 12, choices, at_us)


def shown(router: DashboardState, since: int = 0, epoch: str | None = None, now_us: int = 100 * S) -> Any:
    """As the page reads it."""
    return json.loads(json.dumps(router.snapshot(now_us, since, router.epoch if epoch is None else epoch)))


def stages(router: DashboardState, body: int = 1, choice: int = 0) -> list[tuple[str, str]]:
    request = next(request for request in shown(router)["requests"] if request["body"] == body)
    return [(stage, where) for stage, where, *_ in request["lanes"][choice]["segments"]]


# ── a request's lane ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_life_of_a_request_that_is_moved_is_shown_stage_by_stage_with_the_tokens_it_had() -> None:
    router = DashboardState(0)
    asked(router)
    router.take(noted(TimelineStage.QUEUED, None, 1 * S), 1 * S)
    router.take(noted(TimelineStage.PLACED, "d1", 2 * S), 2 * S)
    router.take(noted(TimelineStage.PREFILL, "p1", 3 * S), 3 * S)
    router.take(noted(TimelineStage.HANDOVER, "d1", 4 * S), 4 * S)
    router.take(noted(TimelineStage.DECODE, "d1", 5 * S), 5 * S)
    router.take(delivered(37), 6 * S)
    router.take(noted(TimelineStage.MOVED, "d1", 7 * S, "lost: reset"), 7 * S)
    router.take(noted(TimelineStage.PLACED, "d2", 8 * S), 8 * S)
    router.take(delivered(3, end=FinishReason.LENGTH), 9 * S)

    [request] = shown(router)["requests"]
    [lane] = request["lanes"]
    assert lane["segments"] == [
        ["queued", "", 1 * S, 2 * S, 0, ""],
        ["placed", "d1", 2 * S, 3 * S, 0, ""],
        ["prefill", "p1", 3 * S, 4 * S, 0, ""],
        ["handover", "d1", 4 * S, 5 * S, 0, ""],
        ["decode", "d1", 5 * S, 7 * S, 0, ""],
        ["moved", "d1", 7 * S, 8 * S, 37, "lost: reset"],
        ["placed", "d2", 8 * S, 9 * S, 37, ""],
        ["decode", "d2", 9 * S, 9 * S, 37, ""],
    ]
    assert (lane["tokens"], lane["first_us"], lane["ended_us"], lane["finish"]) == (40, 6 * S, 9 * S, "length")
    assert shown(router)["totals"] == {"requests": 1, "tokens": 40, "moves": 1, "preemptions": 0, "handovers": 1}


def test_notes_that_come_with_a_late_beat_are_put_where_they_belong() -> None:
    router = DashboardState(0)
    asked(router)
    router.take(noted(TimelineStage.PLACED, "d1", 1 * S), 1 * S)
    router.take(delivered(1), 5 * S)  # before anybody has said that it decodes
    assert stages(router) == [("placed", "d1"), ("decode", "d1")]
    router.take(noted(TimelineStage.HANDOVER, "d1", 2 * S), 6 * S)
    router.take(noted(TimelineStage.DECODE, "d1", 3 * S), 6 * S)
    told = [("placed", "d1"), ("handover", "d1"), ("decode", "d1")]
    assert stages(router) == told
    [request] = shown(router)["requests"]
    assert [start for _, _, start, *_ in request["lanes"][0]["segments"]] == [1 * S, 2 * S, 3 * S]

    router.take(delivered(1, end=FinishReason.STOP), 7 * S)
    router.take(noted(TimelineStage.PREEMPTED, "d1", 6 * S), 8 * S)
    router.take(noted(TimelineStage.PLACED, "d2", 8 * S), 8 * S)
    assert stages(router) == [*told, ("preempted", "d1")], "nothing after its end"


@pytest.mark.parametrize("late", [False, True], ids=["notes first", "token first"])
def test_a_prefill_lasts_until_its_token_though_an_instance_calls_it_decoding_from_its_last_plan_on(late: bool) -> None:
    lane = ChoiceTimeline()
    lane.note(TimelineStage.PLACED, "d1", 1)
    if late:
        lane.delivered(1, 9)
    lane.note(TimelineStage.PREFILL, "d1", 2)
    lane.note(TimelineStage.DECODE, "d1", 2)
    if not late:
        lane.delivered(1, 9)
    assert [(note.stage, note.at_us) for note in lane.notes] == [
        (TimelineStage.PLACED, 1),
        (TimelineStage.PREFILL, 2),
        (TimelineStage.DECODE, 9),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_segments_follow_each_other_without_gap_in_whatever_order_the_notes_come(seed: int) -> None:
    chance = random.Random(seed)
    lane = ChoiceTimeline()
    notes = [
        (stage, where, at)
        for at, stage in enumerate(TimelineStage)
        if stage is not TimelineStage.ENDED
        for where in ("d1", "d2")
    ]
    chance.shuffle(notes)
    for stage, where, at_us in notes:
        lane.note(stage, where, at_us)
    lane.end(99, "stop")
    pieces: Any = lane.shown()["segments"]
    assert [start for _, _, start, *_ in pieces[1:]] == [end for _, _, _, end, *_ in pieces[:-1]]
    assert [piece[2] for piece in pieces] == sorted(piece[2] for piece in pieces)
    assert pieces[-1][3] == 99


def test_a_choice_that_is_moved_without_end_keeps_its_beginning_and_its_latest_notes() -> None:
    lane = ChoiceTimeline()
    for at in range(1000):
        lane.note(TimelineStage.PLACED, f"d{at % 2}", 2 * at)
        lane.note(TimelineStage.MOVED, f"d{at % 2}", 2 * at + 1)
    assert len(lane.notes) == lanes.NOTES_MAX
    assert lane.left_out == 2000 - lanes.NOTES_MAX
    kept = [note.at_us for note in lane.notes]
    assert kept == [*range(8), *range(2000 - (lanes.NOTES_MAX - 8), 2000)]


def test_each_choice_has_its_own_lane_and_the_request_ends_with_the_last() -> None:
    router = DashboardState(0)
    asked(router, choices=2)
    router.take(delivered(2, choice=1, end=FinishReason.STOP), 1 * S)
    router.sample([], 0, 2 * S)
    assert shown(router)["fleet"][-1][2] == 1, "still open"
    router.take(noted(TimelineStage.ENDED, None, 3 * S, "length"), 3 * S)
    router.sample([], 0, 4 * S)
    assert shown(router)["fleet"][-1][2] == 0
    [request] = shown(router)["requests"]
    assert [lane["finish"] for lane in request["lanes"]] == ["length", "stop"]


def test_a_declined_request_ends_with_the_reason() -> None:
    router = DashboardState(0)
    asked(router, choices=2)
    router.take(RequestDeclined(RequestNumber(1), Refusal(RefusalCode.QUEUE_FULL, "full")), 1 * S)
    [request] = shown(router)["requests"]
    assert [lane["finish"] for lane in request["lanes"]] == ["declined: queue_full"] * 2


def test_a_request_of_a_router_that_was_lost_is_shown_as_the_one_it_was() -> None:
    router = DashboardState(0)
    origin = OriginalRequest("/v1/completions", b"{}", "", "the-one", 1, 2).encode()
    router.take(noted(TimelineStage.RESUMED, "d1", 1 * S), 1 * S)
    router.take(UnclaimedFound(RequestNumber(1), origin, ((5, 6, 7), None), ((), ()), (None, None), (None, None)), 1 * S)
    router.take(delivered(1), 2 * S)
    router.take(delivered(1, choice=1, end=FinishReason.STOP), 3 * S)
    [request] = shown(router)["requests"]
    assert (request["id"], request["choices"], request["prompt_tokens"]) == ("the-one", 2, None)
    assert [(lane["tokens"], lane["first_us"]) for lane in request["lanes"]] == [(4, None), (1, None)]
    assert stages(router) == [("resumed", "d1"), ("decode", "d1")]
    router.take(UnclaimedDropped(RequestNumber(1)), 4 * S)
    [request] = shown(router)["requests"]
    assert [lane["finish"][:7] for lane in request["lanes"]] == ["dropped", "stop"]

    router.take(UnclaimedFound(RequestNumber(2), b"no origin", ((),), ((),), (None,), (None,)), 1 * S)
    assert [request["body"] for request in shown(router)["requests"]] == [1]


# ── bounds ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_of_many_requests_the_latest_are_shown_and_no_more_are_kept() -> None:
    router = DashboardState(0)
    for body in range(1, 1001):
        asked(router, body, at_us=body)
        router.take(delivered(1, body, end=FinishReason.STOP), body)
    assert [request["body"] for request in shown(router)["requests"]] == list(range(801, 1001))
    router.take(noted(TimelineStage.DECODE, "d1", 5, body=3), S)  # of one that is long forgotten
    assert len(router._requests) == state.REQUESTS_MAX


def test_open_requests_are_followed_up_to_a_bound_and_ended_ones_make_room() -> None:
    router = DashboardState(0)
    for body in range(state.OPEN_MAX + 50):
        asked(router, body)
    assert len(router._requests) == state.OPEN_MAX
    router.take(delivered(1, 0, end=FinishReason.STOP), S)
    asked(router, 9999, at_us=S)
    assert shown(router)["requests"][-1]["body"] == 9999
    assert len(shown(router)["requests"]) == state.REQUESTS_MAX


def test_samples_events_lanes_and_instances_are_bounded() -> None:
    router = DashboardState(0)
    asked(router, choices=500)
    router.take(delivered(1, choice=400), S)
    for second in range(400):
        router.sample([view()], 3, second * S)
        router.take(FleetChanged(Instance("d1"), 1, "joined", ""), second * S)
    assert len(shown(router)["ledgers"]["d1"]) == state.SAMPLES
    for number in range(100):
        router.sample([view(f"x{number}")], 0, 400 * S)
    told = shown(router)
    assert len(told["fleet"]) == state.SAMPLES
    assert len(told["events"]) == state.EVENTS_MAX
    assert len(told["requests"][0]["lanes"]) == state.LANES_MAX
    assert len(told["instances"]) <= state.INSTANCES_MAX


# ── instances ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_ledger_is_sampled_and_an_instance_that_is_lost_is_shown_as_gone_at_once_and_for_a_while() -> None:
    router = DashboardState(0)
    router.sample([view(open=2)], 5, 1 * S)
    told = shown(router)
    assert told["ledgers"] == {"d1": [[1 * S, 90, 4, 3, 2, 1, 5, 0, 0]]}
    assert told["fleet"][0][:4] == [1 * S, 5, 0, 0]
    assert (told["instances"][0]["state"], told["instances"][0]["ledger"]) == ("ready", [90, 4, 3, 2, 1, 5])
    assert (told["instances"][0]["host_used"], told["instances"][0]["host_blocks"]) == (7, 40)

    router.take(FleetChanged(Instance("d1"), 1, "lost", "reset"), 2 * S)
    assert shown(router)["instances"][0]["state"] == "gone"
    assert shown(router)["events"] == [{"at_us": 2 * S, "name": "d1", "incarnation": "1", "what": "lost", "why": "reset"}]
    router.sample([], 0, 200 * S)
    assert len(shown(router)["instances"]) == 1
    router.sample([], 0, 302 * S)
    assert shown(router)["instances"] == []


def test_lives_are_counted_and_the_fencing_of_an_older_one_does_not_take_the_newer_out() -> None:
    router = DashboardState(0)
    router.sample([view(incarnation=2**62)], 0, 1 * S)
    router.sample([view(incarnation=2**62 + 1)], 0, 2 * S)
    router.take(FleetChanged(Instance("d1"), 2**62, "fenced", "a later life is known"), 3 * S)
    [instance] = shown(router)["instances"]
    assert (instance["lives"], instance["state"]) == (2, "ready")
    assert instance["incarnation"] == str(2**62 + 1), "as text: JavaScript has no such number"


# ── only what is new ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_snapshot_since_a_revision_has_only_what_changed_after_it() -> None:
    router = DashboardState(0)
    asked(router, 1)
    asked(router, 2)
    router.sample([view()], 0, 1 * S)
    rev = shown(router)["rev"]
    quiet = shown(router, rev)
    assert (quiet["requests"], quiet["fleet"], quiet["ledgers"], quiet["events"]) == ([], [], {"d1": []}, [])
    router.take(delivered(1, 2), 2 * S)
    router.sample([view()], 0, 2 * S)
    later = shown(router, rev)
    assert [request["body"] for request in later["requests"]] == [2]
    assert [row[0] for row in later["ledgers"]["d1"]] == [2 * S]


def test_a_page_of_another_run_of_the_router_is_told_everything() -> None:
    router = DashboardState(5)
    asked(router)
    assert shown(router, since=10_000, epoch="4")["requests"]
    assert shown(router, since=10_000)["requests"], "a revision that this one never had"


# ── times ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_times_to_the_first_token_and_between_tokens_are_those_that_a_client_sees() -> None:
    router = DashboardState(0)
    for body in range(100):
        asked(router, body, at_us=S)
        router.take(delivered(1, body), S + (body + 1) * 1000)
        router.take(delivered(4, body), S + (body + 1) * 1000 + 40_000)  # four at once: 10 ms each
    router.sample([], 0, 2 * S)
    _, _, _, tokens, ttft50, ttft95, tpot50, tpot95, _ = shown(router)["fleet"][-1]
    assert tokens == 500
    assert ttft50 == pytest.approx(50_000, rel=0.04)
    assert ttft95 == pytest.approx(95_000, rel=0.04)
    assert tpot50 == tpot95 == pytest.approx(10_000, rel=0.04)


def test_quantiles_are_within_a_32nd_of_the_exact_ones() -> None:
    chance = random.Random(7)
    window = QuantileWindow(60)
    values = sorted(int(chance.lognormvariate(9, 2)) for _ in range(5000))
    for value in values:
        window.add(value, S)
    fractions = (0.01, 0.5, 0.9, 0.99, 1.0)
    exact = [values[math.ceil(fraction * 5000) - 1] for fraction in fractions]
    found = window.quantiles(fractions, S)
    assert found == [pytest.approx(value, rel=1 / 32, abs=0.5) for value in exact]


def test_a_window_forgets_and_one_without_measurements_says_so() -> None:
    window = QuantileWindow(10)
    assert window.quantiles((0.5,), 0) == [None]
    window.add(5, 0)
    window.add(9, 9 * S)
    assert window.quantiles((0.0, 1.0), 9 * S) == [5, 9]
    assert window.quantiles((0.0, 1.0), 10 * S) == [9, 9]
    assert window.quantiles((0.5,), 19 * S) == [None]
    assert len(window._counts) == 0


def test_weights_count_as_so_many_measurements() -> None:
    window = QuantileWindow()
    window.add(1, S, weight=9)
    window.add(20, S)
    assert window.quantiles((0.5, 0.9, 0.95), S) == [1, 1, 20]


def test_buckets_rise_with_what_they_hold_and_are_bounded() -> None:
    values = [0, 1, 31, 32, 33, 63, 64, 1000, 10**6, 2**42 - 1]
    assert [size_of(value) for value in values] == sorted(size_of(value) for value in values)
    assert [middle_of(size_of(value)) for value in values[:3]] == [0, 1, 31]
    assert size_of(-5) == 0
    assert size_of(10**30) == size_of(2**42 - 1) < 1000


def test_phases_add_up_over_all_instances_and_wait_for_no_late_note() -> None:
    lane = ChoiceTimeline()
    lane.note(TimelineStage.QUEUED, "", 0)
    lane.note(TimelineStage.PLACED, "a", 10)
    lane.note(TimelineStage.PREFILL, "a", 30)
    lane.delivered(1, 100)
    lane.note(TimelineStage.MOVED, "a", 300)
    lane.note(TimelineStage.PLACED, "b", 340)
    lane.delivered(1, 400)
    lane.end(1_000, "abort")
    assert lane.phases() == (30 + 40, 70 + 60, 200 + 600)
