"""Bad input gets a 4xx that names the field, and the server serves on."""

from __future__ import annotations

import json
import socket
import tracemalloc

import pytest

from baton.api import schema
from baton.core.errors import Refusal, RefusalCode
from tests.api.conftest import REPLY, Reply, Served
from tests.api.engine import ScriptedEngine

CHAT = "/v1/chat/completions"
LONG = "x" * 257

FIELDS: list[tuple[str, object]] = [
    ("n", 10**9),
    ("n", 0),
    ("n", 17),
    ("n", True),
    ("n", 1.0),
    ("n", "2"),
    ("n", 10**300),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "hot"),
    ("temperature", True),
    ("temperature", 10**400),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 2**40),
    ("min_p", -1),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2**63),
    ("max_tokens", "5"),
    ("min_tokens", -1),
    ("seed", 2**63),
    ("seed", 1.5),
    ("stream", "yes"),
    ("stream", 1),
    ("stream_options", {"include_usage": True}),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["a"] * 17),
    ("stop", LONG),
    ("stop", "é" * 129),
    ("stop", 5),
    ("stop", [5]),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": None}),
    ("logit_bias", {"1": True}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"01": 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"³": 1}),
    ("logit_bias", {"320": 1}),
    ("logit_bias", {"9" * 5000: 1}),
    ("logit_bias", {str(i): 1 for i in range(1025)}),
    ("logit_bias", [1]),
    ("stop_token_ids", [320]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", ["1"]),
    ("cache_salt", ""),
    ("cache_salt", 5),
    ("ignore_eos", "no"),
    ("best_of", 2),
    ("suffix", "end"),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),  # this model has no place for them
    ("tool_choice", "required"),
    ("functions", [{}]),
    ("response_format", {"type": "json_schema"}),
    ("response_format", "json"),
    ("guided_json", 5),
    ("guided_json", ""),
    ("guided_json", "{"),
    ("guided_json", {"type": "nothing"}),
    ("guided_json", {"enum": ["x" * 1000] * 1000}),
    ("guided_regex", "("),
    ("guided_regex", 5),
    ("guided_choice", []),
    ("guided_choice", "red"),
    ("guided_grammar", ""),
    ("guided_whitespace_pattern", " *"),
    ("structured_outputs", {}),
    ("structured_outputs", "a"),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [320]),
    ("allowed_token_ids", [True]),
    ("bad_words", [""]),
    ("bad_words", "word"),
    ("bad_words", ["w"] * 257),
    ("bad_words", ["w" * 300]),
    ("audio", {"voice": "loud"}),
    ("modalities", ["text", "audio"]),
    ("use_beam_search", True),
    ("generated_token_ids", [1]),
    ("generated_token_ids", None),
    ("completion_token_ids", []),
    ("kv_transfer_params", None),
    ("model", 5),
    ("return_token_ids", 1),
    ("priority", 1001),
    ("priority", -1001),
    ("priority", 1.0),
    ("priority", True),
    ("priority", "1"),
    ("priority", 10**40),
    ("baton_usage", 1),
    ("baton_usage", "yes"),
]

