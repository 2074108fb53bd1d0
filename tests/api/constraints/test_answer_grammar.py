"""Grammars of whole answers: reasoning, content and calls in one, in each family's form."""

from __future__ import annotations

import pytest

from baton.api.constraints.answer_grammar import answer_grammar
from baton.api.constraints.wanted import CallChoice, ConstraintKind, ConstraintRefused, NamedCall, WantedTool
from baton.api.parsers.choosing import AnswerFormat, ReasoningParserChoice, ToolParserChoice
from baton.api.parsers.parts import parsed
from tests.api.constraints.matching import MARKERS, is_whole, matcher, next_texts, token_ids, wanted

THINK = AnswerFormat(reasoning=ReasoningParserChoice.THINK)
CHANNELS = AnswerFormat(ToolParserChoice.GPT_OSS, ReasoningParserChoice.GPT_OSS)
YES_OR_NO = wanted(ConstraintKind.CHOICE, ["yes", "no"])
PARAMETERS: dict[str, object] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}


LOOK, WAIT = WantedTool("look", PARAMETERS), WantedTool("wait")
STRICT_LOOK, STRICT_WAIT = WantedTool("look", PARAMETERS, strict=True), WantedTool("wait", strict=True)
NAMED = NamedCall("wait")


@pytest.mark.parametrize(
    ("kind", "value", "whole", "other"),
    [
        (ConstraintKind.JSON_OBJECT, None, ["{}", '{"a": [1]}'], ["[]", "{", "x{}"]),
        (ConstraintKind.REGEX, r"\d{3}-[a-z]+", ["123-ab"], ["12-ab", "123-", "x123-a"]),
        (ConstraintKind.REGEX, "", [""], ["a"]),
        (ConstraintKind.CHOICE, ["yes", "ye", 'a "b"\n\\', "é😀"], ["yes", "ye", 'a "b"\n\\', "é😀"], ["y", "yesye", ""]),
        (ConstraintKind.GRAMMAR, 'start: N ("+" N)*\nN: /[0-9]+/', ["1", "1+22"], ["1+", "+1"]),
        (ConstraintKind.GRAMMAR, "%import common.INT\n?start: INT | pair // two\npair: INT INT~2..3", ["1", "123"], ["x"]),
        (ConstraintKind.GRAMMAR, 'start: ["a".."c"] "z"+', ["bz", "zz", "z"], ["dz", "a"]),
        (ConstraintKind.GRAMMAR, 'root ::= w ("," w)*\nw ::= [a-z]+ | "\\n"  # c', ["ab,c", "\n,a"], ["A", "a,"]),
        (ConstraintKind.GRAMMAR, r'start: "\x41\\x41\"\\\x42"', [r'A\x41"\B'], ["AA", r'A\u0041"\B']),
        (ConstraintKind.GRAMMAR, r"""root ::= "\\'" "\'" """, [r"\''"], ["''", "\\'"]),
        (
            ConstraintKind.STRUCTURAL_TAG,
            {"structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f="]},
            ["text", "so <f=a>12</f> it is <f=a>3</f>"],
            ["<f=b>1</f>", "<f=a>x</f>", "<f=a>1"],
        ),
    ],
)
def test_content_is_constrained(kind: ConstraintKind, value: object, whole: list[str], other: list[str]) -> None:
    made = matcher(answer_grammar(wanted(kind, value)))
    assert [text for text in whole if not is_whole(made, text)] == []
    assert [text for text in other if is_whole(made, text)] == []


