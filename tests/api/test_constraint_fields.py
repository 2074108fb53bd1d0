"""What clients may ask an answer to match, in every dialect, and what becomes of it."""

from __future__ import annotations

from typing import Any

import pytest

from baton.api.constraint_cache import ConstraintCache, size_of
from baton.api.constraints.wanted import ConstraintKind
from baton.api.model_text import ModelText
from baton.api.parsers.choosing import ReasoningParserChoice, ToolParserChoice
from baton.api.settings import ApiSettings
from baton.core.engine.request import Constraint
from tests.api.compiler import GrammarsOnly
from tests.api.conftest import Served, serving
from tests.api.engine import ScriptedEngine
from tests.api.tokenizers_made_here import TEMPLATE, byte_level

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize(
    ("fields", "kind", "value", "field"),
    [
        ({"response_format": {"type": "json_object"}}, ConstraintKind.JSON_OBJECT, None, "response_format"),
        ({"response_format": RESPONSE_FORMAT}, ConstraintKind.JSON_SCHEMA, SCHEMA, "response_format.json_schema.schema"),
        ({"structured_outputs": {"json": SCHEMA}}, ConstraintKind.JSON_SCHEMA, SCHEMA, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True}}, ConstraintKind.JSON_OBJECT, None, "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "a+"}}, ConstraintKind.REGEX, "a+", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a"]}}, ConstraintKind.CHOICE, ["a"], "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, ConstraintKind.GRAMMAR, 'start: "a"',
         "structured_outputs.grammar"),
        ({"guided_json": '{"type": "null"}'}, ConstraintKind.JSON_SCHEMA, '{"type": "null"}', "guided_json"),
        ({"guided_regex": "a+"}, ConstraintKind.REGEX, "a+", "guided_regex"),
        ({"guided_choice": ["a", "b"]}, ConstraintKind.CHOICE, ["a", "b"], "guided_choice"),
        ({"guided_grammar": 'start: "a"'}, ConstraintKind.GRAMMAR, 'start: "a"', "guided_grammar"),
    ],
)  # fmt: skip
def test_each_field_constrains_chats_and_completions(
    engine: ScriptedEngine, text: ModelText, settings: ApiSettings, fields: dict[str, Any], kind: ConstraintKind,
    value: object, field: str,
) -> None:  # fmt: skip
    compiler = GrammarsOnly()
    with serving(engine, text, settings, compiler=compiler) as served:
        for reply in (served.chat(**fields, n=2), served.complete(**fields, n=2)):
            assert reply.status == 200, reply.body
    assert [(job.kind, job.value, job.field) for job in compiler.jobs] == [(kind, value, field)] * 2
    constraints = {one.sampling.constraint for group in engine.groups for one in group}
    assert len(constraints) == 1, "all choices have the same one"
    assert None not in constraints


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"guided_regex": "a", "guided_choice": ["a"]}, ("guided_regex", "guided_choice")),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, ("structured_outputs.regex", "structured_outputs.choice")),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, ("response_format", "guided_regex")),
        ({"guided_regex": "a", "ignore_eos": True}, ("guided_regex", "ignore_eos")),
        ({"guided_regex": "a", "min_tokens": 3}, ("guided_regex", "min_tokens")),
        ({"guided_regex": "a", "allowed_token_ids": [5]}, ("guided_regex", "allowed_token_ids")),
    ],
)
def test_what_excludes_each_other_is_refused_with_both_names(
    served: Served, fields: dict[str, Any], names: tuple[str, str]
) -> None:
    for reply in (served.chat(**fields), served.complete(**fields)):
        assert reply.status == 400
        assert all(f"'{name}'" in reply.error["message"] for name in names)


def test_options_of_vllm_that_are_not_there_are_refused_by_name(served: Served) -> None:
    reply = served.chat(structured_outputs={"regex": "a", "whitespace_pattern": " "})
    assert (reply.status, reply.error["param"]) == (400, "structured_outputs.whitespace_pattern")


def test_text_asks_for_nothing(served: Served, engine: ScriptedEngine) -> None:
    assert served.chat(response_format={"type": "text"}, ignore_eos=True, max_tokens=3).status == 200
    assert engine.groups[0][0].sampling.constraint is None


def test_a_response_format_beside_a_forced_call_has_nothing_to_apply_to(
    engine: ScriptedEngine, text: ModelText, settings: ApiSettings
) -> None:
    compiler = GrammarsOnly()
    with serving(engine, text, settings, compiler=compiler) as served:
        assert served.chat(tools=[TOOL], tool_choice="required", response_format=RESPONSE_FORMAT).status == 200
    (job,) = compiler.jobs
    assert (job.kind, job.tool_choice, job.tool_parser) == (None, "required", ToolParserChoice.LLAMA3_JSON)


@pytest.mark.parametrize("tools", [ToolParserChoice.NONE, ToolParserChoice.PYTHONIC, ToolParserChoice.HERMES])
def test_a_forced_call_of_a_model_that_writes_channels_is_found(tools: ToolParserChoice) -> None:
    tokenizer = byte_level()
    text = ModelText(tokenizer, chat_template=TEMPLATE, eos_ids=[tokenizer.token_to_id("<|system|>")])
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 1}'
    answer = f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{call}"
    engine = ScriptedEngine(lambda _: [*text.encode(answer), min(text.eos_ids)], vocabulary=320)
    channels = ApiSettings(served_model_names=("tiny",), tool_parser=tools, reasoning_parser=ReasoningParserChoice.GPT_OSS)
    compiler = GrammarsOnly()
    with serving(engine, text, channels, compiler=compiler) as served:
        reply = served.chat(tools=[TOOL], tool_choice="required", max_tokens=200)
    (job,) = compiler.jobs
    assert job.tool_parser is ToolParserChoice.GPT_OSS
    message = reply.json()["choices"][0]["message"]
    assert [(one["function"]["name"], one["function"]["arguments"]) for one in message["tool_calls"]] == [("f", '{"n": 1}')]
    assert message["reasoning_content"] == "hm"


