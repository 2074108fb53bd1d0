"""Traces of real processes, as a collector gets them: a killed instance, a killed router, a hand-over, a dead collector."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import signal
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest

from baton.core.errors import EXIT_SETUP
from tests.e2e.test_router import BODY, GRACE, SCRIPTED, events
from tests.support.otlp_receiver import ERROR_STATUS, SERVER_KIND, OtlpReceiver, ReceivedSpan, otlp_receiver
from tests.support.server import ServerProcess, baton_process, baton_router, baton_serve, refused_by_serve
from tests.support.storing import TIGHT, question, right
from tests.support.waiting import wait_until

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otel")

PARENT = "00f067aa0ba902b7"
SECRET_WORD = "xylophone"
LONG = 7000
"""Tokens that take the fleet half a minute: a router that was killed is back before."""


def post(server: ServerProcess, body: dict[str, Any], path: str = "/v1/completions", **headers: str) -> httpx.Response:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(f"{server.url}{path}", json=body, headers=sent, timeout=60)


def views(router: ServerProcess) -> dict[str, Any]:
    return {one["name"]: one for one in httpx.get(f"{router.url}/v1/instances", timeout=60).json()["data"]}


@pytest.fixture
def trace() -> str:
    """The id of the trace of a client."""
    return secrets.token_hex(16)


def asked(trace: str, sampled: str = "01") -> dict[str, str]:
    return {"traceparent": f"00-{trace}-{PARENT}-{sampled}"}


def named(spans: Sequence[ReceivedSpan], name: str) -> list[ReceivedSpan]:
    return [span for span in spans if span.name == name]


def servers(spans: Sequence[ReceivedSpan]) -> list[ReceivedSpan]:
    return [span for span in spans if span.kind == SERVER_KIND]


def children(spans: Sequence[ReceivedSpan], parent: ReceivedSpan) -> list[ReceivedSpan]:
    return [span for span in spans if span.parent_id == parent.span_id]


def check_nesting(spans: Sequence[ReceivedSpan]) -> None:
    """Children lie within their parents, and what follows each other does not overlap."""
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        assert span.began_ns <= span.ended_ns
        if (parent := by_id.get(span.parent_id)) is not None:
            assert parent.began_ns <= span.began_ns
            assert span.ended_ns <= parent.ended_ns
        by_choice: dict[object, int] = {}
        for child in sorted(children(spans, span), key=lambda one: (one.began_ns, one.ended_ns)):
            choice = child.attributes["baton.choice"]
            assert child.began_ns >= by_choice.get(choice, 0)
            by_choice[choice] = child.ended_ns


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as made:
        yield made


@pytest.fixture(scope="module")
def alone(receiver: OtlpReceiver) -> Iterator[ServerProcess]:
    """One instance without a router."""
    options = ("--executor", "scripted", "--step-ms", "2", "--kv-blocks", "24", "--block-size", "16")
    with baton_serve(*options, "--otlp-endpoint", receiver.url) as server:
        yield server


def test_a_request_has_a_server_span_with_the_attributes_of_the_conventions(
    alone: ServerProcess, receiver: OtlpReceiver, trace: str
) -> None:
    body = {"messages": [{"role": "user", "content": SECRET_WORD}], "max_tokens": 9, "temperature": 0.5, "ignore_eos": True}
    response = post(alone, body, "/v1/chat/completions", X_Request_Id="chatted", **asked(trace))
    answer = response.json()
    spans = receiver.trace_of("chatted")
    (server,) = servers(spans)
    assert (server.trace_id, server.parent_id) == (trace, PARENT)
    assert response.headers["traceparent"] == f"00-{trace}-{server.span_id}-01"
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "scripted",
        "gen_ai.response.model": "scripted",
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 9,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
    }
    assert {name: server.attributes[name] for name in expected} == expected
    assert "gen_ai.usage.cache_read.input_tokens" in server.attributes
    assert server.service == "baton"
    assert SECRET_WORD not in repr(spans)
    wait_until(lambda: f"trace={trace}" in alone.output(), "the trace in the access log")


def test_the_attempt_at_one_instance_is_made_of_queue_prefill_and_decode(
    alone: ServerProcess, receiver: OtlpReceiver
) -> None:
    post(alone, BODY, X_Request_Id="plain")
    spans = receiver.trace_of("plain")
    check_nesting(spans)
    (attempt,) = named(spans, "attempt")
    assert attempt.instance.endswith(f"-mixed-{urlsplit(alone.url).port}")
    assert attempt.parent_id == servers(spans)[0].span_id
    assert [span.name for span in children(spans, attempt)] == ["queue", "prefill", "decode"]


def test_a_preemption_is_an_interval(alone: ServerProcess, receiver: OtlpReceiver) -> None:
    """Two answers of 300 tokens do not fit into a pool of 384 together."""
    body = BODY | {"max_tokens": 300}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: post(alone, body, X_Request_Id=name), ("older", "younger")))
    spans = [*receiver.trace_of("older"), *receiver.trace_of("younger")]
    check_nesting(spans)
    (preempted,) = named(spans, "preempted")
    (attempt,) = [span for span in named(spans, "attempt") if span.span_id == preempted.parent_id]
    names = [span.name for span in children(spans, attempt)]
    assert names == ["queue", "prefill", "decode", "preempted", "prefill", "decode"]


def test_kv_that_comes_back_from_host_memory_is_an_interval_before_the_prefill(receiver: OtlpReceiver) -> None:
    """Two questions of which the pool holds one: each crowds out the KV of the other."""
    first, second = question(1), question(2)
    with baton_serve(*TIGHT, "--host-memory", "1M", "--otlp-endpoint", receiver.url) as server:
        for body in (first, second, second | {"prompt": second["prompt"][::-1]}):
            post(server, body)
        answer = post(server, first, X_Request_Id="brought-back").json()
        spans = receiver.trace_of("brought-back")
    assert answer["choices"][0]["token_ids"] == right(first)[0]
    check_nesting(spans)
    (attempt,) = named(spans, "attempt")
    assert [span.name for span in children(spans, attempt)] == ["queue", "restore", "prefill", "decode"]
    (of_server,) = servers(spans)
    assert of_server.attributes["baton.tokens.restored"] > 0


def test_an_error_is_a_span_with_its_type(alone: ServerProcess, receiver: OtlpReceiver) -> None:
    refused = post(alone, {"prompt": "hi", "max_tokens": 10**6}, X_Request_Id="refused")
    code = refused.json()["error"]["code"]
    (server,) = receiver.trace_of("refused")
    assert (server.attributes["error.type"], server.attributes["http.response.status_code"]) == (code, 400)
    assert server.status != ERROR_STATUS  # the client's fault


def test_an_invalid_traceparent_is_ignored_and_one_that_is_not_sampled_is_obeyed(
    alone: ServerProcess, receiver: OtlpReceiver, trace: str
) -> None:
    unsampled = post(alone, BODY, X_Request_Id="unsampled", **asked(trace, "00"))
    assert unsampled.headers["traceparent"].startswith(f"00-{trace}-")
    assert unsampled.headers["traceparent"].endswith("-00")
    post(alone, BODY, X_Request_Id="garbled", traceparent="00-not-a-trace")
    (server,) = servers(receiver.trace_of("garbled"))
    assert server.parent_id == ""
    assert trace not in {span.trace_id for span in receiver.spans()}


class TracedFleet:
    """A router, one instance that prefills, and as many that decode as a test asks for."""

    def __init__(self, stack: contextlib.ExitStack, receiver: OtlpReceiver) -> None:
        self._stack = stack
        self._traced = ("--otlp-endpoint", receiver.url)
        self._made = 0
        self.router = stack.enter_context(baton_router(*SCRIPTED, *GRACE, *self._traced))
        self._start("p", "--role", "prefill", "--peer-port", "0")

    def _start(self, name: str, *options: str) -> None:
        given = (*SCRIPTED, "--step-ms", "4", "--router", self.router.join, "--name", name, *options)
        self._stack.enter_context(baton_serve(*given, wait=False))

    def ensure(self, decoding: int) -> None:
        there = [name for name, one in views(self.router).items() if one["role"] == "decode"]
        missing = decoding - len(there)
        for _ in range(missing):
            self._made += 1
            self._start(f"d{self._made}", "--role", "decode")
        wait_until(lambda: "p" in views(self.router) and len(views(self.router)) > decoding)

    def stream(self, name: str, body: dict[str, Any], **headers: str) -> Iterator[tuple[str, Any]]:
        at = urlsplit(self.router.url)
        with contextlib.closing(http.client.HTTPConnection(at.hostname or "", at.port, timeout=60)) as connection:
            sent = headers | {"X-Request-Id": name, "Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}), sent)
            with contextlib.closing(connection.getresponse()) as response:
                yield from events(response)

    def serving(self) -> str:
        (name,) = [name for name, one in views(self.router).items() if one["open"]]
        return name

    def restart_router(self) -> None:
        ports = ("--port", self.router.url.rpartition(":")[2], "--join-port", self.router.join.rpartition(":")[2])
        self.router = self._stack.enter_context(baton_process("router", *ports, *SCRIPTED, *GRACE, *self._traced))
        wait_until(lambda: len(views(self.router)) > 0)


@pytest.fixture(scope="module")
def fleet(receiver: OtlpReceiver) -> Iterator[TracedFleet]:
    with contextlib.ExitStack() as stack:
        yield TracedFleet(stack, receiver)


def test_a_hand_over_is_an_interval_between_the_prefill_there_and_the_decode_here(
    fleet: TracedFleet, receiver: OtlpReceiver
) -> None:
    fleet.ensure(2)
    for number in range(40):  # until the decoding instances have their peer
        list(fleet.stream(f"split{number}", BODY | {"prompt": [number + 50] * 200}))
        spans = receiver.trace_of(f"split{number}")
        if named(spans, "handover"):
            break
    check_nesting(spans)
    (attempt,) = named(spans, "attempt")
    (handover,) = named(spans, "handover")
    assert handover.parent_id == attempt.span_id
    assert handover.instance == attempt.instance
    assert [(span.name, span.instance) for span in children(spans, attempt)][-3:] == [
        ("prefill", "p"),
        ("handover", attempt.instance),
        ("decode", attempt.instance),
    ]


def test_a_killed_instance_leaves_an_attempt_that_the_next_one_links_to(
    fleet: TracedFleet, receiver: OtlpReceiver, trace: str
) -> None:
    fleet.ensure(2)
    victim = ""
    for count, _ in enumerate(fleet.stream("moved", BODY | {"max_tokens": 800}, **asked(trace))):
        if count == 10:
            victim = fleet.serving()
            os.kill(views(fleet.router)[victim]["pid"], signal.SIGKILL)
    spans = receiver.trace_of("moved")
    check_nesting(spans)
    (server,) = servers(spans)
    first, *_, last = attempts = named(spans, "attempt")
    assert (server.trace_id, server.parent_id, server.service) == (trace, PARENT, "baton-router")
    assert (first.instance, first.attributes["baton.move.cause"], first.status) == (victim, "lost", ERROR_STATUS)
    assert [span.links for span in attempts] == [(), *(((trace, span.span_id),) for span in attempts[:-1])]
    assert last.instance not in ("", "p", victim)
    assert {span.parent_id for span in attempts} == {server.span_id}
    assert [span.name for span in children(spans, last)][-1] == "decode"
    assert server.attributes["gen_ai.usage.output_tokens"] == 800


def test_a_stream_that_another_router_resumes_joins_the_trace(
    fleet: TracedFleet, receiver: OtlpReceiver, trace: str
) -> None:
    fleet.ensure(1)
    heard = []
    with contextlib.suppress(OSError, http.client.HTTPException):
        for event in fleet.stream("adopted", BODY | {"max_tokens": 400}, **asked(trace)):
            heard.append(event)
            if len(heard) == 20:
                fleet.router.process.kill()
    fleet.restart_router()
    url = f"{fleet.router.url}/v1/requests/adopted/stream"
    assert "[DONE]" in httpx.get(url, headers={"Last-Event-ID": heard[-1][0]}, timeout=60).text
    spans = receiver.trace_of("adopted")
    check_nesting(spans)
    (server,) = servers(spans)
    assert (server.trace_id, server.parent_id, server.attributes["baton.resumed"]) == (trace, PARENT, True)
    ((linked_trace, lost),) = server.links
    assert (linked_trace, lost != server.span_id) == (trace, True)


def test_what_ran_on_without_a_router_has_an_attempt_in_the_trace_of_the_next_one(
    fleet: TracedFleet, receiver: OtlpReceiver, trace: str
) -> None:
    fleet.ensure(1)
    begun = fleet.stream("ran-on", BODY | {"max_tokens": LONG}, **asked(trace))
    heard = [next(begun) for _ in range(20)]
    instance = fleet.serving()
    fleet.router.process.kill()
    begun.close()
    fleet.restart_router()
    url, after = f"{fleet.router.url}/v1/requests/ran-on/stream", {"Last-Event-ID": heard[-1][0]}
    with httpx.stream("GET", url, headers=after, timeout=60) as resumed:
        assert "data: " in next(resumed.iter_text())  # and this client leaves
    spans = receiver.trace_of("ran-on")
    check_nesting(spans)
    (server,) = servers(spans)
    assert (server.trace_id, server.parent_id, server.attributes["baton.resumed"]) == (trace, PARENT, True)
    assert server.attributes["error.type"] == "client_closed"
    (attempt,) = named(spans, "attempt")
    assert (attempt.instance, attempt.parent_id) == (instance, server.span_id)
    assert attempt.status != ERROR_STATUS
    # What it did when it was found is not known before it does something else, which an answer that runs on may never do.
    assert {(span.name, span.instance) for span in children(spans, attempt)} <= {("decode", instance)}


def test_a_collector_that_never_answers_costs_spans_one_warning_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        port.listen(8)
        options = ("--executor", "scripted", "--otlp-endpoint", f"http://127.0.0.1:{port.getsockname()[1]}")
        with baton_serve(*options) as server:
            assert post(server, BODY).status_code == 200
            wait_until(lambda: server.metric("baton_spans_dropped_total") > 0)
            dropped = server.metric("baton_spans_dropped_total")
            assert post(server, BODY).status_code == 200
            wait_until(lambda: server.metric("baton_spans_dropped_total") > dropped)
            assert server.output().count("spans for the collector at") == 1
            assert post(server, BODY).status_code == 200
            assert server.stop() == 0


@pytest.mark.slow
def test_headers_of_the_environment_go_to_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-collector-key=abc")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chatty")
    with otlp_receiver() as receiver, baton_serve("--executor", "scripted", "--otlp-endpoint", receiver.url) as server:
        post(server, BODY)
        assert server.stop() == 0  # what had not been sent yet is sent now
    assert {headers["x-collector-key"] for headers in receiver.headers} == {"abc"}
    assert {span.service for span in receiver.spans()} == {"chatty"}
    assert servers(receiver.spans())


def test_an_address_that_is_none_is_refused_in_one_line() -> None:
    code, said = refused_by_serve("--executor", "scripted", "--otlp-endpoint", "collector:4318")
    assert (code, said.count("\n")) == (EXIT_SETUP, 1)
    assert "--otlp-endpoint must be an address such as http://127.0.0.1:4318, not 'collector:4318'" in said