@pytest.mark.parametrize(
    ("kind", "value", "word"),
    [
        (ConstraintKind.REGEX, "(?!a)b", "lookahead"),
        (ConstraintKind.REGEX, "(?<=a)b", "lookbehind"),
        (ConstraintKind.REGEX, r"(a)\1", "backreference"),
        (ConstraintKind.REGEX, r"\bword", "word border"),
        (ConstraintKind.REGEX, "(a", "not closed"),
        (ConstraintKind.REGEX, 7, "string"),
        (ConstraintKind.CHOICE, [], "not empty"),
        (ConstraintKind.CHOICE, "yes", "list"),
        (ConstraintKind.GRAMMAR, 'start: "a"\n%ignore " "', "%ignore"),
        (ConstraintKind.GRAMMAR, 'start: %json {"type": "null"}', "%json"),
        (ConstraintKind.GRAMMAR, "start: <|im_end|>", "token of the model"),
        (ConstraintKind.GRAMMAR, 'start[lazy]: "a"', "attributes"),
        (ConstraintKind.GRAMMAR, 'begin: "a"', "no rule 'start'"),
        (ConstraintKind.GRAMMAR, "start: other", "does not define"),
        (ConstraintKind.GRAMMAR, 'start: "a"i', "flag"),
        (ConstraintKind.GRAMMAR, 'start: "a"\n' + "".join(f'r{i}: "a"\n' for i in range(500)), "more than 500 rules"),
        (ConstraintKind.GRAMMAR, 'list ::= "a"', "no rule 'root'"),
        (ConstraintKind.STRUCTURAL_TAG, {"format": {}}, "format"),
        (ConstraintKind.STRUCTURAL_TAG, {"structures": [{"begin": "x", "end": ""}], "triggers": ["<"]}, "triggers"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(kind: ConstraintKind, value: object, word: str) -> None:
    with pytest.raises(ConstraintRefused, match=word) as caught:
        answer_grammar(wanted(kind, value))
    assert caught.value.field == "field"


def test_nothing_is_constrained_where_nothing_is_asked() -> None:
    assert answer_grammar() is None
    assert answer_grammar(tools=[LOOK, WAIT], tool_choice="auto", answer_format=THINK) is None


@pytest.mark.parametrize("markers", [(), MARKERS], ids=["as text", "as tokens"])
def test_reasoning_and_content_are_one_grammar(markers: tuple[str, ...]) -> None:
    made = matcher(answer_grammar(YES_OR_NO, answer_format=THINK, special_tokens=token_ids(markers)), markers)
    assert is_whole(made, "<think>well </thin</think>\n\nyes", markers)
    assert is_whole(made, "no", markers)
    assert not is_whole(made, "<think>well", markers)
    assert not is_whole(made, "<think>a</think>maybe", markers)


@pytest.mark.parametrize("markers", [(), MARKERS], ids=["as text", "as tokens"])
def test_reasoning_that_the_prompt_began_must_end(markers: tuple[str, ...]) -> None:
    source = answer_grammar(YES_OR_NO, answer_format=THINK, special_tokens=token_ids(markers), begins_inside_reasoning=True)
    made = matcher(source, markers)
    assert is_whole(made, "hm</think>yes", markers)
    assert not is_whole(made, "yes", markers)


@pytest.mark.parametrize(
    ("kind", "value", "content"),
    [
        (ConstraintKind.CHOICE, [" yes", "no"], " yes"),
        (ConstraintKind.CHOICE, [" yes", "no"], "no"),
        (ConstraintKind.REGEX, r"\s+yes", "\n\n yes"),
        (ConstraintKind.GRAMMAR, 'start: "\\n" "yes"', "\nyes"),
    ],
)
@pytest.mark.parametrize("markers", [(), MARKERS], ids=["as text", "as tokens"])
def test_white_space_that_a_constraint_demands_behind_reasoning_is_told_from_the_separator(
    kind: ConstraintKind, value: object, content: str, markers: tuple[str, ...]
) -> None:
    asked = wanted(kind, value)
    assert asked.may_begin_with_space
    made = matcher(answer_grammar(asked, answer_format=THINK, special_tokens=token_ids(markers)), markers)
    text = f"<think>hm</think>\n\n{content}"
    assert is_whole(made, text, markers)
    assert is_whole(made, content, markers)
    assert not is_whole(made, f"<think>hm</think>{content.lstrip()}", markers)
    parser = THINK.parser({}, begins_inside=False, calls_or_content=True, keeps_space=True)
    assert parser is not None
    assert parsed(parser, list(text)).content == content


@pytest.mark.parametrize(("kind", "value"), [(ConstraintKind.JSON_OBJECT, None), (ConstraintKind.CHOICE, ["yes", "no "])])
def test_content_that_begins_with_no_white_space_needs_no_separator(kind: ConstraintKind, value: object) -> None:
    assert not wanted(kind, value).may_begin_with_space


def test_a_marker_in_letters_does_not_end_reasoning_that_a_token_ends() -> None:
    made = matcher(answer_grammar(YES_OR_NO, answer_format=THINK, special_tokens=token_ids(MARKERS)), MARKERS)
    assert ">" not in next_texts(made, "<think>a</think"[:-1] + "k", MARKERS)


def test_a_thinking_budget_forces_the_end_of_reasoning() -> None:
    source = answer_grammar(YES_OR_NO, answer_format=THINK, special_tokens=token_ids(MARKERS), thinking_tokens_max=4)
    made = matcher(source, MARKERS)
    assert is_whole(made, "<think>abc</think>yes", MARKERS)
    assert next_texts(made, "<think>abcd", MARKERS) == ["</think>"]


def test_a_thinking_budget_alone_leaves_the_answer_free() -> None:
    source = answer_grammar(
        answer_format=THINK, special_tokens=token_ids(MARKERS), begins_inside_reasoning=True, thinking_tokens_max=2
    )
    made = matcher(source, MARKERS)
    assert is_whole(made, "ab</think>anything {at} all", MARKERS)
    assert not is_whole(made, "abc</think>x", MARKERS)


@pytest.mark.parametrize("form", [THINK, AnswerFormat()])
def test_a_thinking_budget_needs_a_token_to_force(form: AnswerFormat) -> None:
    with pytest.raises(ConstraintRefused) as caught:
        answer_grammar(YES_OR_NO, answer_format=form, thinking_tokens_max=4)
    assert caught.value.field == "thinking_tokens_max"


FINAL = "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>abc<|end|><|start|>assistant"


def test_channels_are_part_of_the_grammar() -> None:
    made = matcher(answer_grammar(YES_OR_NO, answer_format=CHANNELS, special_tokens=token_ids(MARKERS)), MARKERS)
    assert is_whole(made, f"{ANALYSIS}{FINAL}yes", MARKERS)
    assert is_whole(made, f"{FINAL}no", MARKERS)
    assert not is_whole(made, "yes", MARKERS)
    assert not is_whole(made, f"{ANALYSIS}{FINAL}maybe", MARKERS)


def test_a_thinking_budget_ends_the_channel() -> None:
    source = answer_grammar(YES_OR_NO, answer_format=CHANNELS, special_tokens=token_ids(MARKERS), thinking_tokens_max=3)
    made = matcher(source, MARKERS)
    assert next_texts(made, "<|channel|>analysis<|message|>abc", MARKERS) == ["<|end|>"]


CALLS = {
    ToolParserChoice.HERMES: (
        '<tool_call>\n{"name": "look", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>',
        '\n<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "look", "arguments": {"days": 3}}\n</tool_call>',
    ),
    ToolParserChoice.LLAMA3_JSON: (
        '{"name": "look", "parameters": {"city": "Rome", "days": 3}}',
        '; {"name": "wait", "parameters": {}}',
        '{"name": "look", "parameters": {"days": 3}}',
    ),
    ToolParserChoice.MISTRAL: (
        '[TOOL_CALLS]look[ARGS]{"city": "Rome", "days": 3}',
        "[TOOL_CALLS]wait[ARGS]{}",
        '[TOOL_CALLS]look[ARGS]{"days": 3}',
    ),
    ToolParserChoice.GLM: (
        "<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
        "\n<tool_call>wait\n</tool_call>",
        "<tool_call>look\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    ),
    ToolParserChoice.QWEN3_CODER: (
        "<tool_call>\n<function=look>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n"
        "</tool_call>",
        "\n<tool_call>\n<function=wait>\n</function>\n</tool_call>",
        "<tool_call>\n<function=look>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    ),
}
"""A call, another behind it, and one that its schema does not allow."""


def _made(
    family: ToolParserChoice, choice: CallChoice, parallel: bool, markers: tuple[str, ...], strict: bool = False
) -> object:
    tools = [STRICT_LOOK, STRICT_WAIT] if strict else [LOOK, WAIT]
    form = AnswerFormat(family)
    return matcher(answer_grammar(None, tools, choice, parallel, form, token_ids(markers)), markers)


@pytest.mark.parametrize("markers", [(), MARKERS], ids=["as text", "as tokens"])
@pytest.mark.parametrize("family", [family for family in CALLS if family is not ToolParserChoice.MISTRAL])
def test_a_required_call_is_written_in_the_familys_form(family: ToolParserChoice, markers: tuple[str, ...]) -> None:
    call, more, wrong = CALLS[family]
    made = _made(family, "required", True, markers)
    assert is_whole(made, call, markers)
    assert is_whole(made, call + more, markers)
    assert not is_whole(made, wrong, markers)
    assert not is_whole(made, "I will not call", markers)


@pytest.mark.parametrize("family", CALLS)
def test_the_parser_reads_what_the_grammar_allows(family: ToolParserChoice) -> None:
    call, more, _ = CALLS[family]
    schemas = {"look": PARAMETERS, "wait": None}
    parser = AnswerFormat(family).parser(schemas, begins_inside=False)
    assert parser is not None
    found = parsed(parser, [call + more])
    assert [(one.name, one.arguments) for one in found.calls] == [("look", '{"city": "Rome", "days": 3}'), ("wait", "{}")]


@pytest.mark.parametrize("family", CALLS)
def test_a_named_tool_is_the_only_one(family: ToolParserChoice) -> None:
    call, more, _ = CALLS[family]
    made = _made(family, NAMED, True, MARKERS)
    assert not is_whole(made, call, MARKERS)
    assert is_whole(made, more.lstrip("\n; "), MARKERS)


@pytest.mark.parametrize("family", CALLS)
def test_without_parallel_calls_there_is_at_most_one(family: ToolParserChoice) -> None:
    call, more, _ = CALLS[family]
    made = _made(family, "required", False, MARKERS)
    assert is_whole(made, call, MARKERS)
    assert not is_whole(made, call + more, MARKERS)


@pytest.mark.parametrize("family", CALLS)
def test_strict_tools_constrain_only_the_calls(family: ToolParserChoice) -> None:
    call, more, wrong = CALLS[family]
    made = _made(family, "auto", True, MARKERS, strict=True)
    assert is_whole(made, "Hello there.", MARKERS)
    assert is_whole(made, call + more, MARKERS)
    assert not is_whole(made, wrong, MARKERS)


def test_mistrals_list_is_written_where_there_is_no_token_for_arguments() -> None:
    markers = ("[TOOL_CALLS]",)
    made = _made(ToolParserChoice.MISTRAL, "required", True, markers)
    text = '[TOOL_CALLS][{"name": "look", "arguments": {"city": "Rome"}}, {"name": "wait", "arguments": {}}]'
    assert is_whole(made, text, markers)
    assert not is_whole(made, text[:-1], markers)
    parser = AnswerFormat(ToolParserChoice.MISTRAL).parser({"look": PARAMETERS}, begins_inside=False)
    assert parser is not None
    assert [call.name for call in parsed(parser, [text]).calls] == ["look", "wait"]


DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
)


@pytest.mark.parametrize("form", DEEPSEEK)
def test_both_forms_of_deepseek_are_allowed_and_read(form: str) -> None:
    made = _made(ToolParserChoice.DEEPSEEK, "required", True, MARKERS)
    call = form.replace("{}", '{"city": "Rome"}')
    assert is_whole(made, call, MARKERS)
    assert not is_whole(made, form, MARKERS)
    parser = AnswerFormat(ToolParserChoice.DEEPSEEK).parser({"look": PARAMETERS}, begins_inside=False)
    assert parser is not None
    assert [(one.name, one.arguments) for one in parsed(parser, [call]).calls] == [("look", '{"city": "Rome"}')]


def test_gpt_oss_reasons_and_then_calls() -> None:
    made = matcher(answer_grammar(None, [LOOK, WAIT], "required", True, CHANNELS, token_ids(MARKERS)), MARKERS)
    head = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
    assert is_whole(made, f'{ANALYSIS}{head}{{"city": "Rome"}}', MARKERS)
    assert not is_whole(made, f"{head}{{}}", MARKERS)
    assert not is_whole(made, f"{FINAL}no", MARKERS)


def test_with_tools_and_a_schema_the_answer_is_either() -> None:
    form = AnswerFormat(ToolParserChoice.HERMES)
    made = matcher(answer_grammar(YES_OR_NO, [LOOK], "auto", True, form, token_ids(MARKERS)), MARKERS)
    assert is_whole(made, "yes", MARKERS)
    assert is_whole(made, CALLS[ToolParserChoice.HERMES][0], MARKERS)
    assert not is_whole(made, "maybe", MARKERS)


@pytest.mark.parametrize("markers", [MARKERS, ("</think>",)], ids=["as tokens", "as text"])
@pytest.mark.parametrize("family", [family for family in CALLS if family is not ToolParserChoice.MISTRAL])
def test_a_thinking_budget_leaves_the_arguments_of_tools_free(family: ToolParserChoice, markers: tuple[str, ...]) -> None:
    call, more, wrong = CALLS[family]
    form = AnswerFormat(family, ReasoningParserChoice.THINK)
    source = answer_grammar(None, [LOOK, WAIT], "auto", True, form, token_ids(markers), True, 4)
    made = matcher(source, markers)
    for body in ("Hello there.", call, call + more, wrong):
        assert is_whole(made, f"abc</think>{body}", markers)
        assert not is_whole(made, f"abcde</think>{body}", markers)


@pytest.mark.parametrize("family", [ToolParserChoice.GLM, ToolParserChoice.QWEN3_CODER])
def test_one_call_at_most_needs_no_strict_tools(family: ToolParserChoice) -> None:
    call, more, wrong = CALLS[family]
    made = _made(family, "auto", False, MARKERS)
    assert is_whole(made, call, MARKERS)
    assert is_whole(made, wrong, MARKERS)
    assert is_whole(made, call.replace("Rome", "if a < b:\n  x = [1]"), MARKERS)
    assert is_whole(made, call.replace("city", "any name"), MARKERS)
    assert not is_whole(made, call + more, MARKERS)
    assert not is_whole(made, call.replace("look", "unknown"), MARKERS)


def test_under_a_thinking_budget_pythonic_calls_are_free() -> None:
    form = AnswerFormat(ToolParserChoice.PYTHONIC, ReasoningParserChoice.THINK)
    made = matcher(answer_grammar(None, [LOOK], "auto", True, form, token_ids(MARKERS), True, 4), MARKERS)
    assert is_whole(made, "abc</think>[look(city='Rome'), look(city='Paris')]", MARKERS)
    assert not is_whole(made, "abcde</think>[look(city='Rome')]", MARKERS)
    with pytest.raises(ConstraintRefused, match="pythonic"):
        answer_grammar(None, [LOOK], "auto", False, form, token_ids(MARKERS), True, 4)


def test_calls_that_cannot_be_constrained_are_refused_by_name() -> None:
    with pytest.raises(ConstraintRefused, match="pythonic"):
        answer_grammar(None, [LOOK], "required", answer_format=AnswerFormat(ToolParserChoice.PYTHONIC))


def test_a_refusal_of_parameters_names_the_tool_and_the_place() -> None:
    bad = WantedTool("bad", {"type": "object", "properties": {"x": {"contains": {}}}})
    with pytest.raises(ConstraintRefused) as caught:
        answer_grammar(None, [WAIT, bad], "required", answer_format=AnswerFormat(ToolParserChoice.HERMES))
    assert (caught.value.field, caught.value.path) == ("tools[1].function.parameters", "/properties/x/contains")


def test_a_tool_that_is_none_of_the_offered_ones_cannot_be_named() -> None:
    with pytest.raises(ConstraintRefused) as caught:
        answer_grammar(None, [LOOK], NAMED, answer_format=AnswerFormat(ToolParserChoice.HERMES))
    assert caught.value.field == "tool_choice"


def test_definitions_of_several_tools_do_not_mix() -> None:
    def tool(name: str, kind: str) -> WantedTool:
        parameters = {
            "type": "object",
            "properties": {"v": {"$ref": "#/$defs/v"}},
            "required": ["v"],
            "$defs": {"v": {"type": kind}},
        }
        return WantedTool(name, parameters)

    form = AnswerFormat(ToolParserChoice.HERMES)
    made = matcher(answer_grammar(None, [tool("a", "integer"), tool("b", "string")], "required", True, form))
    call = '<tool_call>\n{"name": "%s", "arguments": {"v": %s}}\n</tool_call>'
    assert is_whole(made, call % ("a", "1"))
    assert is_whole(made, call % ("b", '"x"'))
    assert not is_whole(made, call % ("a", '"x"'))
    assert not is_whole(made, call % ("b", "1"))
