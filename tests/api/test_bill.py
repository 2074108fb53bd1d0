"""`priority` and `baton_usage`: what a request may ask of the scheduler, and what it is told of its cost."""

from __future__ import annotations

import threading

import pytest

from baton.core.engine.ended import Bill
from baton.core.engine.request import Submission
from tests.api.conftest import Served
from tests.api.engine import ScriptedEngine
from tests.support.waiting import wait_until

BILL = Bill(
    cached_tokens=3,
    computed_tokens=20,
    recomputed_tokens=7,
    restored_tokens=64,
    preemptions=2,
    attempts=1,
    queue_us=1500,
    prefill_us=2500,
    transfer_us=500,
    decode_us=30_000,
)
AS_JSON = {
    "cached_tokens": 3,
    "computed_tokens": 20,
    "recomputed_tokens": 7,
    "restored_tokens": 64,
    "preemptions": 2,
    "attempts": 1,
    "queue_ms": 1.5,
    "prefill_ms": 2.5,
    "transfer_ms": 0.5,
    "decode_ms": 30.0,
}


@pytest.fixture
def billing(engine: ScriptedEngine) -> ScriptedEngine:
    engine.bill = lambda _: BILL
    return engine


@pytest.mark.parametrize("priority", [0, 7, 1000])
def test_every_choice_has_the_priority_that_was_asked_for(served: Served, engine: ScriptedEngine, priority: int) -> None:
    assert served.chat(priority=priority, n=2).status == 200
    assert served.complete(priority=priority, prompt=["a", "b"], max_tokens=1).status == 200
    assert {submission.priority for group in engine.groups for submission in group} == {priority}


def test_a_client_cannot_step_ahead_of_the_default(served: Served) -> None:
    reply = served.chat(priority=-1)
    assert reply.status == 400
    assert reply.json()["error"]["param"] == "priority"


@pytest.mark.parametrize("fields", [{}, {"priority": None}])
def test_the_priority_is_0_unless_asked_for(served: Served, engine: ScriptedEngine, fields: dict[str, object]) -> None:
    served.chat(**fields)
    assert engine.groups[0][0].priority == 0


def test_an_answer_has_its_bill_only_when_asked(served: Served, billing: ScriptedEngine) -> None:
    assert served.chat(baton_usage=True).json()["usage"]["baton"] == AS_JSON
    assert served.complete(baton_usage=True).json()["usage"]["baton"] == AS_JSON
    assert "baton" not in served.chat().json()["usage"]
    assert "baton" not in served.chat(baton_usage=False).json()["usage"]


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": False}}])
def test_a_stream_that_asks_for_the_bill_ends_with_it(
    served: Served, billing: ScriptedEngine, options: dict[str, object]
) -> None:
    *_, usage, done = served.chat(stream=True, baton_usage=True, **options).events()
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["baton"] == AS_JSON


def test_a_stream_that_does_not_ask_has_none(served: Served, billing: ScriptedEngine) -> None:
    events = served.chat(stream=True, stream_options={"include_usage": True}).events()
    assert "baton" not in events[-2]["usage"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("burst", [1, 100])
def test_an_answer_cut_by_a_stop_string_has_its_bill_and_nothing_after_the_cut(
    served: Served, billing: ScriptedEngine, stream: bool, burst: int
) -> None:
    billing.burst_tokens = burst
    billing.pause_s = 0.005
    reply = served.complete(stop="world", stream=stream, baton_usage=True)
    if stream:
        events = reply.events()
        assert "".join(choice["text"] for event in events[:-1] for choice in event["choices"]) == "hello "
        usage = events[-2]["usage"]
    else:
        assert reply.json()["choices"][0]["text"] == "hello "
        usage = reply.json()["usage"]
    assert usage["baton"] == AS_JSON
    assert usage["completion_tokens"] == billing.streams[0].kept == 2
    assert not billing.streams[0].aborted


def test_of_several_choices_counts_are_summed_and_the_longest_times_told(served: Served, engine: ScriptedEngine) -> None:
    def bill(submission: Submission) -> Bill:
        choice = submission.sampling.choice
        times = {"queue_us": 5000 - 1000 * choice, "prefill_us": 1000 * choice, "decode_us": 9000}
        return Bill(1, 10 + choice, choice, 16, 1, attempts=1, **times)

    engine.bill = bill
    usage = served.complete(prompt=["a", "b"], n=2, baton_usage=True).json()["usage"]
    assert usage["baton"] == {
        "cached_tokens": 4,
        "computed_tokens": 42,
        "recomputed_tokens": 2,
        "restored_tokens": 64,
        "preemptions": 4,
        "attempts": 4,
        "queue_ms": 5.0,
        "prefill_ms": 1.0,
        "transfer_ms": 0.0,
        "decode_ms": 9.0,
    }


def test_a_cancelled_answer_has_its_bill_too(served: Served, billing: ScriptedEngine) -> None:
    billing.hangs_after = 2
    replies = []
    headers = {"X-Request-Id": "long"}
    thread = threading.Thread(target=lambda: replies.append(served.chat(headers=headers, baton_usage=True)))
    thread.start()
    wait_until(lambda: len(billing.streams) == 1)
    assert served.call("DELETE", "/v1/requests/long").status == 200
    thread.join(10)
    answer = replies[0].json()
    assert answer["choices"][0]["finish_reason"] == "abort"
    assert answer["usage"]["baton"] == AS_JSON


def test_an_engine_that_dies_after_the_last_token_costs_the_bill_but_not_the_answer(
    served: Served, billing: ScriptedEngine
) -> None:
    billing.dies_after = 2
    billing.pause_s = 0.005
    answer = served.complete(stop="world", baton_usage=True).json()
    assert answer["choices"][0]["text"] == "hello "
    assert answer["usage"]["baton"] is None
