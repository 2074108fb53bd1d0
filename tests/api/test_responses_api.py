"""`/v1/responses`, as clients see it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponseFunctionToolCall, ResponseReasoningItem

from baton.api.engine import StreamEnd, TokenBurst
from baton.api.errors import ApiError
from baton.api.model_text import ModelText
from baton.api.parsers.choosing import ReasoningParserChoice
from baton.api.parsers.hermes import HermesParser
from baton.api.parsers.parts import AnswerParser
from baton.api.parsers.thinking import ThinkingParser
from baton.api.responses import ResponseHeader, WholeChoice
from baton.api.responses_api.body import ResponsesBody
from baton.api.responses_api.writer import ResponsesWriter
from baton.api.schema import parse
from baton.api.settings import ApiSettings
from baton.api.text_reader import ChoiceReader
from baton.core.engine.request import FinishReason
from baton.core.handover.faults import PdCode, PdFault, PdStage
from tests.api.conftest import Reply, Served, serving
from tests.api.engine import ScriptedEngine
from tests.api.test_tools import TEMPLATE
from tests.api.tokenizers_made_here import byte_level

PATH = "/v1/responses"
LOOK_UP: dict[str, Any] = {
    "type": "function",
    "name": "look_up",
    "description": "Look up é",
    "parameters": {"type": "object", "properties": {}},
    "strict": False,
}
CALLS = (
    '<tool_call>\n{"name": "look_up", "arguments": {"city": "Paris é"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>'
)
ANSWER = "Let me see.\n" + CALLS
THOUGHT = "<think>\nhm é\n</think>\n\n" + ANSWER
MODEL = ModelText(byte_level(), chat_template=TEMPLATE, eos_ids=byte_level().encode("<|end|>").ids)
USAGE: dict[str, object] = {
    "prompt_tokens": 3,
    "completion_tokens": 4,
    "total_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 2},
}


@pytest.fixture(scope="module")
def text() -> ModelText:
    return MODEL


@pytest.fixture
def engine(text: ModelText) -> ScriptedEngine:
    return ScriptedEngine(lambda _: [*text.encode(THOUGHT), min(text.eos_ids)], vocabulary=320, context_tokens=4096)


@pytest.fixture
def settings_of_server() -> ApiSettings:
    return ApiSettings(served_model_names=("tiny",), reasoning_parser=ReasoningParserChoice.THINK)


@pytest.fixture
def served(engine: ScriptedEngine, text: ModelText, settings_of_server: ApiSettings) -> Iterator[Served]:
    with serving(engine, text, settings_of_server) as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.base_url, api_key="unused", max_retries=0) as client:
        yield client


def says(engine: ScriptedEngine, text: ModelText, answer: str) -> None:
    engine.script = lambda _: [*text.encode(answer), min(text.eos_ids)]


def prompt_of(engine: ScriptedEngine, text: ModelText) -> str:
    return text.decode(engine.groups[-1][0].prompt.tolist())


def respond(served: Served, **fields: object) -> Reply:
    return served.call("POST", PATH, {"model": "tiny", "input": "hi"} | fields)


def events_in(body: bytes) -> list[Any]:
    """The data of each event; its `event` line says the same type."""
    events = []
    for block in body.decode().split("\n\n")[:-1]:
        kind, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def without_ids(response: Any) -> Any:
    """Without what differs between two requests for the same answer."""
    output = [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in response["output"]]
    return {name: value for name, value in response.items() if name not in ("id", "created_at")} | {"output": output}


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_official_client_gets_text(client: openai.OpenAI, engine: ScriptedEngine, text: ModelText) -> None:
    says(engine, text, "Hello é.")
    response = client.responses.create(model="tiny", input="hi", instructions="Be kind.", metadata={"a": "b"}, store=True)
    assert (response.output_text, response.status, response.object) == ("Hello é.", "completed", "response")
    assert response.id.startswith("resp-")
    assert (response.instructions, response.metadata) == ("Be kind.", {"a": "b"})
    assert response.usage is not None
    tokens = len(text.encode("Hello é.")) + 1
    assert (response.usage.output_tokens, response.usage.total_tokens) == (tokens, tokens + response.usage.input_tokens)
    assert prompt_of(engine, text) == "<|system|>Be kind.<|end|><|user|>hi<|end|><|assistant|>"
    assert (response.model_extra or {})["store"] is False


def test_the_official_client_gets_reasoning_a_message_and_calls(client: openai.OpenAI) -> None:
    response = client.responses.create(model="tiny", input="hi", tools=[LOOK_UP])  # type: ignore[list-item]
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    reasoning, _, *calls = response.output
    assert isinstance(reasoning, ResponseReasoningItem)
    assert [part.text for part in reasoning.content or []] == ["hm é"]
    assert response.output_text == "Let me see."
    found = [call for call in calls if isinstance(call, ResponseFunctionToolCall)]
    assert [(call.name, json.loads(call.arguments)) for call in found] == [
        ("look_up", {"city": "Paris é"}), ("look_up", {}),
    ]  # fmt: skip
    assert len({call.call_id for call in found} | {item.id for item in response.output}) == 6
    assert {item.status for item in response.output} == {"completed"}  # type: ignore[union-attr]
    assert [tool.to_dict() for tool in response.tools] == [LOOK_UP]


@pytest.mark.parametrize("burst", [1, 3, 1000])
def test_the_official_client_follows_a_stream(client: openai.OpenAI, engine: ScriptedEngine, burst: int) -> None:
    engine.burst_tokens = burst
    texts: dict[str, str] = {}
    with client.responses.stream(model="tiny", input="hi", tools=[LOOK_UP]) as stream:  # type: ignore[list-item]
        for event in stream:
            if event.type in (
                "response.output_text.delta",
                "response.reasoning_text.delta",
                "response.function_call_arguments.delta",
            ):
                texts[event.item_id] = texts.get(event.item_id, "") + event.delta
        final = stream.get_final_response()
    output: Any = final.to_dict()["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert [texts[item["id"]] for item in output[:2]] == ["hm é", "Let me see."]
    assert [json.loads(texts[item["id"]]) for item in output[2:]] == [{"city": "Paris é"}, {}]
    assert final.output_text == "Let me see."


def test_a_stream_ends_with_the_response_that_is_sent_whole(served: Served) -> None:
    whole = respond(served, tools=[LOOK_UP], temperature=0.5, metadata={"a": "b"}).json()
    reply = respond(served, tools=[LOOK_UP], temperature=0.5, metadata={"a": "b"}, stream=True)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = events_in(reply.body)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[-1]["type"] == "response.completed"
    assert without_ids(events[-1]["response"]) == without_ids(whole)


def test_items_are_opened_and_closed_one_after_the_other(served: Served) -> None:
    events = events_in(respond(served, tools=[LOOK_UP], stream=True).body)
    kinds = [event["type"].removeprefix("response.") for event in events if not event["type"].endswith(".delta")]
    message = ["output_item.added", "content_part.added", "{}.done", "content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.done", "output_item.done"]
    assert kinds == [
        "created",
        "in_progress",
        *(kind.format("reasoning_text") for kind in message),
        *(kind.format("output_text") for kind in message),
        *call,
        *call,
        "completed",
    ]
    output = events[-1]["response"]["output"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == output
    for event in events:
        if "item_id" in event:
            assert output[event["output_index"]]["id"] == event["item_id"]


def test_a_model_without_parsers_answers_with_text(engine: ScriptedEngine, text: ModelText) -> None:
    with serving(
        engine, text, ApiSettings(served_model_names=("tiny",), chat_template="{{ messages[0].content }}")
    ) as running:
        says(engine, text, "Plain é")
        assert respond(running).json()["output"][0]["content"][0]["text"] == "Plain é"
        says(engine, text, "")
        assert [item["content"][0]["text"] for item in respond(running).json()["output"]] == [""]
        assert events_in(respond(running, stream=True).body)[-1]["response"]["output"][0]["status"] == "completed"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_by_its_limit_is_incomplete(served: Served, stream: bool) -> None:
    reply = respond(served, max_output_tokens=14, stream=stream)
    if stream:
        last = events_in(reply.body)[-1]
        assert last["type"] == "response.incomplete"
    response = last["response"] if stream else reply.json()
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [(item["type"], item["status"]) for item in response["output"]] == [("reasoning", "incomplete")]
    assert response["max_output_tokens"] == response["usage"]["output_tokens"] == 14


def test_a_call_that_a_stop_string_cuts_is_not_complete(served: Served) -> None:
    response = respond(served, tools=[LOOK_UP], stop="Paris").json()
    assert (response["status"], response["output"][-1]["status"]) == ("completed", "incomplete")


@pytest.mark.parametrize("alone", [False, True])
def test_an_attempt_that_has_to_go_on_elsewhere_is_an_error(served: Served, engine: ScriptedEngine, alone: bool) -> None:
    engine.fault = lambda _: PdFault(PdCode.PREEMPTED, PdStage.DECODE, "no room")
    engine.faults_come_alone = alone
    assert respond(served).status == 503
    last = events_in(respond(served, stream=True).body)[-1]
    assert (last["type"], last["code"]) == ("error", "502")


def test_a_stream_that_breaks_ends_with_an_error(served: Served, engine: ScriptedEngine) -> None:
    engine.dies_after = 12
    last = events_in(respond(served, stream=True).body)[-1]
    assert set(last) == {"type", "code", "message", "param", "sequence_number"}
    assert (last["type"], last["code"]) == ("error", "engine_dead")


# ── input ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_items_become_the_messages_of_a_chat(served: Served, engine: ScriptedEngine, text: ModelText) -> None:
    call = {"type": "function_call", "name": "f", "arguments": '{"a": 1}'}
    history = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
        {"type": "message", "role": "assistant", "id": "m", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "reasoning", "id": "rs_2", "summary": []},
        call | {"call_id": "c1"},
        call | {"call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]},
        call | {"call_id": "c3"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": ""},
    ]
    assert respond(served, input=history, instructions="Top.").status == 200
    made = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    assert prompt_of(engine, text) == (
        "<|system|>Top.<|end|><|system|>Be kind.<|end|><|user|>a\nb<|end|>"
        f"<|assistant|>I look.{made}{made}<|end|><|tool|>sunnyc1<|end|><|tool|>rainc2<|end|>"
        f"<|assistant|>No.{made}<|end|><|user|><|end|><|assistant|>"
    )


def test_an_answer_can_be_sent_back_as_input(client: openai.OpenAI, engine: ScriptedEngine, text: ModelText) -> None:
    tools: Any = [LOOK_UP]
    first = client.responses.create(model="tiny", input="hi", tools=tools)
    history: Any = [{"role": "user", "content": "hi"}, *(item.to_dict() for item in first.output)]
    ids = [item.call_id for item in first.output if item.type == "function_call"]
    history += [{"type": "function_call_output", "call_id": call_id, "output": "21 °C"} for call_id in ids]
    assert client.responses.create(model="tiny", input=history, tools=tools).status == "completed"
    prompt = prompt_of(engine, text)
    assert prompt.count("<|assistant|>") == 2
    assert "<|assistant|>Let me see.<tool_call>" in prompt
    assert all(f"<|tool|>21 °C{call_id}<|end|>" in prompt for call_id in ids)


def test_sampling_fields_reach_the_engine(served: Served, engine: ScriptedEngine) -> None:
    fields: dict[str, object] = {"seed": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "priority": 3}
    assert respond(served, **fields, ignore_eos=True, max_output_tokens=9, repetition_penalty=1.5).status == 200
    submission = engine.groups[0][0]
    sampling = submission.sampling
    assert (sampling.seed, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.5, 0.9, 5)
    assert (sampling.min_p, sampling.repetition_penalty, submission.max_tokens) == (0.1, 1.5, 9)
    assert (submission.priority, sampling.stop_token_ids) == (3, ())


USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([], "input"),
        (5, "input"),
        (None, "input"),
        ({}, "input"),
        ([{"type": "reasoning"}], "input"),
        ([5], "input[0]"),
        ([USER, None], "input[1]"),
        ([USER, USER, USER, {"role": "user", "content": [5]}], "input[3].content[0]"),
        ([USER, {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_image"}]}],
         "input[1].content[1]"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
        ([{"role": "user", "content": [{"type": []}]}], "input[0].content[0]"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "user", "content": None}], "input[0].content"),
        ([{"content": "hi"}], "input[0].role"),
        ([{"role": "tool", "content": "hi"}], "input[0].role"),
        ([{"type": "computer_call"}], "input[0].type"),
        ([{"type": {}}], "input[0].type"),
        ([{"type": "item_reference", "id": "msg_1"}], "input[0]"),
        ([USER, {**CALL, "arguments": {}}], "input[1].arguments"),
        ([USER, {**CALL, "name": "x" * 257}], "input[1].name"),
        ([USER, {"type": "function_call", "call_id": "c"}], "input[1].name"),
        ([{"type": "function_call_output", "output": "x"}], "input[0].call_id"),
        ([{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file"}]}], "input[0].output[0]"),
        ([USER, *([CALL] * 129)], "input[129]"),
        ([1] * 9_000, "input[0]"),
        ([USER] * 10_001, "input"),
    ],
)  # fmt: skip
def test_a_bad_item_is_named_by_its_place(served: Served, items: object, param: str) -> None:
    reply = respond(served, input=items)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert f"'{param}" in reply.error["message"]
    assert len(reply.body) < 2000


def test_a_body_without_input_is_refused(served: Served) -> None:
    error = served.call("POST", PATH, {"model": "tiny"}).error
    assert (error["param"], error["code"]) == ("input", "missing_required_parameter")


# ── fields ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "value", "param"),
    [
        ("previous_response_id", "resp_1", "previous_response_id"),
        ("conversation", {"id": "conv_1"}, "conversation"),
        ("background", True, "background"),
        ("prompt", {"id": "pmpt_1"}, "prompt"),
        ("truncation", "auto", "truncation"),
        ("top_logprobs", 1, "top_logprobs"),
        ("max_tokens", 5, "max_tokens"),
        ("messages", [USER], "messages"),
        ("n", 2, "n"),
        ("response_format", {"type": "json_object"}, "response_format"),
        ("generated_token_ids", [1], "generated_token_ids"),
    ],
)
def test_what_is_not_there_is_refused_by_name(served: Served, name: str, value: object, param: str) -> None:
    error = respond(served, tools=[LOOK_UP], **{name: value}).error
    assert (error["param"], error["code"]) == (param, "unsupported_parameter")
    assert param in error["message"]
    if name in ("previous_response_id", "conversation", "background", "prompt"):
        assert "send the whole conversation in 'input'" in error["message"]


@pytest.mark.parametrize(
    ("name", "value", "param"),
    [
        ("tools", [{"type": "web_search"}], "tools[0].type"),
        ("tools", [LOOK_UP, {"type": "function"}], "tools[1].name"),
        ("tools", [{"type": "function", "function": {"name": "f"}}], "tools[0].name"),
        ("tools", [LOOK_UP, LOOK_UP], "tools"),
        ("tools", [LOOK_UP] * 129, "tools"),
        ("tool_choice", {"type": "web_search_preview"}, "tool_choice"),
        ("tool_choice", "always", "tool_choice"),
        ("tool_choice", "required", "tool_choice"),
        ("text", {"format": {"type": "xml"}}, "text.format.type"),
        ("metadata", {"a": 1}, "metadata"),
        ("metadata", {"x" * 3000: "b"}, "metadata"),
        ("metadata", {str(i): "" for i in range(17)}, "metadata"),
        ("max_output_tokens", 0, "max_output_tokens"),
        ("max_output_tokens", "5", "max_output_tokens"),
        ("temperature", 3, "temperature"),
        ("top_p", 0, "top_p"),
        ("truncation", "later", "truncation"),
        ("top_logprobs", 21, "top_logprobs"),
        ("instructions", 5, "instructions"),
        ("stream", "yes", "stream"),
        ("stop", [""], "stop"),
        ("priority", -1, "priority"),
        ("cache_salt", "", "cache_salt"),
        ("background", 1, "background"),
        ("chat_template_kwargs", {"messages": []}, "chat_template_kwargs"),
    ],
)
def test_a_bad_field_is_refused_by_name(served: Served, name: str, value: object, param: str) -> None:
    reply = respond(served, **{name: value})
    assert (reply.status, reply.error["param"]) == (400, param)
    assert len(reply.body) < 2000


def test_a_tool_of_another_type_is_refused_by_its_type(served: Served) -> None:
    assert "'web_search'" in respond(served, tools=[{"type": "web_search"}]).error["message"]


def test_tools_that_are_not_offered_are_bounded_too(served: Served) -> None:
    large = LOOK_UP | {"description": "x" * 300_000}
    assert respond(served, tools=[large], tool_choice="none").error["code"] == "request_too_large"


def test_fields_without_effect_are_accepted(served: Served) -> None:
    fields: dict[str, object] = {
        "background": False,
        "conversation": None,
        "include": ["reasoning.encrypted_content"],
        "max_tool_calls": 3,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": "k",
        "reasoning": {"effort": "high", "summary": "auto"},
        "safety_identifier": "s",
        "service_tier": "auto",
        "store": True,
        "stream_options": {"include_obfuscation": False},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "tool_choice": "auto",
        "top_logprobs": 0,
        "truncation": "disabled",
        "user": "u",
    }
    response = respond(served, **fields).json()
    assert (response["status"], response["store"], response["previous_response_id"]) == ("completed", False, None)


def test_the_bill_is_in_the_usage_where_it_is_asked_for(served: Served) -> None:
    assert "attempts" in respond(served, baton_usage=True).json()["usage"]["baton"]
    assert "baton" not in respond(served).json()["usage"]


NAMES = sorted(set(ResponsesBody.model_fields) - {"model", "input"})
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
WORDS = st.sampled_from(
    ["message", "function_call", "function_call_output", "reasoning", "input_text", "output_text", "user", "assistant", "x"]
)
PARTS = st.dictionaries(st.sampled_from(["type", "text", "refusal"]), WORDS | JSON)
ITEMS = st.dictionaries(
    st.sampled_from(["type", "role", "content", "call_id", "name", "arguments", "output"]),
    WORDS | st.lists(PARTS, max_size=2) | JSON,
)


@settings(max_examples=400, deadline=None)
@given(st.lists(ITEMS | JSON, max_size=4) | JSON, st.dictionaries(st.sampled_from(NAMES), JSON, max_size=2))
def test_nonsense_is_a_chat_or_a_400(items: object, fields: dict[str, object]) -> None:
    raw = json.dumps({"input": items} | fields).encode()
    try:
        chat = parse(raw, ResponsesBody).as_chat()
        status = 200 if chat.messages else 0
    except ApiError as error:
        status = error.status
    assert status in (200, 400)


# ── any cut of an answer into bursts ─────────────────────────────────────────────────────────────────────────────────────

BODY = parse(b'{"input": "hi", "tools": []}', ResponsesBody)
HEADER = ResponseHeader("resp-1", 5, "tiny", True, False, [(1,)], 1)
FINISHES = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT])


def reader_of(parser: AnswerParser | None) -> ChoiceReader:
    return ChoiceReader(0, MODEL.detokenizer(), None, MODEL.eos_ids, parser=parser)


def bursts(ids: Sequence[int], cuts: list[int], finish: FinishReason) -> list[TokenBurst]:
    ends = sorted({cut % (len(ids) + 1) for cut in cuts} | {len(ids)})
    parts = [tuple(ids[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    last = TokenBurst(parts[-1], (), StreamEnd(finish, 0))
    return [*(TokenBurst(part, (), None) for part in parts[:-1]), last]


def streamed(reader: ChoiceReader, pieces: list[TokenBurst]) -> list[Any]:
    writer, events = ResponsesWriter(BODY, HEADER), b""
    for piece in pieces:
        delta = reader.read(piece)
        events += (writer.opening(delta) if delta.first else b"") + writer.event(delta)
    return events_in(events + writer.usage_event(USAGE))


def whole(reader: ChoiceReader, pieces: list[TokenBurst]) -> Any:
    choice = WholeChoice()
    for piece in pieces:
        choice.add(reader.read(piece))
    return json.loads(b"".join(ResponsesWriter(BODY, HEADER).whole([choice], USAGE)))


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(
        [
            THOUGHT,
            ANSWER,
            CALLS,
            "Yes é.",
            "",
            " \n",
            "<think>\nhm",
            "<think></think>\n\nYes.",
            "\n" + CALLS,
            f"{THOUGHT}\nOne. {CALLS}\nTwo.\n{CALLS} Three.",
        ]
    ),
    st.lists(st.integers(0, 300), max_size=6),
    st.booleans(),
    FINISHES,
)
def test_however_an_answer_is_cut_the_stream_adds_up_to_the_whole(
    answer: str, cuts: list[int], has_parser: bool, finish: FinishReason
) -> None:
    def reader() -> ChoiceReader:
        return reader_of(ThinkingParser(HermesParser(("look_up",)), False) if has_parser else None)

    ids = MODEL.encode(answer) if answer else []
    events = streamed(reader(), bursts(ids, cuts, finish))
    response = events[-1]["response"]
    assert response == whole(reader(), bursts(ids, [], finish))
    assert sum(event["type"] == "response.output_item.added" for event in events) == len(response["output"])
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == response["output"]
    texts = [""] * len(response["output"])
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["output_index"]] += event["delta"]
    assert texts == [
        item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"] for item in response["output"]
    ]


def test_a_message_after_a_call_is_an_item_of_its_own() -> None:
    reader = reader_of(HermesParser(("look_up",)))
    events = streamed(reader, bursts(MODEL.encode(ANSWER + "\nThat is all."), [], FinishReason.STOP))
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "function_call", "message"]
    assert output[-1]["content"][0]["text"] == "That is all."


def test_ids_are_equal_in_every_process_and_differ_between_requests() -> None:
    def ids(header: ResponseHeader) -> list[str]:
        writer, reader = ResponsesWriter(BODY, header), reader_of(HermesParser(("look_up",)))
        choice = WholeChoice()
        choice.add(reader.read(TokenBurst(tuple(MODEL.encode(ANSWER)), (), StreamEnd(FinishReason.STOP, 0))))
        output = json.loads(b"".join(writer.whole([choice], USAGE)))["output"]
        return [item["id"] for item in output] + [item.get("call_id", "") for item in output]

    other = ResponseHeader("resp-2", 5, "tiny", True, False, [(1,)], 1)
    assert ids(HEADER) == ids(HEADER)
    assert not (set(ids(HEADER)) & set(ids(other))) - {""}


def test_an_answer_that_ended_in_any_other_way_does_not_look_complete() -> None:
    pieces = bursts(MODEL.encode("Yes."), [2], FinishReason.ERROR)
    last = streamed(reader_of(None), pieces)[-1]
    assert last["type"] == "response.failed"
    for response in (last["response"], whole(reader_of(None), pieces)):
        assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
        assert [item["status"] for item in response["output"]] == ["incomplete"]
    assert whole(reader_of(None), bursts([], [], FinishReason.ERROR))["output"] == []


def test_the_usage_has_the_names_of_this_api() -> None:
    response = whole(reader_of(None), bursts(MODEL.encode("a"), [], FinishReason.STOP))
    assert response["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 2},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 7,
    }
    assert whole(reader_of(None), bursts(MODEL.encode("a"), [], FinishReason.ABORT))["status"] == "cancelled"
