"""What happens to an answer when the client, the engine or the operator ends it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading

import openai
import pytest

from baton.api.app import create_app
from baton.api.engine import NotServing
from baton.api.model_text import ModelText
from baton.api.sampling_defaults import SamplingDefaults
from baton.api.settings import ApiSettings
from baton.core.engine.request import FinishReason
from baton.core.errors import BatonError
from tests.api.conftest import REPLY, Served, serving
from tests.api.engine import ScriptedEngine
from tests.api.tokenizers_made_here import TEMPLATE
from tests.support.waiting import wait_until

HI = [{"role": "user", "content": "hi"}]


def opened(served: Served, body: dict[str, object], headers: str = "") -> socket.socket:
    """A connection that has sent a chat request and not read the answer."""
    sock = socket.create_connection(("127.0.0.1", served.port), timeout=10)
    raw = json.dumps({"messages": HI} | body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n{headers}"
    sock.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
    return sock


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hangs_after", [0, 3])
def test_a_client_that_hangs_up_aborts_every_choice(
    served: Served, engine: ScriptedEngine, stream: bool, hangs_after: int
) -> None:
    engine.hangs_after = hangs_after
    with opened(served, {"n": 3, "stream": stream}, "X-Request-Id: gone\r\n"):
        wait_until(lambda: len(engine.streams) == 3)
    wait_until(lambda: all(one.aborted for one in engine.streams))
    engine.hangs_after = None
    assert served.chat(headers={"X-Request-Id": "gone"}).status == 200


def test_closing_the_openai_stream_aborts(served: Served, engine: ScriptedEngine) -> None:
    engine.hangs_after = 4
    with openai.OpenAI(base_url=served.base_url, api_key="unused", max_retries=0) as client:
        stream = client.chat.completions.create(model="tiny", messages=HI, stream=True)
        assert next(iter(stream)).choices
        stream.close()
        wait_until(lambda: engine.streams[0].aborted)


def test_an_answer_read_to_its_end_is_not_aborted(served: Served, engine: ScriptedEngine) -> None:
    served.chat()
    served.chat(stream=True)
    assert [(one.aborted, one.kept) for one in engine.streams] == [(False, None)] * 2


def test_a_dead_engine_is_a_503_and_health_says_why(served: Served, engine: ScriptedEngine) -> None:
    assert served.call("GET", "/health").status == served.call("GET", "/ready").status == 200
    engine.death = NotServing("out of luck")
    for reply in (served.chat(), served.chat(stream=True), served.call("GET", "/health"), served.call("GET", "/ready")):
        assert (reply.status, reply.error["type"], reply.error["code"]) == (503, "engine_dead", "engine_dead")
        assert "out of luck" in reply.error["message"]
        assert reply.error["retryable"] is True
        assert reply.headers["retry-after"] == "1"


def test_a_draining_engine_is_healthy_and_not_ready(served: Served, engine: ScriptedEngine) -> None:
    engine.draining = True
    assert served.call("GET", "/health").status == 200
    assert served.call("GET", "/ready").error["code"] == "draining"


@pytest.mark.parametrize("n", [1, 2])
def test_death_in_mid_stream_is_one_error_event_and_no_done(served: Served, engine: ScriptedEngine, n: int) -> None:
    engine.dies_after = 3
    events = served.chat(stream=True, n=n, stream_options={"include_usage": True}).events()
    assert [event["error"]["type"] for event in events if "error" in event] == ["engine_dead"]
    assert "error" in events[-1]
    assert all(choice["finish_reason"] is None for event in events[:-1] for choice in event["choices"])


def test_the_openai_client_raises_when_the_engine_dies_in_mid_stream(served: Served, engine: ScriptedEngine) -> None:
    engine.dies_after = 3
    with openai.OpenAI(base_url=served.base_url, api_key="unused", max_retries=0) as client:
        stream = client.chat.completions.create(model="tiny", messages=HI, stream=True)
        with pytest.raises(openai.APIError, match="killed by the test"):
            list(stream)


def test_death_before_the_end_of_a_whole_answer_is_a_503(served: Served, engine: ScriptedEngine) -> None:
    engine.dies_after = 3
    reply = served.chat(n=2)
    assert (reply.status, reply.error["type"]) == (503, "engine_dead")


@pytest.mark.parametrize("stream", [False, True])
def test_a_choice_that_failed_ends_the_body_with_an_error(served: Served, engine: ScriptedEngine, stream: bool) -> None:
    engine.reason, engine.script = FinishReason.ERROR, lambda _: [104]
    reply = served.chat(stream=stream, n=2)
    error = reply.events()[-1]["error"] if stream else reply.error
    assert error["code"] == "request_failed"


@pytest.mark.parametrize("stream", [False, True])
def test_cancel_by_id_ends_the_answer_with_abort(served: Served, engine: ScriptedEngine, stream: bool) -> None:
    engine.hangs_after = 2
    replies = []

    def ask() -> None:
        replies.append(served.chat(headers={"X-Request-Id": "long"}, n=2, stream=stream))

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: len(engine.streams) == 2)
    assert served.chat(headers={"X-Request-Id": "long"}).status == 409
    assert served.call("DELETE", "/v1/requests/long").json() == {"id": "long", "object": "request", "cancelled": True}
    thread.join(10)
    assert all(one.aborted for one in engine.streams)
    (reply,) = replies
    if stream:
        events = reply.events()
        assert events[-1] == "[DONE]"
        finishes = [choice["finish_reason"] for event in events[:-1] for choice in event["choices"]]
        assert finishes.count("abort") == 2
    else:
        assert [choice["finish_reason"] for choice in reply.json()["choices"]] == ["abort", "abort"]
    assert served.call("DELETE", "/v1/requests/long").status == 404


@pytest.fixture
def locked(engine: ScriptedEngine, text: ModelText):
    settings = ApiSettings(served_model_names=("tiny",), api_keys=("one", "two"))
    with serving(engine, text, settings) as running:
        yield running


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_without_a_known_key_there_is_only_health(locked: Served) -> None:
    for headers in ({}, bearer("three"), bearer(""), {"Authorization": "Basic one"}, {"Authorization": "one"}):
        for method, path in [("POST", "/v1/chat/completions"), ("GET", "/metrics"), ("GET", "/v1/models"), ("GET", "/x")]:
            reply = locked.call(method, path, headers=headers)
            assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
            assert reply.headers["x-request-id"]
    assert locked.call("GET", "/health").status == locked.call("GET", "/ready").status == 200
    assert locked.chat(headers=bearer("two")).status == 200
    assert locked.call("GET", "/metrics", headers=bearer("one")).status == 200


def test_without_a_key_health_tells_how_an_engine_died_and_no_detail(locked: Served, engine: ScriptedEngine) -> None:
    engine.death = NotServing("the front end cannot talk to the engine", "OSError: /run/secret is gone")
    for path in ("/health", "/ready"):
        told = {key: locked.call("GET", path, headers=bearer(key)).error["message"] for key in ("", "wrong", "one")}
        assert told[""] == told["wrong"] == "The engine is dead: the front end cannot talk to the engine"
        assert "/run/secret" in told["one"]


def test_no_kv_is_shared_between_tenants_nor_between_salts(locked: Served, engine: ScriptedEngine) -> None:
    for key in ("one", "two"):
        for salt in (None, "a", "b"):
            locked.chat(headers=bearer(key), cache_salt=salt)
    locked.chat(headers=bearer("one"), cache_salt="a")
    salts = [group[0].salt for group in engine.groups]
    assert len(set(salts)) == 6
    assert salts[-1] == salts[1]
    assert b"" not in salts


def test_keys_of_one_group_share_kv_and_nothing_else(engine: ScriptedEngine, text: ModelText) -> None:
    keys = ("team:one", "team:two", "others:three", "four", ":five:six")
    with serving(engine, text, ApiSettings(served_model_names=("tiny",), api_keys=keys)) as running:
        for key in ("one", "two", "three", "four", "five:six"):
            assert running.chat(headers=bearer(key), cache_salt=None).status == 200
        for key in ("one", "two"):
            running.chat(headers=bearer(key), cache_salt="a")
        for key in ("team:one", "team", ":five:six", "five", "six"):
            assert running.chat(headers=bearer(key)).status == 401
    salts = [group[0].salt for group in engine.groups]
    assert salts[0] == salts[1]
    assert len(set(salts[1:5])) == 4
    assert salts[5] == salts[6] != salts[0]
    assert engine.groups[0][0].request_id != engine.groups[1][0].request_id, "what may be cancelled is a key's own"


def test_an_open_server_has_no_salt_but_the_client_s(served: Served, engine: ScriptedEngine) -> None:
    served.chat()
    served.chat(cache_salt="a")
    assert engine.groups[0][0].salt == b""
    assert len(engine.groups[1][0].salt) == 16


def test_a_clock_that_is_set_back_makes_no_later_request_older(
    served: Served, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter((2_000_000_000, 2_000_000_005, 1_000_000_000, 2_000_000_009))
    monkeypatch.setattr("baton.api.app.time.time_ns", lambda: next(clock) * 1000)
    for _ in range(4):
        served.chat()
    assert [group[0].arrived_us - 2_000_000_000 for group in engine.groups] == [0, 5, 6, 9]


def test_a_tenant_cancels_only_its_own(locked: Served, engine: ScriptedEngine) -> None:
    engine.hangs_after = 1
    with opened(locked, {}, "Authorization: Bearer one\r\nX-Request-Id: shared\r\n"):
        wait_until(lambda: len(engine.streams) == 1)
        assert locked.call("DELETE", "/v1/requests/shared", headers=bearer("two")).status == 404
        assert not engine.streams[0].aborted
        engine.hangs_after = None
        assert locked.chat(headers=bearer("two") | {"X-Request-Id": "shared"}).status == 200, "ids are a tenant's own"
        assert engine.groups[0][0].request_id != engine.groups[1][0].request_id
        assert locked.call("DELETE", "/v1/requests/shared", headers=bearer("one")).status == 200
        wait_until(lambda: engine.streams[0].aborted)


def test_metrics_count_what_happened(served: Served, engine: ScriptedEngine) -> None:
    served.chat(n=2)
    served.complete(stop="world", stream=True)
    served.complete(max_tokens=1)
    served.call("GET", "/nothing/here")
    lines = served.call("GET", "/metrics").body.decode().splitlines()
    page = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    model = '{model_name="tiny"}'
    assert page[f"baton_num_requests_running{model}"] == "2.0"
    assert page[f"baton_num_requests_waiting{model}"] == "1.0"
    assert page['baton_kv_blocks{model_name="tiny",state="running"}'] == "64.0"
    assert page[f"baton_kv_cache_usage_perc{model}"] == "0.25"
    assert page[f"baton_prefix_cache_queries_total{model}"] == "7.0"
    assert page[f"baton_prompt_tokens_total{model}"] == str(5.0 + 2 + 2)
    assert page[f"baton_generation_tokens_total{model}"] == str(2 * 17.0 + 2 + 1)
    assert page['baton_request_success_total{finished_reason="stop",model_name="tiny"}'] == "3.0"
    assert page['baton_request_success_total{finished_reason="length",model_name="tiny"}'] == "1.0"
    assert page[f"baton_time_to_first_token_seconds_count{model}"] == "4.0"
    assert page[f"baton_e2e_request_latency_seconds_count{model}"] == "4.0"
    assert page[f"baton_request_generation_tokens_sum{model}"] == str(2 * 17.0 + 2 + 1)
    assert page['baton_http_requests_total{method="GET",path="other",status="404"}'] == "1.0"
    assert page['baton_http_requests_total{method="POST",path="/v1/completions",status="200"}'] == "2.0"


def test_metrics_tell_cut_answers_from_failed_ones(served: Served, engine: ScriptedEngine) -> None:
    engine.hangs_after = 1
    with opened(served, {"n": 2}):
        wait_until(lambda: len(engine.streams) == 2)
    wait_until(lambda: all(one.aborted for one in engine.streams))
    engine.hangs_after, engine.dies_after = None, 1
    assert served.chat().status == 503
    page = served.call("GET", "/metrics").body.decode()
    assert 'baton_request_success_total{finished_reason="abort",model_name="tiny"} 2.0' in page
    assert 'baton_request_success_total{finished_reason="error",model_name="tiny"} 1.0' in page


def test_a_bug_of_ours_is_a_500_in_the_same_shape_and_the_server_serves_on(
    served: Served, engine: ScriptedEngine, text: ModelText
) -> None:
    def broken(_: object) -> list[int]:
        raise RuntimeError("a bug")

    script, engine.script = engine.script, broken
    reply = served.chat(headers={"X-Request-Id": "buggy"})
    assert (reply.status, reply.error["code"], reply.headers["x-request-id"]) == (500, "internal_error", "buggy")
    assert "a bug" not in reply.error["message"]
    engine.script = script
    assert served.chat(headers={"X-Request-Id": "buggy"}).status == 200


def test_browsers_may_call_only_from_allowed_origins(engine: ScriptedEngine, text: ModelText, served: Served) -> None:
    ask = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in served.call("GET", "/v1/models", headers=ask).headers
    settings = ApiSettings(served_model_names=("tiny",), api_keys=("one",), allowed_origins=("https://a.example",))
    with serving(engine, text, settings) as running:
        preflight = running.call("OPTIONS", "/v1/chat/completions", headers=ask)
        assert (preflight.status, preflight.headers["access-control-allow-origin"]) == (200, "https://a.example")
        other = running.call("OPTIONS", "/v1/chat/completions", headers=ask | {"Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


def test_the_operator_s_template_and_defaults_go_before_the_model_s(
    engine: ScriptedEngine, text: ModelText, tmp_path
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}!")
    settings = ApiSettings(
        served_model_names=("tiny",), chat_template=template, default_sampling=SamplingDefaults(temperature=0.0)
    )
    with serving(engine, text, settings) as running:
        running.chat()
    submission = engine.groups[0][0]
    assert text.decode(submission.prompt.tolist()) == "hi!"
    assert (submission.sampling.temperature, submission.sampling.top_k) == (0.0, 20)


def test_a_model_without_a_template_still_completes(engine: ScriptedEngine, settings: ApiSettings) -> None:
    from tests.api.tokenizers_made_here import byte_level

    with serving(engine, ModelText(byte_level()), settings) as running:
        assert running.chat().error["param"] == "messages"
        assert running.complete(max_tokens=2).status == 200


def test_bad_settings_are_refused() -> None:
    bad_keys = (("",), ("team:",), (":",), ("our team:key",), ("team:key", "key"), ("team:key", "others:key"))
    for names, keys in [((), ()), (("",), ()), *((("a",), keys) for keys in bad_keys)]:
        with pytest.raises(BatonError, match=r"served_model_names|API key"):
            ApiSettings(served_model_names=names, api_keys=keys)


async def test_tokenising_does_not_hold_up_the_event_loop(
    engine: ScriptedEngine, text: ModelText, settings: ApiSettings
) -> None:
    """A tokenizer that waits to be released: the loop runs on meanwhile."""
    begun, release = threading.Event(), threading.Event()

    class Slow(ModelText):
        def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
            begun.set()
            release.wait(20)
            return super().encode(text, add_special_tokens, parse_special)

    slow = Slow(text._tokenizer, chat_template=TEMPLATE, eos_ids=text.eos_ids)
    body = json.dumps({"prompt": "hi", "max_tokens": 1, "user": "x" * 4096}).encode()  # a long one: it goes to a thread
    messages = [{"type": "http.request", "body": body}]
    sent = []

    async def receive() -> dict[str, object]:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [(b"content-type", b"application/json")],
        "query_string": b"",
    }
    answering = asyncio.create_task(create_app(engine, slow, settings)(scope, receive, send))
    assert await asyncio.to_thread(begun.wait, 20)
    assert not answering.done()
    release.set()
    await asyncio.wait_for(answering, 5)
    assert sent[0]["status"] == 200
    assert json.loads(sent[1]["body"])["choices"][0]["text"] == REPLY[:5]