CHAT_FIELDS: list[tuple[str, object, str]] = [
    ("messages", [], "messages"),
    ("messages", "hi", "messages"),
    ("messages", [5], "messages[0]"),
    ("messages", [[]], "messages[0]"),
    ("messages", [{"content": "hi"}], "messages[0].role"),
    ("messages", [{"role": "user"}], "messages[0].content"),
    ("messages", [{"role": "root", "content": "hi"}], "messages[0].role"),
    ("messages", [{"role": "tool", "content": "hi"}], "messages[0].tool_call_id"),
    ("messages", [{"role": "user", "content": 5}], "messages[0].content"),
    ("messages", [{"role": "user", "content": [5]}], "messages[0].content"),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content"),
    ("messages", [{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content"),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content"),
    ("messages", [{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].id"),
    ("messages", [{"role": "assistant", "content": ""}], "messages"),
    ("messages", [1] * 300_000, "messages[0]"),
    ("logprobs", 5, "logprobs"),
    ("top_logprobs", 5, "top_logprobs"),
    ("top_logprobs", 21, "top_logprobs"),
    ("max_completion_tokens", 0, "max_completion_tokens"),
    ("chat_template_kwargs", {"messages": []}, "chat_template_kwargs"),
    ("chat_template_kwargs", {"chat_template": "{{ 1 }}"}, "chat_template_kwargs"),
    ("chat_template_kwargs", {"a b": 1}, "chat_template_kwargs"),
    ("chat_template_kwargs", {"bos_token": ""}, "chat_template_kwargs"),
    ("chat_template_kwargs", {"eos_token": "x"}, "chat_template_kwargs"),
    ("chat_template_kwargs", [], "chat_template_kwargs"),
    ("echo", True, "echo"),
]

PROMPTS: list[object] = [
    "",
    [],
    [""],
    ["a", ""],
    [[]],
    [[1], []],
    [320],
    [-1],
    [2**40],
    [1.5],
    [True],
    [1, "a"],
    ["a", 1],
    ["a", [1]],
    [[1], "a"],
    [None],
    {},
    5,
    None,
    ["a"] * 257,
    [["1"]] * 250,
    [1] * 600,
    "x" * 600,
]

RAW: list[bytes] = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"\xff\xfe{}",
    b'{"model": "\xff"}',
    b'{"model": "\\ud800"}',
    b'{"temperature": NaN}',
    b'{"temperature": Infinity}',
    b'{"unknown": -Infinity}',
    b"[" * 200_000,
    b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    b'{"n": 1' + b"0" * 10_000 + b"}",
    b'{"n": 1} trailing',
]


def is_refusal(reply: Reply, param: str | None) -> bool:
    error = reply.error
    return reply.status == 400 and error["param"] == param and error["type"] == "invalid_request_error" and error["message"]


@pytest.fixture
def still_serving(served: Served):
    yield
    assert served.chat().json()["choices"][0]["message"]["content"] == REPLY


@pytest.mark.usefixtures("still_serving")
def test_each_bad_field_is_refused_by_name(served: Served) -> None:
    for name, value in FIELDS:
        for reply in (served.chat(**{name: value}), served.complete(**{name: value})):
            assert is_refusal(reply, name), (name, str(value)[:50], reply)
            assert len(reply.body) < 2000


@pytest.mark.usefixtures("still_serving")
def test_each_bad_chat_field_is_refused_by_name(served: Served) -> None:
    for name, value, param in CHAT_FIELDS:
        reply = served.chat(**{name: value})
        assert is_refusal(reply, param), (name, str(value)[:50], reply)


@pytest.mark.usefixtures("still_serving")
def test_each_bad_prompt_is_refused_by_name(served: Served, engine: ScriptedEngine) -> None:
    for prompt in PROMPTS:
        reply = served.complete(prompt=prompt)
        assert is_refusal(reply, "prompt"), (str(prompt)[:50], reply)
    assert engine.groups == []


@pytest.mark.usefixtures("still_serving")
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/detokenize"])
def test_what_is_not_json_is_a_400(served: Served, path: str) -> None:
    for raw in RAW:
        reply = served.call("POST", path, raw=raw)
        assert reply.status == 400, (raw[:40], reply)
        assert reply.error["code"] in {"invalid_json", "missing_required_parameter", "invalid_value"}


def test_a_float_beyond_the_range_is_refused_where_a_field_would_take_it(served: Served) -> None:
    raw = b'{"messages": [{"role": "user", "content": "hi"}], "temperature": 1e999}'
    assert is_refusal(served.call("POST", CHAT, raw=raw), "temperature")


def test_what_asks_for_nothing_is_accepted(served: Served) -> None:
    nothing = {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "best_of": None, "stop": None}
    nothing |= {"n": None, "logit_bias": None, "modalities": ["text"], "store": False, "unheard_of": {"deep": [1]}}
    assert served.chat(**nothing).status == 200


def test_prompts_times_choices_are_bounded(served: Served) -> None:
    assert is_refusal(served.complete(prompt=["a"] * 17, n=16), "n")
    assert served.complete(prompt=["a"] * 16, n=16, max_tokens=1).status == 200


def test_more_tokens_at_least_than_at_most_is_refused(served: Served) -> None:
    assert is_refusal(served.complete(min_tokens=3, max_tokens=2), "min_tokens")


def test_too_many_log_probabilities_are_refused(served: Served) -> None:
    assert is_refusal(served.complete(logprobs=21), "logprobs")
    assert is_refusal(served.complete(prompt_logprobs=21), "prompt_logprobs")


def test_an_unknown_model_is_a_404(served: Served) -> None:
    for reply in (served.chat(model="other"), served.complete(model="")):
        assert (reply.status, reply.error["code"], reply.error["param"]) == (404, "model_not_found", "model")


def test_over_the_context_is_said_as_openai_says_it(served: Served) -> None:
    for reply in (served.complete(prompt=[1] * 512), served.complete(max_tokens=511), served.chat(max_tokens=512)):
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
        assert "512" in reply.error["message"]
    assert served.complete(prompt=[1] * 511).status == 200


def test_paths_and_methods_that_are_not_there(served: Served) -> None:
    for method, path, status in [
        ("POST", "/", 405),
        ("GET", "/v1", 404),
        ("GET", CHAT, 405),
        ("DELETE", CHAT, 405),
        ("POST", "/v1/models", 405),
        ("POST", CHAT + "/", 404),
        ("DELETE", "/v1/requests/none", 404),
        ("PUT", "/v1/models", 405),
    ]:
        reply = served.call(method, path)
        assert (reply.status, reply.error["type"]) == (status, "invalid_request_error"), (method, path)
        assert reply.headers["x-request-id"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_only_json_is_taken(served: Served, kind: str) -> None:
    reply = served.call("POST", CHAT, {"messages": []}, {"Content-Type": kind})
    assert (reply.status, reply.error["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("request_id", ["a b", "x" * 129, "é", "a/b", "a:0", ""])
def test_a_request_id_that_is_not_sane_is_refused(served: Served, request_id: str) -> None:
    reply = served.chat(headers={"X-Request-Id": request_id.encode().decode("latin-1")})
    assert is_refusal(reply, "X-Request-Id")
    assert reply.headers["x-request-id"] != request_id


@pytest.mark.usefixtures("still_serving")
@pytest.mark.parametrize("announced", [True, False])
def test_a_body_of_100_mb_is_cut_off_early(served: Served, announced: bool) -> None:
    size = 100 << 20
    framing = f"Content-Length: {size}" if announced else "Transfer-Encoding: chunked"
    piece = b"x" * 65_536 if announced else b"10000\r\n" + b"x" * 65_536 + b"\r\n"
    sent = 0
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as sock:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n{framing}\r\n\r\n"
        sock.sendall(head.encode())
        try:
            while sent < size:
                sock.sendall(piece)
                sent += len(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass
        answer = sock.recv(65_536)
    assert answer.startswith(b"HTTP/1.1 413")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_too_large"
    assert sent < 24 << 20, "4 MiB and what the socket buffers hold"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (RefusalCode.QUEUE_FULL, 429),
        (RefusalCode.DRAINING, 503),
        (RefusalCode.POOL_EXCEEDED, 400),
        (RefusalCode.CONTEXT_EXCEEDED, 400),
        (RefusalCode.DUPLICATE_ID, 409),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_s_refusal_has_its_status(
    served: Served, engine: ScriptedEngine, code: RefusalCode, status: int, stream: bool
) -> None:
    engine.refusal = Refusal(code, "because", retry_after_s=7)
    reply = served.chat(stream=stream, headers={"X-Request-Id": "again"})
    assert (reply.status, reply.error["code"], reply.error["message"]) == (status, code.value, "because")
    assert reply.headers.get("retry-after") == ("7" if status in (429, 503) else None)
    engine.refusal = None
    assert served.chat(headers={"X-Request-Id": "again"}).status == 200, "a refused request's id is free"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prefill_instance_says_where_to_go(served: Served, engine: ScriptedEngine, stream: bool) -> None:
    """Not a status that clients try again at the same address, where it would never be served."""
    engine.refusal = Refusal(RefusalCode.WRONG_ROLE, "this instance prefills for others", retry_after_s=7)
    for reply in (served.chat(stream=stream), served.complete(stream=stream)):
        assert (reply.status, reply.error["code"], reply.error["param"]) == (421, "wrong_role", None)
        assert reply.error["type"] == "invalid_request_error"
        assert "this instance prefills for others" in reply.error["message"]
        assert "decode or mixed" in reply.error["message"]
        assert "retry-after" not in reply.headers


INTERNAL_VALUES: dict[str, object] = {
    "generated_token_ids": [104, 105],
    "completion_token_ids": [104],
    "transfer_address": "tcp:127.0.0.1:4711",
    "transfer_params": {"token": "aa"},
    "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 4711},
    "sent_characters": [5],
    "prefill_instance": "p",
    "decode_instance": "d",
    "attempt": 2,
    "lease": 1,
}


@pytest.mark.usefixtures("still_serving")
@pytest.mark.parametrize("name", sorted(INTERNAL_VALUES))
def test_what_only_instances_tell_each_other_no_client_can_set(served: Served, engine: ScriptedEngine, name: str) -> None:
    for value in (INTERNAL_VALUES[name], None, [], {}, ""):
        for reply in (
            served.chat(**{name: value}),
            served.complete(**{name: value}),
            served.complete(stream=True, **{name: value}),
        ):
            assert is_refusal(reply, name), (name, value, reply)
            assert "internal" in reply.error["message"]
    assert engine.groups == []


@pytest.mark.usefixtures("still_serving")
def test_no_spelling_of_the_body_gets_an_internal_field_through(served: Served, engine: ScriptedEngine) -> None:
    for field in (b'"generated_token_ids": [1], "generated_token_ids": null', b'"\\u0067enerated_token_ids": [1]'):
        reply = served.call("POST", "/v1/completions", raw=b'{"prompt": "hi", ' + field + b"}")
        assert is_refusal(reply, "generated_token_ids")
    assert engine.groups == []


def test_internal_fields_deeper_in_a_body_reach_nothing(served: Served, engine: ScriptedEngine) -> None:
    """What is ignored there is ignored for every name: the request is the same with it and without."""
    internal = {"generated_token_ids": [105], "transfer_address": "tcp:127.0.0.1:1"}
    message = {"role": "user", "content": "hi"}
    served.chat(seed=1, stream=True)
    served.chat(seed=1, stream=True, messages=[message | internal], stream_options=internal, chat_template_kwargs=internal)
    plain, decorated = (group[0] for group in engine.groups)
    assert plain.prompt.tolist() == decorated.prompt.tolist()
    assert (plain.sampling, plain.max_tokens, plain.salt) == (decorated.sampling, decorated.max_tokens, decorated.salt)


def test_tokenize_and_detokenize(served: Served) -> None:
    tokens = served.call("POST", "/tokenize", {"prompt": "héllo", "return_token_strs": True}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert served.call("POST", "/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "héllo"}
    chat = served.call("POST", "/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()
    assert chat["count"] == 5
    for path, body, param in [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "hi"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {"tokens": [320]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ]:
        assert is_refusal(served.call("POST", path, body), param), (path, body)


@pytest.mark.parametrize(
    "name",
    ["generated_token_ids", "prefill_at", "bootstrap_host", "bootstrap_port", "bootstrap_room", "kv_transfer_params",
     "disaggregated_params", "origin"],
)  # fmt: skip
def test_a_field_that_only_routers_may_set_is_refused_by_its_name_and_counted(served: Served, name: str) -> None:
    for value in (None, [1, 2], "x"):
        reply = served.complete(**{name: value})
        assert (reply.status, reply.error["param"]) == (400, name)
    assert f'baton_refused_fields_total{{field="{name}"}} 3.0' in served.call("GET", "/metrics").body.decode()


def test_names_of_unknown_fields_are_not_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "_logged", {})
    tracemalloc.start()
    try:
        for number in range(64):
            schema.parse(b'{"prompt": "a", "%d%s": 1}' % (number, b"x" * (256 << 10)), schema.CompletionBody)
        kept_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept_bytes < 1 << 20
