"""A router is killed and restarted: answers continue exactly where their clients stopped."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from baton.api.model_text import ModelText
from baton.api.settings import ApiSettings
from tests.api.conftest import Reply
from tests.router.fleet import ROUTER, Fleet
from tests.router.fleet import fleet as running
from tests.router.test_carrying import ask, asking, comparable, data_of, finished, ids_of
from tests.support.waiting import wait_until

MINE = {"X-Request-Id": "mine"}


def events_of(body: bytes) -> list[tuple[str, Any]]:
    """(id, data) of each whole event; an event without an id has that of the one before."""
    found: list[tuple[str, Any]] = []
    last = ""
    for event in body.decode().split("\n\n")[:-1]:
        for line in event.split("\n"):
            name, _, value = line.partition(": ")
            if name == "id":
                last = value
            else:
                found.append((last, value if value == "[DONE]" else json.loads(value)))
    return found


def resume(fleet: Fleet, after: str, headers: dict[str, str] | None = None, name: str = "mine") -> Reply:
    return fleet.served.call("GET", f"/v1/requests/{name}/stream", headers={"Last-Event-ID": after} | (headers or {}))


def cut_off(fleet: Fleet, tokens: int, chat: bool = False, **fields: Any) -> None:
    """Send a request, and kill the router after this many tokens."""
    for member in fleet.members.values():
        member.allowed = member.given + tokens
    with asking(fleet.served, chat, MINE, **fields):
        wait_until(lambda: any(m.given >= (m.allowed or 0) for m in fleet.members.values()))
        fleet.kill_router()
    for member in fleet.members.values():
        member.allowed = None
    fleet.start_router()


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"stream_options": {"include_usage": True}, "return_token_ids": True}])
def test_what_follows_any_event_is_exactly_what_was_not_heard(fleet: Fleet, chat: bool, fields: dict[str, Any]) -> None:
    fleet.add("a")
    headers = {"X-Request-Id": "mine"}
    whole = events_of(ask(fleet.served, chat, headers, stream=True, max_tokens=9, **fields).body)
    for place in {0, 1, 2, len(whole) // 2, len(whole) - 2}:
        cut_off(fleet, 5, chat, stream=True, max_tokens=9, **fields)
        fleet.join_all()
        after = whole[place][0]
        rest = events_of(resume(fleet, after).body)
        expected = [data for at, data in whole if at == "" or data == "[DONE]" or whole.index((at, data)) > place]
        assert texts(rest, chat) == texts([("", data) for data in expected], chat)
        assert [data for _, data in rest].count("[DONE]") == 1


def texts(events: list[tuple[str, Any]], chat: bool) -> list[Any]:
    """By choice: text, tokens, finish, whether it was opened; and the usage. However it was cut into events."""
    found: dict[int, list[Any]] = {}
    usage = None
    for _, event in events:
        if event == "[DONE]":
            continue
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            one = found.setdefault(choice["index"], ["", [], None, 0])
            one[0] += choice["delta"].get("content", "") if chat else choice["text"]
            one[1] += choice.get("token_ids", [])
            one[2] = choice["finish_reason"] or one[2]
            one[3] += chat and "role" in choice["delta"]
    return [sorted(found.items()), usage and usage["completion_tokens"]]


def test_a_whole_answer_is_given_whole(fleet: Fleet) -> None:
    fleet.add("a")
    whole = comparable(ask(fleet.served, True, n=2, logprobs=True).json())
    cut_off(fleet, 12, True, n=2, logprobs=True)
    fleet.join_all()
    reply = resume(fleet, "")
    assert reply.status == 200
    assert reply.json()["id"] == "chatcmpl-mine"
    assert comparable(reply.json())["choices"] == whole["choices"]


def test_the_request_may_be_asked_for_before_its_instance_has_come_back(fleet: Fleet) -> None:
    fleet.add("a")
    cut_off(fleet, 5, stream=True)
    replies: list[Reply] = []
    asked = threading.Thread(target=lambda: replies.append(resume(fleet, "")))
    asked.start()
    fleet.join_all()
    asked.join(10)
    assert data_of(replies[0])[-1] == "[DONE]"


def test_it_is_resumed_although_its_instance_was_lost_after_the_router_came_back(fleet: Fleet) -> None:
    fleet.add("a")
    whole = "".join(event["choices"][0]["text"] for event in data_of(ask(fleet.served, False, stream=True))[:-1])
    cut_off(fleet, 5, stream=True)
    fleet.members["a"].allowed = fleet.members["a"].given + 3
    fleet.join_all()
    wait_until(lambda: fleet.do(lambda: fleet.engine.unclaimed) == 1)
    fleet.add("b")
    fleet.kill("a")
    events = data_of(resume(fleet, ""))
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == whole


def test_ids_of_others_and_unknown_ones_are_not_found(text: ModelText) -> None:
    settings = ApiSettings(served_model_names=("tiny",), api_keys=("one", "two"))
    mine, other = {"Authorization": "Bearer one"}, {"Authorization": "Bearer two"}
    with running(text, settings) as fleet:
        member = fleet.add("a", allowed=5)
        with asking(fleet.served, False, MINE | mine, stream=True):
            wait_until(lambda: member.given >= 5)
            fleet.kill_router()
        fleet.start_router()
        fleet.join_all()
        wait_until(lambda: fleet.do(lambda: fleet.engine.unclaimed) == 1)
        fleet.do(lambda: setattr(fleet.engine, "_began_us", -(10**9)))  # it is not new any more
        assert resume(fleet, "", other).status == 404
        assert resume(fleet, "", mine, "unknown").status == 404
        assert fleet.served.call("DELETE", "/v1/requests/mine", headers=other).status == 404
        member.allowed = None
        assert data_of(resume(fleet, "3", mine))[-1] == "[DONE]"


def test_one_reader_at_a_time(fleet: Fleet) -> None:
    member = fleet.add("a", allowed=3)
    with asking(fleet.served, False, MINE, stream=True):
        wait_until(lambda: member.given >= 3)
        refused = resume(fleet, "")
        assert (refused.status, refused.error["code"], refused.error["param"]) == (409, "still_read", "id")
        fleet.kill_router()
    fleet.start_router()
    fleet.join_all()
    with closing(http.client.HTTPConnection("127.0.0.1", fleet.served.port, timeout=20)) as first:
        first.request("GET", "/v1/requests/mine/stream")
        wait_until(lambda: fleet.do(lambda: fleet.engine.open_requests) == 1)
        assert (resume(fleet, "").status, resume(fleet, "").error["code"]) == (409, "still_read")
        member.allowed = None
        assert data_of(finished(first))[-1] == "[DONE]"


def test_an_orphan_can_be_cancelled_and_its_id_used_again(fleet: Fleet) -> None:
    member = fleet.add("a")
    cut_off(fleet, 5, stream=True)
    member.allowed = member.given
    fleet.join_all()
    wait_until(lambda: fleet.do(lambda: fleet.engine.unclaimed) == 1)
    assert ask(fleet.served, False, MINE).error["code"] == "duplicate_id"
    assert fleet.served.call("DELETE", "/v1/requests/mine").status == 200
    assert fleet.do(lambda: fleet.engine.unclaimed) == 0
    member.allowed = None
    wait_until(lambda: fleet.do(lambda: member.worker.is_idle))
    assert ask(fleet.served, False, MINE).status == 200


@pytest.mark.parametrize("after", ["x", "1,2", "-1", "1!!", "9" * 11, "1;2"])
def test_an_event_id_that_is_none_is_a_400_and_the_request_waits_on(fleet: Fleet, after: str) -> None:
    fleet.add("a")
    cut_off(fleet, 5, stream=True)
    fleet.join_all()
    refused = resume(fleet, after)
    assert (refused.status, refused.error["param"]) == (400, "Last-Event-ID")
    assert data_of(resume(fleet, "5"))[-1] == "[DONE]"


def test_log_probabilities_that_were_lost_in_a_move_cannot_be_resumed(fleet: Fleet) -> None:
    first = fleet.add("a", allowed=4)
    with asking(fleet.served, False, MINE, stream=True, logprobs=1):
        wait_until(lambda: first.given >= 4)
        second = fleet.add("b", allowed=3)
        fleet.kill("a")
        wait_until(lambda: second.given >= 3)
        fleet.kill_router()
    fleet.start_router()
    fleet.join_all()
    wait_until(lambda: fleet.do(lambda: fleet.engine.unclaimed) == 1)
    refused = resume(fleet, "2")
    assert (refused.status, refused.error["code"]) == (410, "cannot_resume")
    second.allowed = None
    rest = resume(fleet, "4")
    assert ids_of(rest)[-1] == "40!"
    logprobs = [event["choices"][0]["logprobs"]["token_logprobs"] for event in data_of(rest)[:-1]]
    assert sum(map(len, logprobs)) == 36


@pytest.fixture
def hasty(text: ModelText) -> Iterator[Fleet]:
    with running(text, ApiSettings(served_model_names=("tiny",)), replace(ROUTER, orphan_grace_us=100_000)) as made:
        yield made


def test_an_orphan_that_nobody_comes_for_is_dropped(hasty: Fleet) -> None:
    member = hasty.add("a")
    cut_off(hasty, 5, stream=True)
    member.allowed = member.given
    hasty.join_all()
    wait_until(lambda: hasty.do(lambda: hasty.router.counts.orphans_dropped) == 1)
    assert hasty.do(lambda: hasty.engine.unclaimed) == 0
    member.allowed = None
    wait_until(lambda: hasty.do(lambda: member.worker.is_idle))


def test_more_than_an_answer_can_have_is_no_place_to_go_on_from(fleet: Fleet) -> None:
    fleet.add("a")
    cut_off(fleet, 5, stream=True, max_tokens=9)
    fleet.join_all()
    refused = resume(fleet, "10")
    assert (refused.status, refused.error["param"]) == (400, "Last-Event-ID")
    assert resume(fleet, "3").status == 200
