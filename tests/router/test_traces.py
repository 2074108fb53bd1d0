"""Traces of requests through a router: moves, a router that is lost, answers that are read twice."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import closing

import pytest

from baton.api.model_text import ModelText
from baton.api.settings import ApiSettings
from baton.api.tracing import request_tracing
from baton.api.tracing.request_trace import FinishedTrace
from baton.api.tracing.request_tracing import RequestTracing
from baton.api.tracing.spans import FinishedSpan, spans_of
from tests.router.fleet import Fleet
from tests.router.fleet import fleet as running
from tests.router.test_carrying import ask, asking
from tests.router.test_resuming import MINE
from tests.support.waiting import wait_until

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ASKED = MINE | {"traceparent": f"00-{TRACE}-{PARENT}-01"}


class KeptTraces:
    """A sink that keeps them."""

    def __init__(self) -> None:
        self.finished: list[FinishedTrace] = []

    def put(self, finished: FinishedTrace) -> None:
        self.finished.append(finished)

    def spans(self, number: int = 1) -> list[FinishedSpan]:
        """Of the last trace, once there are so many."""
        wait_until(lambda: len(self.finished) >= number)
        return spans_of(self.finished[-1])


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> KeptTraces:
    monkeypatch.setattr(request_tracing, "RIPE_S", 0.01)
    return KeptTraces()


@pytest.fixture
def traced(text: ModelText, kept: KeptTraces) -> Iterator[Fleet]:
    with running(text, ApiSettings(served_model_names=("tiny",)), tracing=RequestTracing(kept)) as made:
        yield made


def attempts(spans: list[FinishedSpan]) -> list[FinishedSpan]:
    return [span for span in spans if span.name == "attempt"]


def test_a_lost_instance_is_an_attempt_that_the_next_one_links_to(traced: Fleet, kept: KeptTraces) -> None:
    a, b = traced.add("a"), traced.add("b")
    a.allowed = b.allowed = 5
    with asking(traced.served, headers=ASKED, stream=True) as connection:
        wait_until(lambda: max(a.given, b.given) >= 5)
        victim = traced.serving()
        traced.do(traced.members[victim].die)
        a.allowed = b.allowed = None
        connection.getresponse().read()
    server, *_ = spans = kept.spans()
    first, second = attempts(spans)
    assert (server.context.trace_id, server.parent_id) == (TRACE, PARENT)
    assert (first.attributes["baton.instance"], first.attributes["baton.move.cause"]) == (victim, "lost")
    assert second.attributes["baton.instance"] == ({"a", "b"} - {victim}).pop()
    assert [link.to for link in second.links] == [first.context]
    assert {span.context.trace_id for span in spans} == {TRACE}


def test_the_router_that_adopts_a_request_goes_on_with_its_trace(traced: Fleet, kept: KeptTraces) -> None:
    a = traced.add("a")
    a.allowed = 5
    with asking(traced.served, headers=MINE, stream=True):  # its client has no trace: the router begins one
        wait_until(lambda: a.given >= 5)
        traced.kill_router()
    traced.start_router()
    traced.join_all()
    wait_until(lambda: traced.do(lambda: traced.engine.unclaimed) == 1)
    with closing(http.client.HTTPConnection("127.0.0.1", traced.served.port, timeout=20)) as connection:
        connection.request("GET", "/v1/requests/mine/stream", headers=ASKED)
        wait_until(lambda: traced.do(lambda: traced.engine.unclaimed) == 0)
        a.allowed = None
        assert b"[DONE]" in connection.getresponse().read()
    wait_until(lambda: any(one.trace.resumed for one in kept.finished))
    server, *_ = spans = spans_of(next(one for one in kept.finished if one.trace.resumed))
    (attempt,) = attempts(spans)
    assert server.context.trace_id != TRACE
    assert server.parent_id == ""
    asker, lost = (link.to for link in server.links)
    assert (asker.trace_id, asker.span_id) == (TRACE, PARENT)
    assert lost.trace_id == server.context.trace_id
    assert (server.attributes["baton.resumed"], server.attributes["baton.request.id"]) == (True, "mine")
    assert attempt.attributes["baton.instance"] == "a"
    assert "decode" in [span.name for span in spans if span.parent_id == attempt.context.span_id]


def test_a_client_that_leaves_ends_the_trace_with_what_was_known(traced: Fleet, kept: KeptTraces) -> None:
    a = traced.add("a")
    a.allowed = 5
    with asking(traced.served, headers=ASKED, stream=True):
        wait_until(lambda: a.given >= 5)
    server, *_ = spans = kept.spans()
    assert (server.attributes["error.type"], server.failure) == ("client_closed", "")
    assert [span.attributes["baton.instance"] for span in attempts(spans)] == ["a"]


def test_an_answer_that_is_read_again_under_its_key_was_made_once(traced: Fleet, kept: KeptTraces) -> None:
    traced.add("a")
    keyed = {"Idempotency-Key": "k"}
    ask(traced.served, False, keyed)
    assert len(attempts(kept.spans())) == 1
    ask(traced.served, False, keyed)
    assert attempts(kept.spans(2)) == []
