"""Answers through a router are those of one instance, whatever happens to the instances meanwhile."""

from __future__ import annotations

import http.client
import json
import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from baton.api.model_text import ModelText
from baton.api.settings import ApiSettings
from baton.cli.reference import metric_rows
from baton.core.routing.config import RouterConfig
from tests.api.conftest import Reply, Served
from tests.bench.test_dashboard import DASHBOARD
from tests.router.fleet import ROUTER, Fleet
from tests.router.fleet import fleet as running
from tests.support.waiting import wait_until

ASK: dict[str, Any] = {"prompt": "hello world, 你好", "max_tokens": 40, "seed": 7, "ignore_eos": True}


def data_of(reply: Reply) -> list[Any]:
    """Events of a stream, without their ids."""
    lines = [line.removeprefix("data: ") for line in reply.body.decode().split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def ids_of(reply: Reply) -> list[str]:
    return [line.removeprefix("id: ") for line in reply.body.decode().split("\n") if line.startswith("id: ")]


def comparable(answer: Any) -> Any:
    """Without the fields that differ between requests."""
    return {key: value for key, value in answer.items() if key not in ("id", "created")}


def joined(events: list[Any], chat: bool) -> tuple[dict[int, str], dict[int, list[int]], dict[int, str], Any]:
    """Text, tokens and finish by choice, and the usage."""
    texts: dict[int, str] = {}
    tokens: dict[int, list[int]] = {}
    finish: dict[int, str] = {}
    usage = None
    for event in events[:-1]:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + (choice["delta"].get("content", "") if chat else choice["text"])
            tokens.setdefault(index, []).extend(choice["token_ids"])
            if choice["finish_reason"]:
                assert index not in finish
                finish[index] = choice["finish_reason"]
    return texts, tokens, finish, usage


def ask(served: Served, chat: bool, headers: dict[str, str] | None = None, **fields: Any) -> Reply:
    body = ASK | fields
    if not chat:
        return served.complete(headers, **body)
    return served.chat(headers, messages=[{"role": "user", "content": body.pop("prompt")}], **body)


@contextmanager
def asking(served: Served, chat: bool = False, headers: dict[str, str] | None = None, **fields: Any) -> Iterator[Any]:
    """A request that is open: yields the response once its head is there."""
    body = ASK | {"model": "tiny"} | fields
    if chat:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    try:
        path = "/v1/chat/completions" if chat else "/v1/completions"
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"} | (headers or {}))
        yield connection
    finally:
        connection.close()


def finished(connection: http.client.HTTPConnection) -> Reply:
    response = connection.getresponse()
    return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_goes_on_when_its_instance_is_killed(fleet: Fleet, chat: bool, n: int) -> None:
    asked = {"stream": True, "n": n, "return_token_ids": True, "stream_options": {"include_usage": True}}
    fleet.add("a")
    undisturbed = joined(data_of(ask(fleet.served, chat, **asked)), chat)
    fleet.members["a"].allowed = fleet.members["a"].given + 11
    with asking(fleet.served, chat, **asked) as connection:
        wait_until(lambda: fleet.members["a"].given >= fleet.members["a"].allowed)
        fleet.add("b")
        fleet.kill("a")
        reply = finished(connection)
    events = data_of(reply)
    texts, tokens, finish, usage = joined(events, chat)
    assert events.count("[DONE]") == 1
    assert (texts, tokens, finish) == undisturbed[:3]
    assert {key: usage[key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")} == {
        key: undisturbed[3][key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")
    }
    assert fleet.router.counts.retries["lost"] == n


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
def test_a_whole_answer_with_logprobs_is_the_same_after_a_kill(fleet: Fleet, chat: bool) -> None:
    asked = {"n": 2, "logprobs": True if chat else 1, "return_token_ids": True}
    fleet.add("a")
    undisturbed = comparable(ask(fleet.served, chat, **asked).json())
    fleet.kill("a")
    fleet.add("b", allowed=13)
    with asking(fleet.served, chat, **asked) as connection:
        wait_until(lambda: fleet.members["b"].given >= 13)
        fleet.add("c")
        fleet.kill("b")
        again = comparable(finished(connection).json())
    assert again == undisturbed
    content = again["choices"][1]["logprobs"]
    assert len(content["content"] if chat else content["token_logprobs"]) == 40


def test_a_stop_string_that_spans_a_move_ends_the_answer_where_it_does(fleet: Fleet) -> None:
    fleet.add("a")
    whole = ask(fleet.served, False, return_token_ids=True).json()["choices"][0]
    stop = whole["text"][17:21]
    expected = comparable(ask(fleet.served, False, stop=[stop], return_token_ids=True).json())
    assert expected["choices"][0]["finish_reason"] == "stop"
    cut = len(expected["choices"][0]["token_ids"]) - 2
    fleet.members["a"].allowed = fleet.members["a"].given + cut
    with asking(fleet.served, stop=[stop], return_token_ids=True) as connection:
        wait_until(lambda: fleet.members["a"].given >= fleet.members["a"].allowed)
        fleet.add("b")
        fleet.kill("a")
        again = comparable(finished(connection).json())
    again["usage"].pop("prompt_tokens_details")
    expected["usage"].pop("prompt_tokens_details")
    assert again == expected


@pytest.fixture
def impatient(text: ModelText) -> Iterator[Fleet]:
    """A fleet that does not resume requests."""
    config = RouterConfig(beat_us=ROUTER.beat_us, suspect_us=ROUTER.suspect_us, loss_retry_count=0, absent_us=0)
    with running(text, ApiSettings(served_model_names=("tiny",)), config) as made:
        yield made


@pytest.mark.parametrize("with_ids", [False, True])
def test_when_retries_run_out_a_whole_answer_is_a_structured_error(impatient: Fleet, with_ids: bool) -> None:
    impatient.add("a", allowed=9)
    with asking(impatient.served, return_token_ids=with_ids) as connection:
        wait_until(lambda: impatient.members["a"].given >= 9)
        impatient.kill("a")
        reply = finished(connection)
    error = reply.json()["error"]
    assert reply.status == 503
    assert error["message"].startswith("PD Error 501")
    assert (error["code"], error["stage"], error["retryable"]) == (501, "decode", True)
    assert [len(ids) for ids in error["generated_token_ids"]] == [9] if with_ids else "generated_token_ids" not in error


def test_when_retries_run_out_a_stream_ends_with_one_error_event_and_no_done(impatient: Fleet) -> None:
    impatient.add("a", allowed=9)
    with asking(impatient.served, stream=True) as connection:
        wait_until(lambda: impatient.members["a"].given >= 9)
        impatient.kill("a")
        events = data_of(finished(connection))
    assert ["error" in event for event in events].count(True) == 1
    assert events[-1]["error"]["message"].startswith("PD Error")
    assert all(choice["finish_reason"] is None for event in events[:-1] for choice in event["choices"])


def test_without_an_instance_a_request_is_a_503_and_ready_says_what_is_missing(impatient: Fleet) -> None:
    ready = impatient.served.call("GET", "/ready")
    assert (ready.status, ready.error["code"]) == (503, "no_instance")
    assert "mixed or decode" in ready.error["message"]
    refused = ask(impatient.served, False)
    assert (refused.status, refused.error["code"]) == (503, "no_instance")
    assert int(refused.headers["retry-after"]) >= 1
    assert impatient.served.call("GET", "/health").status == 200
    impatient.add("a")
    assert impatient.served.call("GET", "/ready").status == 200


def test_a_request_waits_for_its_first_instance(fleet: Fleet) -> None:
    with asking(fleet.served) as connection:
        wait_until(lambda: fleet.do(lambda: fleet.router.waiting) == 1)
        fleet.add("a")
        assert finished(connection).status == 200


@pytest.fixture
def expecting(text: ModelText) -> Iterator[Fleet]:
    config = RouterConfig(beat_us=ROUTER.beat_us, suspect_us=ROUTER.suspect_us, absent_us=0, expected_instances=2)
    with running(text, ApiSettings(served_model_names=("tiny",)), config) as made:
        yield made


def test_a_request_waits_for_an_instance_that_is_expected_and_ready_tells_how_many_have_come(expecting: Fleet) -> None:
    ready = expecting.served.call("GET", "/ready")
    assert (ready.status, ready.error["code"]) == (503, "no_instance")
    assert "0 of 2 expected ones have come so far" in ready.error["message"]
    with asking(expecting.served) as connection:
        wait_until(lambda: expecting.do(lambda: expecting.router.waiting) == 1)
        expecting.add("a")
        assert finished(connection).status == 200
    assert expecting.served.call("GET", "/ready").status == 200, "one is enough"


def test_a_router_that_stops_before_its_instances_came_tells_those_who_wait(expecting: Fleet) -> None:
    with asking(expecting.served) as connection:
        wait_until(lambda: expecting.do(lambda: expecting.router.waiting) == 1)
        expecting.do(expecting.engine.give_up)
        refused = finished(connection)
    assert (refused.status, refused.error["code"]) == (503, "no_instance")
    assert refused.error["message"].endswith("2 of 2 expected instances never came")
    assert "retry-after" in refused.headers


def test_a_client_that_leaves_the_queue_is_gone_from_it(fleet: Fleet) -> None:
    with asking(fleet.served):
        wait_until(lambda: fleet.do(lambda: fleet.router.waiting) == 1)
    wait_until(lambda: fleet.do(lambda: fleet.router.waiting) == 0)
    assert fleet.do(lambda: fleet.engine.open_requests) == 0


def test_a_queued_request_can_be_cancelled_by_its_id(fleet: Fleet) -> None:
    with asking(fleet.served, headers={"X-Request-Id": "mine"}) as connection:
        wait_until(lambda: fleet.do(lambda: fleet.router.waiting) == 1)
        assert fleet.served.call("DELETE", "/v1/requests/mine").status == 200
        (choice,) = finished(connection).json()["choices"]
    assert (choice["finish_reason"], choice["text"]) == ("abort", "")
    assert fleet.do(lambda: fleet.router.waiting) == 0


def test_a_client_that_hangs_up_cancels_at_the_instance(fleet: Fleet) -> None:
    member = fleet.add("a", allowed=5)
    with asking(fleet.served, stream=True):
        wait_until(lambda: member.given >= 5)
    wait_until(lambda: fleet.do(lambda: fleet.engine.open_requests) == 0)
    member.allowed = None
    wait_until(lambda: fleet.do(lambda: member.worker.is_idle))


def test_limits_of_a_key_are_a_429(text: ModelText) -> None:
    config = RouterConfig(beat_us=ROUTER.beat_us, suspect_us=ROUTER.suspect_us, key_concurrency=1)
    with running(text, ApiSettings(served_model_names=("tiny",)), config) as fleet:
        member = fleet.add("a", allowed=3)
        with asking(fleet.served) as first:
            wait_until(lambda: member.given >= 3)
            refused = ask(fleet.served, False)
            assert (refused.status, refused.error["code"]) == (429, "rate_limited")
            assert int(refused.headers["retry-after"]) >= 1
            member.allowed = None
            assert finished(first).status == 200


def test_a_reader_that_does_not_read_costs_no_more_than_its_own_tokens(fleet: Fleet) -> None:
    """The instance is not held up, and what is unread is at most the answer."""
    fleet.add("a")
    with asking(fleet.served, stream=True, max_tokens=400, logprobs=1) as slow:
        wait_until(lambda: fleet.members["a"].given >= 400)
        assert ask(fleet.served, False).status == 200
        events = data_of(finished(slow))
    assert events[-1] == "[DONE]"
    wait_until(lambda: fleet.do(lambda: fleet.engine.open_requests) == 0)


def test_drain_moves_nothing_and_gives_nothing_new(fleet: Fleet) -> None:
    first = fleet.add("a", allowed=4)
    with asking(fleet.served) as open_one:
        wait_until(lambda: first.given >= 4)
        fleet.add("b")
        assert fleet.served.call("POST", "/v1/instances/a/drain").json() == {
            "name": "a", "object": "instance", "draining": True,
        }  # fmt: skip
        wait_until(lambda: first.drained)
        assert ask(fleet.served, False).status == 200
        first.allowed = None
        assert finished(open_one).status == 200
    states = {one["name"]: one["state"] for one in fleet.served.call("GET", "/v1/instances").json()["data"]}
    assert states == {"a": "draining", "b": "ready"}
    assert fleet.members["b"].given == 40
    assert fleet.served.call("POST", "/v1/instances/nobody/drain").status == 404
    assert fleet.served.call("POST", "/v1/instances/b/drain", headers={"Origin": "http://a.example"}).status == 403


def test_metrics_tell_of_instances_moves_and_refused_fields(fleet: Fleet) -> None:
    fleet.add("a", allowed=3)
    with asking(fleet.served) as connection:
        wait_until(lambda: fleet.members["a"].given >= 3)
        fleet.add("b")
        fleet.kill("a")
        assert finished(connection).status == 200
    assert ask(fleet.served, False, origin="x").status == 400
    page = fleet.served.call("GET", "/metrics").body.decode()
    for line in (
        'baton_instances{role="mixed",state="ready"} 1.0',
        'baton_retries_total{cause="lost"} 1.0',
        'baton_moves_total{cause="lost"} 1.0',
        'baton_moves_total{cause="preempted"} 0.0',
        "baton_move_seconds_count 1.0",
        'baton_instance_events_total{what="stuck"} 0.0',
        'baton_instance_events_total{what="joined"} 2.0',
        'baton_instance_events_total{what="lost"} 1.0',
        'baton_refused_fields_total{field="origin"} 1.0',
        "baton_moved_tokens_total 3.0",
    ):
        assert line in page
    events = fleet.served.call("GET", "/v1/instances").json()["events"]
    assert [(event["name"], event["what"]) for event in events] == [("a", "joined"), ("b", "joined"), ("a", "lost")]
    assert [event["number"] for event in events] == [1, 2, 3]


def test_every_metric_of_the_board_that_a_router_alone_has_is_there_from_the_start(fleet: Fleet) -> None:
    page = fleet.served.call("GET", "/metrics").body.decode()
    there = {re.split(r"[{ ]", line, maxsplit=1)[0] for line in page.splitlines() if not line.startswith("#")}
    of_routers = {row.name + ("_bucket" if row.kind == "histogram" else "") for row in metric_rows()[1]}
    named = set(re.findall(r"baton_\w+", DASHBOARD.read_text())) & of_routers
    assert len(named) > 4
    assert named - there == {"baton_declined_total"}, "its codes are told as they come"


def test_a_move_is_a_log_line_with_its_cause_and_cost(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton.moves")
    fleet.add("a", allowed=3)
    with asking(fleet.served) as connection:
        wait_until(lambda: fleet.members["a"].given >= 3)
        fleet.add("b")
        fleet.kill("a")
        assert finished(connection).status == 200
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("moved ")]
    found = re.fullmatch(r"moved id=(\S+) choice=0 cause=lost from=a to=b tokens=(\d+) ms=\d+\.\d", line)
    assert found, line
    assert int(found[2]) > 3, "its prompt and the three tokens that it had"


def test_the_access_log_says_where_a_request_was_and_how_often_it_moved(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "baton.access")
    fleet.add("a", allowed=3)
    with asking(fleet.served, n=2) as connection:
        wait_until(lambda: fleet.members["a"].given >= 3)
        fleet.add("b")
        fleet.kill("a")
        assert finished(connection).status == 200
    assert ask(fleet.served, False, n=99).status == 400

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "baton.access"]

    wait_until(lambda: len(lines()) == 2)
    moved, refused = lines()
    assert " finish=length,length " in moved
    assert moved.endswith(" instance=b moves=2")
    assert refused.endswith(" status=400 tenant=- client=127.0.0.1 error=invalid_value waiting=0")


def test_bad_news_of_the_fleet_is_a_warning_and_repeated_ones_are_told_once(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "baton.router")
    fleet.add("a")
    stranger = fleet.add("b", block_size=32)
    for _ in range(3):
        fleet.do(lambda: stranger.join(fleet.sessions))
    answer = fleet.served.call("POST", "/v1/instances/a/drain").json()
    assert "No instance of the role mixed or decode is ready" in answer["warning"]
    fleet.kill("a")
    assert [(record.levelname, record.getMessage().split(" ")[3].rstrip(":")) for record in caplog.records] == [
        ("INFO", "joined"),
        ("WARNING", "refused"),
        ("WARNING", "draining"),
        ("INFO", "left"),
    ]


def test_more_choices_than_a_key_may_ever_have_is_no_matter_of_waiting(text: ModelText) -> None:
    settings = ApiSettings(served_model_names=("tiny",))
    with running(text, settings, replace(ROUTER, key_concurrency=2)) as fleet:
        fleet.add("a")
        refused = ask(fleet.served, False, n=3)
        assert ask(fleet.served, False, n=2).status == 200
    assert (refused.status, refused.error["param"], refused.error["code"]) == (400, "n", "too_many_choices")
    assert "retry-after" not in refused.headers


def test_the_line_of_a_cancelled_request_has_the_times_of_its_phases(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton.access")
    fleet.add("a", allowed=5)
    with asking(fleet.served, stream=True):
        wait_until(lambda: fleet.members["a"].given >= 5)
        wait_until(lambda: fleet.do(lambda: fleet.router.requests()[0].choices[0].delivered != []))
        began_s = time.monotonic()
        wait_until(lambda: time.monotonic() > began_s + 0.02)
    wait_until(lambda: any("status=499" in line for line in caplog.messages))
    (line,) = (line for line in caplog.messages if "status=499" in line)
    fields = dict(word.split("=", 1) for word in line.split(" "))
    assert float(fields["decode_ms"]) >= 20
    assert float(fields["queue_ms"]) + float(fields["prefill_ms"]) > 0