def test_other_dialects_ask_by_their_own_names(engine: ScriptedEngine, text: ModelText, settings: ApiSettings) -> None:
    compiler = GrammarsOnly()
    hi = [{"role": "user", "content": "hi"}]
    with serving(engine, text, settings, compiler=compiler) as served:
        output = {"format": {"type": "json_schema", "schema": SCHEMA}}
        messages = {"model": "tiny", "max_tokens": 50, "messages": hi}
        asked: list[tuple[str, dict[str, Any]]] = [
            ("/v1/responses", {"input": "hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}),
            ("/v1/responses", {"input": "hi", "text": {"format": {"type": "json_object"}}}),
            ("/v1/messages", messages | {"output_config": output}),
            ("/v1/messages", messages | {"output_format": output["format"]}),
            ("/v1/messages", messages | {
                "tools": [{"name": "f", "input_schema": SCHEMA}],
                "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
            }),
        ]  # fmt: skip
        for path, body in asked:
            reply = served.call("POST", path, body)
            assert reply.status == 200, reply.body
        assert [job.kind for job in compiler.jobs] == [
            ConstraintKind.JSON_SCHEMA, ConstraintKind.JSON_OBJECT, ConstraintKind.JSON_SCHEMA, ConstraintKind.JSON_SCHEMA,
            None,
        ]  # fmt: skip
        assert (compiler.jobs[-1].named_tool, compiler.jobs[-1].parallel) == ("f", False)
        bad = {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"unevaluatedItems": 1}}}}
        error = served.call("POST", "/v1/responses", {"input": "hi"} | bad).error
        assert (error["param"], "'text.format.schema' at /unevaluatedItems" in error["message"]) == (
            "text.format.schema",
            True,
        )


def test_a_budget_of_thinking_needs_a_model_that_thinks(engine: ScriptedEngine, text: ModelText) -> None:
    compiler = GrammarsOnly()
    plain = ApiSettings(served_model_names=("tiny",), reasoning_parser=ReasoningParserChoice.NONE)
    with serving(engine, text, plain, compiler=compiler) as served:
        assert served.chat(thinking_token_budget=10).status == 200
    assert compiler.jobs == [], "there is nothing to bound"
    thinking = ApiSettings(served_model_names=("tiny",), reasoning_parser=ReasoningParserChoice.THINK)
    with serving(engine, text, thinking, compiler=compiler) as served:
        assert served.chat(thinking_token_budget=10).status == 200
    assert [job.thinking_tokens_max for job in compiler.jobs] == [10]


@pytest.mark.parametrize(
    ("template", "effort", "prompt"),
    [
        ("{{ reasoning_effort }}", "high", "high"),
        ("{{ enable_thinking }}x", "none", "Falsex"),
        ("{{ enable_thinking }}x", "high", "x"),
    ],
)
def test_the_effort_reaches_templates_that_take_it(
    engine: ScriptedEngine, text: ModelText, template: str, effort: str, prompt: str
) -> None:
    with serving(engine, text, ApiSettings(served_model_names=("tiny",), chat_template=template)) as served:
        assert served.chat(reasoning_effort=effort).status == 200
        assert served.chat(reasoning_effort="endless").error["param"] == "reasoning_effort"
    assert text.decode(engine.groups[0][0].prompt.tolist()) == prompt


def test_bad_words_are_tokens_with_and_without_a_space(served: Served, engine: ScriptedEngine, text: ModelText) -> None:
    assert served.complete(bad_words=["hello"], allowed_token_ids=[7, 5, 7], max_tokens=1).status == 200
    sampling = engine.groups[0][0].sampling
    assert sampling.bad_words == tuple(dict.fromkeys(tuple(text.encode(word)) for word in ("hello", " hello")))
    assert sampling.allowed_token_ids == (5, 7)


def test_a_server_without_a_compiler_refuses_by_name(engine: ScriptedEngine, text: ModelText, settings: ApiSettings) -> None:
    from baton.api.constraint_compiler import NoConstraints

    with serving(engine, text, settings, compiler=NoConstraints()) as served:
        assert served.chat(guided_regex="a").error["param"] == "guided_regex"


def test_a_cache_is_bounded_by_tenant_and_in_all() -> None:
    entry = size_of(Constraint("llguidance", "1", ""))
    cache = ConstraintCache(tenant_bytes_max=3 * entry, bytes_max=5 * entry)
    for key in (b"1", b"2", b"3"):
        cache.put("a", key, Constraint("llguidance", "1", ""))
    assert cache.get("a", b"1") is not None
    cache.put("a", b"4", Constraint("llguidance", "1", ""))
    assert cache.get("a", b"2") is None, "used longest ago"
    assert cache.get("a", b"1") is not None
    assert cache.get("b", b"1") is None, "another tenant's is not found"
    for key in (b"1", b"2", b"3"):
        cache.put("b", key, Constraint("llguidance", "1", ""))
    assert cache.size_bytes == 5 * entry
    assert cache.get("b", b"3") is not None
    cache.put("c", b"1", Constraint("llguidance", "1", "x" * 10 * entry))
    assert cache.get("c", b"1") is None, "larger than a tenant may have"
