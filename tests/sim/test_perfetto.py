from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.sim.perfetto import timeline, write_timeline
from baton.sim.run_records import RequestOutcome, RunRecord, SimulatedRequest, StepSpan
from tests.sim.made_records import busy_hour, record, request_record, sample


def written(tmp_path: Path, made: RunRecord) -> dict[str, Any]:
    write_timeline(tmp_path / "t.json", made)
    loaded: dict[str, Any] = json.loads((tmp_path / "t.json").read_text())
    return loaded


def events_of(loaded: dict[str, Any], ph: str) -> list[dict[str, Any]]:
    return [event for event in loaded["traceEvents"] if event["ph"] == ph]


def small() -> RunRecord:
    made = record(
        replace(request_record(0, 1_000, 500, 10), prefill_us=200),
        replace(request_record(1, 2_000, 900, 10), preemptions=3, instance=1),
        SimulatedRequest(2, 3_000, 50, ended_us=3_500, outcome=RequestOutcome.REFUSED),
        instances=2,
    )
    made.spans = [
        StepSpan(0, 1, 1_100, 1_400, 0, 2048),
        StepSpan(0, 2, 1_400, 1_500, 7, 0),
        StepSpan(1, 1, 2_000, 2_700, 7, 512),
    ]
    made.samples = [sample(at, instance) for at in (0, 1_000) for instance in (0, 1)]
    return made


def test_every_event_has_what_its_kind_needs(tmp_path: Path) -> None:
    loaded = written(tmp_path, busy_hour(instances=3, count=2_000))
    assert loaded["displayTimeUnit"] == "ms"
    named = {event["pid"] for event in events_of(loaded, "M") if event["name"] == "process_name"}
    assert len(named) == 4
    needs = {
        "X": {"ts", "dur", "tid"},
        "C": {"ts", "args"},
        "b": {"ts", "id", "cat"},
        "e": {"ts", "id", "cat"},
        "M": {"args"},
    }
    for event in loaded["traceEvents"]:
        assert needs[event["ph"]] <= event.keys()
        assert event["pid"] in named
        assert all(isinstance(event[key], int) and event[key] >= 0 for key in ("ts", "dur", "tid") if key in event)


def test_async_slices_of_an_id_open_and_close_like_brackets(tmp_path: Path) -> None:
    open_names: dict[tuple[int, str], list[str]] = {}
    last_us: dict[tuple[int, str], int] = {}
    for event in written(tmp_path, busy_hour(instances=3, count=2_000))["traceEvents"]:
        if event["ph"] not in "be":
            continue
        key = event["pid"], event["id"]
        assert event["ts"] >= last_us.get(key, 0)
        last_us[key] = event["ts"]
        if event["ph"] == "b":
            open_names.setdefault(key, []).append(event["name"])
        else:
            assert open_names[key].pop() == event["name"]
    assert len(open_names) == 2_000
    assert not any(open_names.values())


def test_steps_of_a_device_do_not_overlap(tmp_path: Path) -> None:
    end_us: dict[int, int] = {}
    for event in events_of(written(tmp_path, busy_hour(instances=3, count=2_000)), "X"):
        assert event["ts"] >= end_us.get(event["pid"], 0)
        end_us[event["pid"]] = event["ts"] + event["dur"]


def test_steps_are_named_by_what_they_do(tmp_path: Path) -> None:
    steps = events_of(written(tmp_path, small()), "X")
    assert [(step["name"], step["pid"], step["ts"], step["dur"]) for step in steps] == [
        ("prefill 2048 + 0", 2, 1_100, 300),
        ("decode 7", 2, 1_400, 100),
        ("prefill 512 + 7", 3, 2_000, 700),
    ]


def test_a_request_is_queue_prefill_and_decode(tmp_path: Path) -> None:
    begins = events_of(written(tmp_path, small()), "b")
    mine = [(event["name"], event["ts"]) for event in begins if event["id"] == "0"]
    assert mine == [("request", 1_000), ("queue", 1_000), ("prefill", 1_300), ("decode", 1_500)]


def test_a_preemption_shows_and_nothing_is_made_up_about_it(tmp_path: Path) -> None:
    begins = [event for event in events_of(written(tmp_path, small()), "b") if event["id"] == "1"]
    assert [event["name"] for event in begins] == ["request", "queue and prefill", "decode, preempted"]
    assert begins[0]["args"]["preemptions"] == 3


def test_a_refused_request_is_the_front_ends(tmp_path: Path) -> None:
    begins = [event for event in events_of(written(tmp_path, small()), "b") if event["id"] == "2"]
    assert [(event["name"], event["pid"]) for event in begins] == [("request", 1), ("no token", 1)]


def test_counters_hold_the_whole_pool(tmp_path: Path) -> None:
    counters = events_of(written(tmp_path, small()), "C")
    assert Counter(event["name"] for event in counters) == {"KV blocks": 4, "requests": 4, "preemptions": 4}
    assert all(sum(event["args"].values()) == 100 for event in counters if event["name"] == "KV blocks")


def test_a_timeline_is_bounded_and_says_what_is_missing() -> None:
    made = small()
    made.spans_left_out = 10
    made.requests.append(SimulatedRequest(3, 3_000, 50))  # never ended, so there is no slice to draw
    bounded, left_out = timeline(made, steps_max=2, requests_max=1, samples_max=2)
    assert (left_out.steps, left_out.requests, left_out.samples) == (11, 3, 2)
    assert left_out.told == "Left out of the timeline to keep it small: 11 steps, 3 requests, 2 looks."
    assert bounded.about["steps left out"] == 11
    assert sum(event.ph == "X" for event in bounded.events) == 2
    assert {event.ts for event in bounded.events if event.ph == "C"} == {0}


@pytest.mark.parametrize("made", [RunRecord("empty", 0, 1, 100, 16), record(request_record(0, 0, 100, 100))])
def test_little_is_still_a_timeline(made: RunRecord, tmp_path: Path) -> None:
    assert written(tmp_path, made)["otherData"]["requests left out"] == 0
    assert timeline(made)[1].told is None
