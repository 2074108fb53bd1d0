"""Parsers of tool calls and reasoning: what they find, and that it does not matter how the text is cut."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.api.parsers import gpt_oss
from baton.api.parsers.argument_values import SCHEMAS_MAX, ArgumentTypes, ToolSchemas, declared_types, typed_value
from baton.api.parsers.choosing import (
    TOOL_PARSERS,
    AnswerFormat,
    ReasoningParserChoice,
    ToolParserChoice,
    answer_format,
)
from baton.api.parsers.parts import (
    AnswerParser,
    AnswerPart,
    CallArguments,
    CallBegun,
    Content,
    PlainParser,
    Reasoning,
    ToolCall,
    WholeAnswerParts,
    parsed,
)
from baton.api.parsers.thinking import ThinkingParser
from tests.api.parsers.calls import CALLS, TOOLS

QUIET = settings(max_examples=150, deadline=None, derandomize=True, database=None)

Made = Callable[[], AnswerParser]


def whole(content: str = "", reasoning: str = "", calls: Sequence[ToolCall] = ()) -> WholeAnswerParts:
    """Reasoning, then content, then calls."""
    parts: list[AnswerPart] = [Reasoning(reasoning), Content(content)]
    for at, call in enumerate(calls):
        parts += [CallBegun(at, call.name), CallArguments(at, call.arguments)]
    return WholeAnswerParts(parts)


def either(name: ToolParserChoice) -> AnswerParser:
    parser = AnswerFormat(name, ReasoningParserChoice.THINK).parser(TOOLS, begins_inside=False, calls_or_content=True)
    assert parser is not None
    return parser


PARSERS: dict[str, Made] = {
    **{name.value: (lambda family=family: family.make(TOOLS)) for name, family in TOOL_PARSERS.items()},
    "think": lambda: ThinkingParser(PlainParser(), begins_inside=False),
    "think, keep space": lambda: ThinkingParser(PlainParser(), begins_inside=False, keeps_space=True),
    "think, begun": lambda: ThinkingParser(PlainParser(), begins_inside=True),
    "think, then glm or content": lambda: either(ToolParserChoice.GLM),
    "think, then mistral or content": lambda: either(ToolParserChoice.MISTRAL),
    "gpt-oss, final last": lambda: gpt_oss.GptOssParser(TOOLS, ends_in_final=True),
    "think and hermes": lambda: ThinkingParser(TOOL_PARSERS[ToolParserChoice.HERMES].make(TOOLS), begins_inside=False),
}
PIECES = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", "<|python_tag|>", "<arg_key>",
    "</arg_key>", "<arg_value>", "</arg_value>", "<function=add>", "</function>",
    "<parameter=a>", "</parameter>", *gpt_oss.MARKERS, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁calls▁begin｜>", '{"name": "look_up", "arguments": {"city": "Par}is\\""}}',
    '{"name": "add", "parameters": {"a": 1}}', '{"arguments": {}, "name": "add"}',
    '{"name":"add","arguments":"{\\"a\\": 2}"}',
    "[look_up(city='x'), add(a=1, b=[2])]",
    "look_up", "to=functions.add", "analysis", "final", "\n```json\n{}\n```", " ", "\n", ";", ",", "[", "]", "{", "}", '"',
    "\\", "text", "é", "<", "<tool", "]]",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), max_size=9).map("".join)


@pytest.mark.parametrize("name", PARSERS)
@QUIET
@given(text=TEXTS, cuts=st.lists(st.integers(0, 200), max_size=8))
def test_the_parts_do_not_depend_on_how_the_text_is_cut(name: str, text: str, cuts: list[int]) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(places)]
    expected = parsed(PARSERS[name](), [text])
    assert parsed(PARSERS[name](), pieces) == expected
    assert parsed(PARSERS[name](), list(text)) == expected


@pytest.mark.parametrize("name", [name.value for name in TOOL_PARSERS])
@QUIET
@given(text=st.text(st.characters(exclude_characters="<[{"), max_size=60))
def test_an_answer_without_calls_is_content_to_the_letter(name: str, text: str) -> None:
    assert parsed(PARSERS[name](), [text]) == whole(content=text)


@pytest.mark.parametrize("name", [name.value for name in TOOL_PARSERS])
def test_calls_cut_at_any_place_are_the_same_and_pass_on_as_much(name: str) -> None:
    text = CALLS[name]
    for cut in range(len(text)):
        parser, other = PARSERS[name](), PARSERS[name]()
        first, second = whole(), whole()
        first.add(parser.push(text[:cut]))
        for char in text[:cut]:
            second.add(other.push(char))
        assert first == second, f"up to {cut}"
        assert parsed(PARSERS[name](), [text[:cut], text[cut:]]) == parsed(PARSERS[name](), [text])


SPELLING = [name for name, family in TOOL_PARSERS.items() if family.trigger is not None]


@pytest.mark.parametrize("name", SPELLING, ids=lambda name: name.value)
@pytest.mark.parametrize("reasoning", ["", "<think>so</think>\n\n"], ids=["at once", "behind reasoning"])
def test_constrained_content_that_spells_a_call_is_content(name: ToolParserChoice, reasoning: str) -> None:
    trigger = TOOL_PARSERS[name].trigger or ""
    calls = trigger + CALLS[name.value].partition(trigger)[2]
    contents = [json.dumps({"a": calls}, ensure_ascii=False), f'"{calls}"', f"x{calls}", trigger[:-1], trigger[:3] + calls]
    for content in contents:
        for pieces in ([reasoning + content], list(reasoning + content)):
            assert parsed(either(name), pieces) == whole(content, "so" if reasoning else "")
    for text in (calls, f"\n {calls}"):
        assert [call.name for call in parsed(either(name), list(reasoning + text)).calls] == ["look_up", "add"]


@pytest.mark.parametrize("tools", [TOOLS, {}], ids=["tools", "no tools"])
def test_constrained_content_in_the_final_channel_may_spell_markers(tools: ToolSchemas) -> None:
    content = '{"a": "<|end|><|start|>assistant to=functions.add<|channel|>commentary<|message|>{}<|call|>"}'
    text = f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>{content}"
    form = AnswerFormat(ToolParserChoice.GPT_OSS, ReasoningParserChoice.GPT_OSS)
    for pieces in ([text], list(text)):
        parser = form.parser(tools, begins_inside=False, calls_or_content=True)
        assert parser is not None
        assert parsed(parser, pieces) == whole(content, "hm")


WITH_TEXT = ("hermes", "deepseek", "glm", "qwen3-coder", "gpt-oss")


@pytest.mark.parametrize("name", [name.value for name in TOOL_PARSERS])
def test_calls_are_found_with_their_arguments(name: str) -> None:
    found = parsed(PARSERS[name](), list(CALLS[name]))
    assert [call.name for call in found.calls] == ["look_up", "add"]
    assert [json.loads(call.arguments) for call in found.calls] == [{"city": "Paris"}, {"a": 1}]
    assert found.content == ("Let me see." if name in WITH_TEXT else "")


def test_parts_stay_in_their_order_and_neighbours_are_joined() -> None:
    text = 'One. <tool_call>{"name": "add", "arguments": {}}</tool_call> Two. <tool_call>{"name": "add", "arguments": {}}'
    for pieces in ([text], list(text)):
        assert list(parsed(PARSERS["hermes"](), pieces).ordered()) == [
            Content("One."), CallBegun(0, "add"), CallArguments(0, "{}"),
            Content("Two."), CallBegun(1, "add"), CallArguments(1, "{}"),
        ]  # fmt: skip


def test_arguments_are_passed_on_as_they_come() -> None:
    parser = PARSERS["hermes"]()
    pieces = [
        parser.push(piece)
        for piece in ('<tool_call>{"name": "look_up", "arguments": {"ci', 'ty": "P', 'aris"}}</tool_call>')
    ]
    assert pieces == [
        [CallBegun(0, "look_up"), CallArguments(0, '{"ci')], [CallArguments(0, 'ty": "P')], [CallArguments(0, 'aris"}')],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>not json</tool_call> and more"),
        ("hermes", '<tool_call>\n{"nome": "x"}\n</tool_call>'),
        ("llama3-json", ' {"name": "not a tool", "parameters": {}} '),
        ("llama3-json", '{"answer": 42}'),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[import_os(x=1)]"),
        ("pythonic", "[look_up(__import__('os'))]"),
        ("glm", "<tool_call></tool_call>"),
        ("qwen3-coder", "<function=unknown></function>"),
        ("qwen3-coder", "<function=add>text<parameter=a>1</parameter></function>"),
        ("deepseek", "<｜tool▁call▁begin｜>no arguments<｜tool▁call▁end｜>"),
    ],
)
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    assert parsed(PARSERS[name](), [text]) == whole(content=text)


def test_the_new_form_of_mistral_names_the_tool_before_its_arguments() -> None:
    found = parsed(PARSERS["mistral"](), list('So:[TOOL_CALLS]add[ARGS]{"a": [1]}[TOOL_CALLS]look_up{}'))
    assert (found.content, [(call.name, call.arguments) for call in found.calls]) == (
        "So:", [("add", '{"a": [1]}'), ("look_up", "{}")],
    )  # fmt: skip


def test_arguments_in_a_string_are_its_content() -> None:
    (call,) = parsed(PARSERS["hermes"](), list('<tool_call>{"name": "add", "arguments": "{\\"a\\": 2}"}</tool_call>')).calls
    assert call.arguments == '{"a": 2}'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "a\\qb", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "a\\ud800", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "add\\ud800"}</tool_call>'),
        ("glm", '<tool_call>add<arg_key>a</arg_key><arg_value>"\\ud800"</arg_value></tool_call>'),
        ("glm", "<tool_call>add<arg_key>a</arg_key><arg_value>NaN</arg_value></tool_call>"),
        ("pythonic", '[add(a="\\ud800")]'),
        ("mistral", '[TOOL_CALLS][{"name": "\\ud800", "arguments": {}}]'),
    ],
)
def test_whatever_the_model_writes_can_be_sent(name: str, text: str) -> None:
    found = parsed(PARSERS[name](), [text])
    for call in found.calls:
        assert call.name.encode()
        json.loads(call.arguments.encode() or "{}", parse_constant=pytest.fail)
    assert found.content.encode() or found.calls


def test_a_missing_brace_ends_with_the_call() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>"}</tool_call>\n'
    text += '<tool_call>{"name": "look_up", "arguments": {}}'
    found = parsed(PARSERS["hermes"](), [text])
    assert [(call.name, call.arguments) for call in found.calls] == [("add", '{"a": "</tool_call>"}'), ("look_up", "{}")]


def test_a_call_without_its_outer_markers_and_ends_of_parameters_is_one() -> None:
    text = "So: <function=look_up>\n<parameter=city>\nNew\nYork\n<parameter=zip>\n10001\n</function>"
    found = parsed(PARSERS["qwen3-coder"](), list(text))
    assert found.content == "So:"
    assert [json.loads(call.arguments) for call in found.calls] == [{"city": "New\nYork", "zip": 10001}]


def test_markers_in_values_are_a_part_of_them() -> None:
    code = "if x:\n<parameter=z>\n</function>\ny = '</tool_call>'"
    text = f"<tool_call>\n<function=look_up>\n<parameter=city>\n{code}\n</parameter>\n</function>\n</tool_call>"
    found = parsed(PARSERS["qwen3-coder"](), list(text + text))
    assert [json.loads(call.arguments) for call in found.calls] == [{"city": code}] * 2
    assert not found.content


def test_a_closing_marker_that_was_cut_short_is_not_shown() -> None:
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_ca'
    assert parsed(PARSERS["hermes"](), [text]) == whole(calls=[ToolCall("add", "{}")])


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "10001", "10001"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": 1}, "1", 1),
        ({"$ref": "#/$defs/Name"}, "7", "7"),
        ({"$ref": "#/$defs/Loop"}, "7", 7),
        ({"$ref": "#/absent"}, "7", 7),
        ({"type": "number"}, "1e999", "1e999"),
    ],
)
def test_the_type_is_found_where_schemas_have_it(schema: dict[str, object], text: str, value: object) -> None:
    defs = {"Name": {"type": "string"}, "Loop": {"$ref": "#/$defs/Loop"}}
    found = typed_value(text, declared_types({"properties": {"a": schema}, "$defs": defs}, "a"))
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("declared", "text", "value"),
    [
        ("string", "10001", "10001"),
        ("string", '{"a": 1}', '{"a": 1}'),
        ("integer", "3", 3),
        ("integer", "three", "three"),
        ("number", "2.5", 2.5),
        ("number", "NaN", "NaN"),
        ("boolean", "True", True),
        ("boolean", "1", "1"),
        ("array", "[1, 2]", [1, 2]),
        ("object", '{"a": null}', {"a": None}),
        ("object", "[1]", "[1]"),
        (["string", "null"], "None", None),
        (["string", "integer"], "7", 7),
        (["string", "integer"], "7b", "7b"),
        (None, "7", 7),
        (None, "True", "True"),
        (5, "7", 7),
    ],
)
def test_bare_text_has_the_declared_type_or_is_a_string(declared: object, text: str, value: object) -> None:
    parameters = {"properties": {"a": {"type": declared}}}
    found = typed_value(text, declared_types(parameters, "a"))
    assert (found, type(found)) == (value, type(value))


class CountedSchema(dict[str, object]):
    """Counts how often a schema is looked at."""

    looks = 0

    def get(self, key: str, default: object = None) -> object:
        CountedSchema.looks += key == "type"
        return super().get(key, default)


@pytest.mark.parametrize("width", [1, 40, 4000])
def test_a_schema_that_refers_to_itself_many_times_is_looked_at_once(width: int) -> None:
    schema = CountedSchema(anyOf=[CountedSchema({"$ref": "#/properties/a"}) for _ in range(width)])
    CountedSchema.looks = 0
    types = ArgumentTypes({"f": {"properties": {"a": schema}}})
    assert [types.value("f", "a", "1") for _ in range(3)] == [1, 1, 1]
    assert CountedSchema.looks <= min(2 * width + 2, SCHEMAS_MAX)


def test_alternatives_that_refer_to_each_other_by_many_names_are_bounded() -> None:
    many: list[object] = [CountedSchema({"$ref": f"#/$defs/d{at}"}) for at in range(200)]
    defs = {f"d{at}": CountedSchema(anyOf=many) for at in range(200)}
    CountedSchema.looks = 0
    declared_types({"properties": {"a": {"anyOf": many}}, "$defs": defs}, "a")
    assert CountedSchema.looks <= SCHEMAS_MAX


def test_text_between_markers_that_names_no_tool_is_content() -> None:
    text = "Write <tool_call> first, then the name.</tool_call> So."
    assert parsed(PARSERS["glm"](), [text]) == whole(text)


def test_channels_without_tools_have_no_calls_and_may_begin_with_the_recipient() -> None:
    text = ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    assert parsed(gpt_oss.GptOssParser(TOOLS), list(text)).calls == [ToolCall("add", '{"a": 1}')]
    assert parsed(gpt_oss.GptOssParser(()), list(text)) == whole('{"a": 1}')


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("glm", "<tool_call>add" + "<arg_key>a</arg_key><arg_value>" * 20_000 + "</tool_call>"),
        ("deepseek", "<｜tool▁call▁begin｜>" + " " * 200_000 + "<｜tool▁sep｜>" + " " * 200_000 + "<｜tool▁call▁end｜>"),
        ("hermes", '<tool_call>{"name": "' + "a" * 200_000),
        ("qwen3-coder", "<function=add><parameter=a>" + "</function> " * 20_000),
        ("qwen3-coder", "<function=add><parameter=a>x</function>" + " " * 200_000),
        ("think", "<think>a" + " " * 200_000),
        ("hermes", "a" + " " * 200_000),
        ("llama3-json", '{"name": "' + "a" * 200_000),
    ],
)
def test_long_texts_cost_no_more_than_their_length(name: str, text: str) -> None:
    """Minutes, if each character were looked at once for each other one."""
    assert parsed(PARSERS[name](), [text[at : at + 64] for at in range(0, len(text), 64)])


def test_reasoning_is_apart_from_content() -> None:
    think = PARSERS["think"]
    assert parsed(think(), ["<think>\nhm, 2 < 3\n</think>\n\nYes."]) == whole("Yes.", "hm, 2 < 3")
    assert parsed(think(), ["No thought."]) == whole("No thought.")
    assert parsed(think(), ["<think>cut sho"]) == whole("", "cut sho")
    assert parsed(PARSERS["think, begun"](), ["so</think>Yes."]) == whole("Yes.", "so")
    both = parsed(PARSERS["think and hermes"](), ["<think>so</think>" + CALLS["hermes"]])
    assert (both.reasoning, both.content, len(both.calls)) == ("so", "Let me see.", 2)
    channels = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    assert parsed(PARSERS["gpt-oss"](), list(channels)) == whole("Yes.", "hm")


@pytest.mark.parametrize("content", [" yes", "\n\nyes", "\n", " ", "yes", ""])
@pytest.mark.parametrize("reasoning", ["<think>so</think>\n\n", ""], ids=["reasoning", "none"])
def test_white_space_that_begins_constrained_content_is_shown(content: str, reasoning: str) -> None:
    for pieces in ([reasoning + content], list(reasoning + content)):
        found = parsed(PARSERS["think, keep space"](), pieces)
        assert found == whole(content, "so" if reasoning else "")


def test_a_separator_that_was_cut_short_is_not_shown() -> None:
    for end in ("", "\n", "\n\n"):
        assert parsed(PARSERS["think, keep space"](), list(f"<think>so</think>{end}")) == whole("", "so")


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ messages }}", ToolParserChoice.NONE, ReasoningParserChoice.NONE),
        ("<tool_call> … </think>", ToolParserChoice.HERMES, ReasoningParserChoice.THINK),
        ("<tool_call>\\n<function= … <parameter=", ToolParserChoice.QWEN3_CODER, ReasoningParserChoice.NONE),
        ("<tool_call><arg_key> … </think>", ToolParserChoice.GLM, ReasoningParserChoice.THINK),
        ("[TOOL_CALLS]", ToolParserChoice.MISTRAL, ReasoningParserChoice.NONE),
        ("<｜tool▁call▁begin｜></think>", ToolParserChoice.DEEPSEEK, ReasoningParserChoice.THINK),
        ('<|start_header_id|> "parameters"', ToolParserChoice.LLAMA3_JSON, ReasoningParserChoice.NONE),
        ("<|channel|> functions", ToolParserChoice.GPT_OSS, ReasoningParserChoice.GPT_OSS),
    ],
)
def test_the_template_tells_the_family(template: str, tools: ToolParserChoice, reasoning: ReasoningParserChoice) -> None:
    auto = answer_format(template, ToolParserChoice.AUTO, ReasoningParserChoice.AUTO)
    assert auto == AnswerFormat(tools, reasoning)
    none = answer_format(template, ToolParserChoice.NONE, ReasoningParserChoice.NONE)
    assert none.parser(TOOLS, False) is None
