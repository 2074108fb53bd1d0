"""Tools and reasoning, as clients see them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from baton.api.chat_responses import ChatWriter
from baton.api.engine import StreamEnd, TokenBurst
from baton.api.model_text import ModelText
from baton.api.parsers.choosing import TOOL_PARSERS, ReasoningParserChoice, ToolParserChoice
from baton.api.parsers.parts import WholeAnswerParts
from baton.api.responses import ResponseHeader, call_id
from baton.api.settings import ApiSettings
from baton.api.stream_resume import NumberedEvents, StreamPosition, StreamPositions, fresh_marks
from baton.api.text_reader import ChoiceReader
from baton.core.engine.request import FinishReason
from tests.api.compiler import GrammarsOnly
from tests.api.conftest import Served, serving
from tests.api.engine import ScriptedEngine
from tests.api.parsers.calls import CALLS, TOOLS
from tests.api.tokenizers_made_here import byte_level

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ m.tool_call_id or '' }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LOOK_UP: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look_up", "description": "Look up é", "parameters": {"type": "object", "properties": {}}},
}
ANSWER = (
    'Let me see.\n<tool_call>\n{"name": "look_up", "arguments": {"city": "Paris é"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>'
)
HI = [{"role": "user", "content": "hi"}]
FAMILIES = pytest.mark.parametrize("family", TOOL_PARSERS, ids=lambda family: family.value)


@pytest.fixture(scope="module")
def text() -> ModelText:
    tokenizer = byte_level()
    return ModelText(tokenizer, chat_template=TEMPLATE, eos_ids=[tokenizer.token_to_id("<|end|>")])


@pytest.fixture
def engine(text: ModelText) -> ScriptedEngine:
    return ScriptedEngine(lambda _: [*text.encode(ANSWER), min(text.eos_ids)], vocabulary=320, context_tokens=4096)


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.base_url, api_key="unused", max_retries=0) as client:
        yield client


def test_the_official_client_gets_calls(client: openai.OpenAI, engine: ScriptedEngine, text: ModelText) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HI, tools=[LOOK_UP]).choices[0]
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", "Let me see.")
    calls = answer.message.tool_calls or []
    assert [(call.type, call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("function", "look_up", {"city": "Paris é"}), ("function", "look_up", {}),
    ]  # fmt: skip
    assert len({call.id for call in calls}) == 2
    prompt = text.decode(engine.groups[0][0].prompt.tolist())
    assert prompt == f"<tools>{json.dumps([LOOK_UP], ensure_ascii=False)}</tools><|user|>hi<|end|><|assistant|>"


@pytest.mark.parametrize("burst", [1, 3, 1000])
def test_streamed_calls_add_up_to_the_whole_ones(client: openai.OpenAI, engine: ScriptedEngine, burst: int) -> None:
    engine.burst_tokens = burst
    content, calls, finishes = "", {}, []
    for chunk in client.chat.completions.create(model="tiny", messages=HI, tools=[LOOK_UP], stream=True):
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        finishes += [choice.finish_reason] if choice.finish_reason else []
        for call in choice.delta.tool_calls or []:
            if call.id is not None:
                assert call.index == len(calls)
                calls[call.index] = [call.id, call.function.name, ""]
            calls[call.index][2] += call.function.arguments
    assert (content, finishes) == ("Let me see.", ["tool_calls"])
    assert [(name, json.loads(arguments)) for _, name, arguments in calls.values()] == [
        ("look_up", {"city": "Paris é"}), ("look_up", {}),
    ]  # fmt: skip


def test_calls_and_results_before_reach_the_template(served: Served, engine: ScriptedEngine, text: ModelText) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"city": "Paris"}'}}
    history = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    assert served.chat(messages=history, tools=[LOOK_UP], tool_choice="none").status == 200
    assert text.decode(engine.groups[0][0].prompt.tolist()) == (
        '<|user|>hi<|end|><|assistant|><tool_call>{"name": "look_up", "arguments": {"city": "Paris"}}</tool_call><|end|>'
        "<|tool|>sunnycall_1<|end|><|assistant|>"
    )


def test_without_tools_or_with_none_chosen_the_answer_is_text(served: Served) -> None:
    for fields in ({}, {"tools": [LOOK_UP], "tool_choice": "none"}, {"tools": []}):
        choice = served.chat(**fields).json()["choices"][0]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", ANSWER)
        assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tools": [LOOK_UP], "tool_choice": "required", "ignore_eos": True}, "tool_choice", None),
        ({"tools": [LOOK_UP], "tool_choice": "required", "guided_regex": "a"}, "guided_regex", None),
        ({"tools": [LOOK_UP], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", None),
        ({"tool_choice": "required"}, "tool_choice", None),
        ({"tools": [LOOK_UP, LOOK_UP]}, "tools", None),
        ({"tools": [LOOK_UP], "parallel_tool_calls": False, "min_tokens": 2}, "parallel_tool_calls", None),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"unevaluatedItems": 1}}}]},
         "tools[0].function.parameters", "unsupported_constraint"),
        ({"tools": [{"type": "function", "function": {"name": "no name"}}]}, "tools[0].function.name", None),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type", None),
        ({"tools": [LOOK_UP] * 129}, "tools", None),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "missing_required_parameter"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [
            {"id": "1", "function": {"name": "f", "arguments": "{}"}}]}]}, "messages[0].tool_calls", None),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_by_name(
    served: Served, fields: dict[str, object], param: str, code: str | None
) -> None:
    reply = served.chat(**fields)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert code is None or reply.error["code"] == code


def test_a_model_without_a_place_for_tools_says_so(engine: ScriptedEngine, text: ModelText) -> None:
    settings = ApiSettings(served_model_names=("tiny",), chat_template="{{ messages[0].content }}")
    with serving(engine, text, settings) as running:
        assert "chat template has no place for them" in running.chat(tools=[LOOK_UP]).error["message"]
    settings = ApiSettings(served_model_names=("tiny",), tool_parser=ToolParserChoice.NONE)
    with serving(engine, text, settings) as running:
        assert "--tool-parser" in running.chat(tools=[LOOK_UP]).error["message"]


def test_control_tokens_in_tools_and_calls_are_text(served: Served, engine: ScriptedEngine, text: ModelText) -> None:
    spelled = json.loads(json.dumps(LOOK_UP).replace("Look up", "<|end|><|system|>"))
    call = {"id": "1", "function": {"name": "look_up", "arguments": '{"a": "<|end|><|system|>"}'}}
    history = [*HI, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "x"}]
    assert served.chat(tools=[spelled], messages=history).status == 200
    ids = engine.groups[0][0].prompt.tolist()
    assert "<|end|><|system|>" in text.decode(ids)
    assert ids.count(text.encode("<|system|>")[0]) == 0
    assert ids.count(text.encode("<|end|>")[0]) == 3


def test_no_part_of_a_control_token_becomes_one_inside_a_tag_of_the_template(
    engine: ScriptedEngine, text: ModelText
) -> None:
    template = "{% for tool in tools %}{% for key in tool.function.parameters %}<{{ key }}>{% endfor %}{% endfor %}"
    settings = ApiSettings(served_model_names=("tiny",), chat_template=template, tool_parser=ToolParserChoice.HERMES)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"|system|": 1, "|user|>x": 2}}}
    with serving(engine, text, settings) as running:
        assert running.chat(tools=[tool]).status == 200
    ids = engine.groups[0][0].prompt.tolist()
    assert text.decode(ids) == "<|system|><|user|>x>"
    assert not {text.encode("<|system|>")[0], text.encode("<|user|>")[0]} & set(ids)


@pytest.mark.parametrize("arguments", ["[" * 600 + "]" * 600, '{"a": "\\ud800"}', "not json", "", "[" * 100_000])
def test_any_arguments_in_the_history_are_answered(served: Served, arguments: str) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    reply = served.chat(messages=[*HI, {"role": "assistant", "tool_calls": [call]}])
    assert reply.status in (200, 400)


def deep(levels: int) -> dict[str, object]:
    inner: dict[str, object] = {}
    for _ in range(levels):
        inner = {"a": inner}
    return inner


def test_tools_are_bounded_in_depth_and_size(served: Served) -> None:
    def tool(parameters: object) -> object:
        return {"type": "function", "function": {"name": "f", "parameters": parameters}}

    assert served.chat(tools=[tool(deep(31))]).status == 200
    assert "32 levels" in served.chat(tools=[tool(deep(40))]).error["message"]
    assert served.chat(tools=[tool({"enum": [1] * 300_000})]).error["code"] == "request_too_large"


def test_a_template_that_adds_arguments_to_text_gets_text(engine: ScriptedEngine, text: ModelText) -> None:
    template = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ 'args:' + c.function.arguments }}"
    template += "{% endfor %}{% endfor %}"
    call = {"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}
    with serving(engine, text, ApiSettings(served_model_names=("tiny",), chat_template=template)) as running:
        assert running.chat(messages=[*HI, {"role": "assistant", "tool_calls": [call]}]).status == 200
    assert text.decode(engine.groups[0][0].prompt.tolist()) == 'args:{"a": 1}'


def test_a_template_that_asks_for_absent_content_gets_none(engine: ScriptedEngine, text: ModelText) -> None:
    template = "{% for m in messages %}{% if m['content'] is none %}calls{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    with serving(engine, text, ApiSettings(served_model_names=("tiny",), chat_template=template)) as running:
        assert running.chat(messages=[*HI, {"role": "assistant", "tool_calls": [call]}]).status == 200
    assert text.decode(engine.groups[0][0].prompt.tolist()) == "hicalls"


def test_ids_are_as_the_family_wants_them_and_differ_between_requests() -> None:
    def made(created_s: int, has_short_ids: bool) -> str:
        header = ResponseHeader("c-1", created_s, "tiny", False, False, [(1,)], 1, has_short_call_ids=has_short_ids)
        return call_id(header, 0, 0)

    assert len(made(1, True)) == 9
    assert made(1, True).isalnum()
    assert made(1, False).startswith("call_")
    assert made(1, False) != made(2, False)


def streamed_message(events: list[Any]) -> tuple[str, str, list[str], str]:
    """Reasoning, content, arguments of each call, and the reason for the end."""
    choices = [event["choices"][0] for event in events if event != "[DONE]"]
    deltas = [choice["delta"] for choice in choices]
    arguments: list[str] = []
    for call in (call for delta in deltas for call in delta.get("tool_calls") or []):
        arguments += [""] if "id" in call else []
        arguments[call["index"]] += call["function"].get("arguments") or ""
    reasoning, content = ("".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning_content", "content"))
    return reasoning, content, arguments, choices[-1]["finish_reason"]


def whole_message(choice: Any) -> tuple[str, str, list[str], str]:
    message = choice["message"]
    arguments = [call["function"]["arguments"] for call in message.get("tool_calls") or []]
    return message.get("reasoning_content") or "", message["content"] or "", arguments, choice["finish_reason"]


@pytest.mark.parametrize("burst", [1, 3, 1000])
def test_a_stop_string_inside_a_call_ends_its_arguments_before_the_match(
    served: Served, engine: ScriptedEngine, burst: int
) -> None:
    engine.burst_tokens = burst
    asked = {"tools": [LOOK_UP], "stop": "aris"}
    expected = ("", "Let me see.", ['{"city": "P'], "stop")
    assert whole_message(served.chat(**asked).json()["choices"][0]) == expected
    assert streamed_message(served.chat(**asked, stream=True).events()) == expected


@pytest.mark.parametrize("burst", [1, 3, 1000])
def test_a_stop_string_inside_reasoning_ends_it_before_the_match(
    engine: ScriptedEngine, text: ModelText, burst: int
) -> None:
    engine.script = lambda _: [*text.encode(f"<think>\nIn Paris, so é</think>\n\nYes.{ANSWER}"), min(text.eos_ids)]
    engine.burst_tokens = burst
    thinking = ApiSettings(served_model_names=("tiny",), reasoning_parser=ReasoningParserChoice.THINK)
    asked = {"tools": [LOOK_UP], "stop": ["aris, s"]}
    with serving(engine, text, thinking) as running:
        found = whole_message(running.chat(**asked).json()["choices"][0])
        streamed = streamed_message(running.chat(**asked, stream=True).events())
    assert found == streamed == ("In P", "", [], "stop")


def test_a_call_that_constrained_content_spells_is_no_call(engine: ScriptedEngine, text: ModelText) -> None:
    content = '{"a": "[TOOL_CALLS]look_up{}"}'
    engine.script = lambda _: [*text.encode(content), min(text.eos_ids)]
    settings = ApiSettings(served_model_names=("tiny",), tool_parser=ToolParserChoice.MISTRAL)
    asked: dict[str, Any] = {"tools": [LOOK_UP], "response_format": {"type": "json_object"}}
    with serving(engine, text, settings, compiler=GrammarsOnly()) as running:
        choice = running.chat(**asked).json()["choices"][0]
        deltas = [event["choices"][0]["delta"] for event in running.chat(**asked, stream=True).events()[:-1]]
        free = running.chat(tools=[LOOK_UP]).json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", content)
    assert "".join(delta.get("content") or "" for delta in deltas) == content
    assert free["finish_reason"] == "tool_calls", "without a constraint it may be one"


def test_with_pythonic_a_forced_call_is_written_as_json_and_what_else_is_asked_of_calls_is_refused(
    engine: ScriptedEngine, text: ModelText
) -> None:
    engine.script = lambda _: [*text.encode('{"name": "look_up", "parameters": {"city": "Rome"}}'), min(text.eos_ids)]
    settings = ApiSettings(served_model_names=("tiny",), tool_parser=ToolParserChoice.PYTHONIC)
    strict = json.loads(json.dumps(LOOK_UP))
    strict["function"]["strict"] = True
    with serving(engine, text, settings, compiler=GrammarsOnly()) as running:
        for choice in ("required", {"type": "function", "function": {"name": "look_up"}}):
            answer = running.chat(tools=[strict], tool_choice=choice, parallel_tool_calls=False).json()["choices"][0]
            (call,) = answer["message"]["tool_calls"]
            assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("look_up", {"city": "Rome"})
            assert answer["finish_reason"] == "tool_calls"
        for asked in (
            {"tools": [strict]},
            {"tools": [LOOK_UP], "parallel_tool_calls": False},
            {"tools": [LOOK_UP], "response_format": {"type": "json_object"}},
        ):
            reply = running.chat(**asked)
            assert (reply.status, "pythonic" in reply.error["message"]) == (400, True), asked


def test_reasoning_is_sent_apart(engine: ScriptedEngine, text: ModelText) -> None:
    engine.script = lambda _: [*text.encode("<think>\nhm\n</think>\n\nYes."), min(text.eos_ids)]
    thinking = ApiSettings(served_model_names=("tiny",), reasoning_parser=ReasoningParserChoice.THINK)
    with serving(engine, text, thinking) as running:
        message = running.chat().json()["choices"][0]["message"]
        deltas = [event["choices"][0]["delta"] for event in running.chat(stream=True).events()[:-1]]
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "hm")
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes."


def test_white_space_that_a_choice_begins_with_is_sent(engine: ScriptedEngine, text: ModelText) -> None:
    engine.script = lambda _: [*text.encode("<think>hm</think>\n\n yes"), min(text.eos_ids)]
    thinking = ApiSettings(served_model_names=("tiny",), reasoning_parser=ReasoningParserChoice.THINK)
    with serving(engine, text, thinking, compiler=GrammarsOnly()) as running:
        message = running.chat(structured_outputs={"choice": [" yes", "no"]}).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == (" yes", "hm")


@pytest.mark.parametrize("burst", [1, 3, 100])
def test_tokens_of_reasoning_are_counted_however_they_come(engine: ScriptedEngine, text: ModelText, burst: int) -> None:
    """One token is one byte here: markers and reasoning count, what follows does not."""
    engine.script = lambda _: [*text.encode("<think>so é</think>Yes."), min(text.eos_ids)]
    engine.burst_tokens = burst
    thinking = ApiSettings(served_model_names=("tiny",), reasoning_parser=ReasoningParserChoice.THINK)
    with serving(engine, text, thinking) as running:
        usage = running.chat().json()["usage"]
        engine.script = lambda _: [*text.encode("Yes."), min(text.eos_ids)]
        plain = running.chat().json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len(text.encode("<think>so é</think>"))}
    assert plain["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_tokens_of_a_call_behind_reasoning_are_not_counted_as_reasoning(engine: ScriptedEngine, text: ModelText) -> None:
    engine.script = lambda _: [*text.encode(f"<think>so</think>{ANSWER}"), min(text.eos_ids)]
    settings = ApiSettings(served_model_names=("tiny",), reasoning_parser=ReasoningParserChoice.THINK)
    with serving(engine, text, settings) as running:
        usage = running.chat(tools=[LOOK_UP]).json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len(text.encode("<think>so</think>"))}


def reader_of_calls(text: ModelText, family: ToolParserChoice) -> ChoiceReader:
    return ChoiceReader(0, text.detokenizer(), None, text.eos_ids, parser=TOOL_PARSERS[family].make(TOOLS))


@FAMILIES
def test_a_stream_that_is_resumed_after_any_token_has_the_same_calls(text: ModelText, family: ToolParserChoice) -> None:
    ids = tuple(text.encode(CALLS[family.value], parse_special=False))
    header = ResponseHeader("chatcmpl-1", 0, "tiny", False, False, [(1,)], 1)

    def events(marks: StreamPositions) -> list[Any]:
        reader = reader_of_calls(text, family)
        writer = NumberedEvents(ChatWriter(header, text.piece, False), marks)
        found = []
        for place, token in enumerate(ids):
            ended = StreamEnd(FinishReason.STOP, 0) if place == len(ids) - 1 else None
            lines = writer.of(reader.read(TokenBurst((token,), (), ended))).decode().split("\n")
            found += [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: ")]
        return found

    whole = events(fresh_marks(1))
    for had in range(len(ids)):
        rest = events(StreamPositions((StreamPosition(begun=True, tokens=had),)))
        assert rest == whole[len(whole) - len(rest) :]
    assert whole[-1]["finish_reason"] == "tool_calls"


@FAMILIES
def test_an_answer_that_is_continued_after_any_token_has_the_calls_that_the_client_lacks(
    text: ModelText, family: ToolParserChoice
) -> None:
    ids = tuple(text.encode(CALLS[family.value], parse_special=False))
    for had in range(len(ids)):
        first, second = reader_of_calls(text, family), reader_of_calls(text, family)
        begun = list(first.read(TokenBurst(ids[:had], (), None)).parts or ())
        second.continue_after(ids[:had], None)
        rest = second.read(TokenBurst(ids[had:], (), StreamEnd(FinishReason.STOP, 0)))
        assert rest.parts == first.read(TokenBurst(ids[had:], (), StreamEnd(FinishReason.STOP, 0))).parts
        assert rest.has_calls
        shown = WholeAnswerParts([*begun, *(rest.parts or ())])
        assert [call.name for call in shown.calls] == ["look_up", "add"]
        assert [json.loads(call.arguments) for call in shown.calls] == [{"city": "Paris"}, {"a": 1}]
