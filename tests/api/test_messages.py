"""The Messages API, as Anthropic's client sees it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import anthropic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.api.engine import StreamEnd, TokenBurst
from baton.api.messages.writer import MessagesWriter
from baton.api.model_text import ModelText
from baton.api.parsers.choosing import ReasoningParserChoice, ToolParserChoice
from baton.api.parsers.hermes import HermesParser
from baton.api.parsers.thinking import ThinkingParser
from baton.api.responses import ResponseHeader, WholeChoice
from baton.api.settings import ApiSettings
from baton.api.text_reader import ChoiceReader
from baton.core.engine.request import FinishReason
from baton.core.handover.faults import PdCode, PdFault, PdStage
from tests.api.conftest import Served, serving
from tests.api.engine import ScriptedEngine
from tests.api.tokenizers_made_here import byte_level

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ m.tool_call_id or '' }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{% if enable_thinking is defined %}thinking:{{ enable_thinking }}{% endif %}"
)
LOOK_UP: dict[str, Any] = {
    "name": "look_up",
    "description": "Look up é",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
ANSWER = (
    "<think>Which é?</think>Let me see.\n"
    '<tool_call>\n{"name": "look_up", "arguments": {"city": "Paris é"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>'
)
HI: list[Any] = [{"role": "user", "content": "hi"}]
FIELDS = {"model": "tiny", "max_tokens": 400}
SETTINGS = ApiSettings(
    served_model_names=("tiny",),
    tool_parser=ToolParserChoice.HERMES,
    reasoning_parser=ReasoningParserChoice.THINK,
)


@pytest.fixture(scope="module")
def text() -> ModelText:
    tokenizer = byte_level()
    return ModelText(tokenizer, chat_template=TEMPLATE, eos_ids=[tokenizer.token_to_id("<|end|>")])


@pytest.fixture
def engine(text: ModelText) -> ScriptedEngine:
    return ScriptedEngine(lambda _: [*text.encode(ANSWER), min(text.eos_ids)], vocabulary=320, context_tokens=4096)


@pytest.fixture
def server(engine: ScriptedEngine, text: ModelText) -> Iterator[Served]:
    with serving(engine, text, SETTINGS) as running:
        yield running


@pytest.fixture
def client(server: Served) -> Iterator[anthropic.Anthropic]:
    base = server.base_url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=base, api_key="unused", max_retries=0) as client:
        yield client


def prompt_of(engine: ScriptedEngine, text: ModelText) -> str:
    return text.decode(engine.groups[-1][0].prompt)


# ── whole and streamed ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_official_client_gets_thinking_text_and_calls(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**FIELDS, messages=HI, tools=[LOOK_UP])
    thinking, said, first, second = message.content
    assert thinking.type == "thinking"
    assert thinking.thinking == "Which é?"
    assert said.type == "text"
    assert said.text.strip() == "Let me see."
    assert first.type == second.type == "tool_use"
    assert (first.name, first.input) == ("look_up", {"city": "Paris é"})
    assert second.input == {}
    assert first.id != second.id
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens > 10
    assert message.usage.input_tokens > 0


def test_a_stream_is_put_together_to_the_whole_message(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**FIELDS, messages=HI, tools=[LOOK_UP])
    with client.messages.stream(**FIELDS, messages=HI, tools=[LOOK_UP]) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert [_known(block) for block in streamed.content] == [_known(block) for block in whole.content]
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens


def _known(block: Any) -> tuple[str, object]:
    match block.type:
        case "text":
            return "text", block.text.strip()
        case "thinking":
            return "thinking", block.thinking
        case _:
            return "tool_use", (block.name, block.input)


def test_without_tools_and_reasoning_all_is_text(client: anthropic.Anthropic, server: Served) -> None:
    plain = ScriptedEngine(lambda _: list(b"plain"), vocabulary=320, context_tokens=4096)
    text = ModelText(byte_level(), chat_template=TEMPLATE, eos_ids=[])
    with serving(plain, text, ApiSettings(served_model_names=("tiny",))) as running:
        reply = running.call("POST", "/v1/messages", FIELDS | {"messages": HI, "max_tokens": 5})
    assert reply.status == 200
    assert [block["type"] for block in reply.json()["content"]] == ["text"]
    assert reply.json()["stop_reason"] == "max_tokens"


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**FIELDS, messages=HI, stop_sequences=["never", "see."])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "see.")
    with client.messages.stream(**FIELDS, messages=HI, stop_sequences=["see."]) as stream:
        streamed = stream.get_final_message()
    assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", "see.")


# ── the prompt ───────────────────────────────────────────────────────────────────────────────────────────────────────────

CONVERSATION: list[Any] = [
    {"role": "user", "content": [{"type": "text", "text": "Where?", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "secret", "signature": "s"},
            {"type": "text", "text": "One moment."},
            {"type": "tool_use", "id": "toolu_1", "name": "look_up", "input": {"city": "Bonn"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "at the Rhine"}]},
            {"type": "text", "text": "And?"},
        ],
    },
]


def test_calls_and_results_of_earlier_turns_reach_the_template(
    client: anthropic.Anthropic, engine: ScriptedEngine, text: ModelText
) -> None:
    client.messages.create(**FIELDS, messages=CONVERSATION, system=[{"type": "text", "text": "Be brief."}], tools=[LOOK_UP])
    prompt = prompt_of(engine, text)
    assert '"name": "look_up"' in prompt
    after_tools = prompt.split("</tools>")[1]
    assert after_tools == (
        "<|system|>Be brief.<|end|><|user|>Where?<|end|><|assistant|>[secret]One moment."
        '<tool_call>{"name": "look_up", "arguments": {"city": "Bonn"}}</tool_call><|end|>'
        "<|tool|>at the Rhinetoolu_1<|end|><|user|>And?<|end|><|assistant|>"
    )


def test_the_answer_goes_on_with_a_last_turn_of_the_assistant(
    client: anthropic.Anthropic, engine: ScriptedEngine, text: ModelText
) -> None:
    turns: list[Any] = [*HI, {"role": "assistant", "content": '{"a": '}]
    client.messages.create(**FIELDS, messages=turns)
    assert prompt_of(engine, text) == '<|user|>hi<|end|><|assistant|>{"a": '
    counted = client.messages.count_tokens(model="tiny", messages=turns)
    assert counted.input_tokens == len(engine.groups[-1][0].prompt)


def test_an_answer_that_goes_on_inside_reasoning_is_reasoning(
    client: anthropic.Anthropic, engine: ScriptedEngine, text: ModelText
) -> None:
    engine.script = lambda _: [*text.encode(" and so on.</think>Yes."), min(text.eos_ids)]
    turns: list[Any] = [*HI, {"role": "assistant", "content": "<think>I begin"}]
    thinking, said = client.messages.create(**FIELDS, messages=turns).content
    assert thinking.type == "thinking"
    assert thinking.thinking == "and so on."
    assert said.type == "text"
    assert said.text == "Yes."


def test_what_claude_code_sends_is_taken(server: Served, engine: ScriptedEngine, text: ModelText) -> None:
    failed = {"type": "tool_result", "tool_use_id": "t", "is_error": True, "content": [{"type": "text", "text": "no file"}]}
    use = {"type": "tool_use", "id": "t", "name": "mcp__" + "x" * 100, "input": {}}
    body = FIELDS | {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=abc;"},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        ],
        "messages": [
            *HI,
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [failed]},
            {"role": "system", "content": "Note."},
            {"role": "user", "content": [{"type": "text", "text": "go on"}]},
        ],
        "tools": [LOOK_UP | {"name": "mcp__" + "x" * 100, "cache_control": {"type": "ephemeral"}}],
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "medium"},
        "context_management": {"edits": []},
        "metadata": {"user_id": "u"},
        "stream": False,
    }
    reply = server.call("POST", "/v1/messages?beta=true", body, {"anthropic-beta": "x", "anthropic-version": "2023-06-01"})
    assert reply.status == 200, reply.body
    prompt = prompt_of(engine, text)
    assert prompt.split("</tools>")[1].startswith("<|system|>Be brief.<|end|><|user|>hi")
    assert "<|tool|>Error: no filet<|end|><|system|>Note.<|end|><|user|>go on<|end|>" in prompt


@pytest.mark.parametrize(("thinking", "told"), [("enabled", "True"), ("disabled", "False")])
def test_thinking_is_told_to_the_template(
    client: anthropic.Anthropic, engine: ScriptedEngine, text: ModelText, thinking: str, told: str
) -> None:
    choice: Any = {"type": thinking} | ({"budget_tokens": 1024} if thinking == "enabled" else {})
    client.messages.create(**FIELDS, messages=HI, thinking=choice)
    assert prompt_of(engine, text).endswith(f"thinking:{told}")


def test_tokens_are_counted_as_the_prompt_has_them(client: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    counted = client.messages.count_tokens(model="tiny", messages=CONVERSATION, tools=[LOOK_UP])
    client.messages.create(**FIELDS, messages=CONVERSATION, tools=[LOOK_UP])
    assert counted.input_tokens == len(engine.groups[-1][0].prompt)


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"max_tokens": None}, "'max_tokens'"),
        ({"messages": []}, "'messages'"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "'messages[0].role'"),
        ({"messages": [{"role": "user", "content": 5}]}, "'messages[0].content'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "block 0 is of type 'image'"),
        ({"messages": [{"role": "user", "content": [7]}]}, "block 0 must be an object"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "needs a 'tool_use_id' string"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "i", "name": "n", "input": 1}]}]},
         "needs an 'input' object"),
        ({"messages": HI * 10_001}, "at most 10000 turns"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 10_001}]}, "at most 10000 blocks"),
        ({"system": [{"type": "image"}]}, "'system'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'tools[0].type'"),
        ({"tools": [LOOK_UP], "tool_choice": {"type": "any"}, "ignore_eos": True}, "'tool_choice' and 'ignore_eos'"),
        ({"tools": [LOOK_UP], "tool_choice": {"type": "tool", "name": "other"}}, "'other', which is none of the 'tools'"),
        ({"tools": [LOOK_UP], "tool_choice": {"type": "tool"}}, "'tool_choice.name' is missing"),
        ({"tools": [LOOK_UP], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "min_tokens": 1},
         "'tool_choice.disable_parallel_tool_use' and 'min_tokens'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "i", "name": "n"}]}]}, "of type 'tool_use'"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "'output_config.format.schema'"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"unevaluatedItems": 1}}}},
         "'output_config.format.schema'"),
        ({"mcp_servers": [{"url": "x"}]}, "'mcp_servers'"),
        ({"priority": -1}, "'priority'"),
        ({"max_tokens": 5000}, "context"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(server: Served, fields: dict[str, Any], told: str) -> None:
    reply = server.call("POST", "/v1/messages", FIELDS | {"messages": HI} | fields)
    assert reply.status == 400
    error = reply.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert told in error["error"]["message"]


def test_errors_have_the_shape_of_the_dialect(engine: ScriptedEngine, text: ModelText) -> None:
    settings = ApiSettings(served_model_names=("tiny",), api_keys=("key",))
    with serving(engine, text, settings) as running:
        base = running.base_url.removesuffix("/v1")
        stranger = anthropic.Anthropic(base_url=base, api_key="other", max_retries=0)
        with pytest.raises(anthropic.AuthenticationError) as refused:
            stranger.messages.create(**FIELDS, messages=HI)
        assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index,call-overload]
        known = anthropic.Anthropic(base_url=base, api_key="key", max_retries=0)
        with pytest.raises(anthropic.NotFoundError):
            known.messages.create(model="absent", max_tokens=1, messages=HI)
        assert known.messages.create(**FIELDS, messages=HI).content
        assert running.call("GET", "/v1/messages", headers={"x-api-key": "key"}).json()["type"] == "error"
        assert running.call("POST", "/v1/messages", raw=b"{", headers={"x-api-key": "key"}).json()["type"] == "error"


def test_a_path_below_has_errors_of_the_dialect_too(server: Served) -> None:
    assert server.call("POST", "/v1/messages/batches", {}).json()["error"]["type"] == "not_found_error"


def test_so_much_text_is_not_counted(server: Served) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "lorem ipsum " * 100_000}]}
    reply = server.call("POST", "/v1/messages/count_tokens", body)
    assert reply.status == 400
    assert "bytes" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("written", "made"),
    [
        ("null", {}),
        ('{"city": Paris}', {"arguments": '{"city": Paris}'}),
        ("[1, 2]", {"arguments": "[1, 2]"}),
        ('{"x": ' + "[" * 1100 + "]" * 1100 + "}", None),
    ],
)
def test_arguments_are_an_object_whatever_the_model_writes(
    client: anthropic.Anthropic, engine: ScriptedEngine, text: ModelText, written: str, made: object
) -> None:
    """Also with the client that puts streams together, which fails on anything else."""
    answer = f'<tool_call>{{"name": "look_up", "arguments": {written}}}</tool_call>'
    engine.script = lambda _: [*text.encode(answer), min(text.eos_ids)]
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 3000, "messages": HI, "tools": [LOOK_UP]}
    (whole,) = client.messages.create(**asked).content
    with client.messages.stream(**asked) as stream:
        (streamed,) = stream.get_final_message().content
    assert whole.type == streamed.type == "tool_use"
    assert whole.input == streamed.input
    assert made is None or whole.input == made


def test_arguments_that_were_cut_short_are_those_that_are_complete(
    client: anthropic.Anthropic, engine: ScriptedEngine, text: ModelText
) -> None:
    written = '<tool_call>{"name": "look_up", "arguments": {"a": 1, "city": "Par'
    engine.script = lambda _: [*text.encode(written), *text.encode('is"}}</tool_call>')]
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": len(text.encode(written)), "messages": HI, "tools": [LOOK_UP]}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        (use,) = message.content
        assert use.type == "tool_use"
        assert (use.input, message.stop_reason) == ({"a": 1}, "max_tokens")


def test_a_broken_stream_ends_with_an_error_event(server: Served, engine: ScriptedEngine) -> None:
    engine.dies_after = 3
    reply = server.call("POST", "/v1/messages", FIELDS | {"messages": HI, "stream": True})
    last = reply.body.decode().strip().split("\n\n")[-1]
    kind, data = last.split("\n")
    assert kind == "event: error"
    assert json.loads(data.removeprefix("data: "))["type"] == "error"
    assert b"message_stop" not in reply.body


def test_an_attempt_that_is_to_go_on_elsewhere_is_an_error_since_this_dialect_has_no_words_for_it(
    server: Served, engine: ScriptedEngine
) -> None:
    engine.fault = lambda _: PdFault(PdCode.PREEMPTED, PdStage.DECODE, "its KV blocks were needed")
    reply = server.call("POST", "/v1/messages", FIELDS | {"messages": HI})
    assert reply.status == 503
    assert reply.json()["error"]["type"] == "overloaded_error"
    assert reply.json()["error"]["retryable"] is True


# ── every cut ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def streamed(text: ModelText, sizes: Sequence[int], answer: str = ANSWER) -> list[Any]:
    """The events of an answer, cut into bursts of these sizes and the rest."""
    heading = ResponseHeader("msg-1", 1, "m", True, False, [[1, 2]], 1)
    writer, reader = MessagesWriter(heading), reader_of(text)
    tokens = list(text.encode(answer) if answer else ())
    raw = b""
    for size in [*sizes, len(tokens)]:
        burst, tokens = tuple(tokens[:size]), tokens[size:]
        ended = None if tokens else StreamEnd(FinishReason.STOP, 0)
        delta = reader.read(TokenBurst(burst, (), ended))
        raw += (writer.opening(delta) if delta.first else b"") + writer.event(delta)
        if ended is not None:
            break
    return [json.loads(event.split("\ndata: ")[1]) for event in raw.decode().split("\n\n") if event]


def reader_of(text: ModelText) -> ChoiceReader:
    parser = ThinkingParser(HermesParser(["look_up"]), False)
    return ChoiceReader(0, text.detokenizer(), None, frozenset(), parser=parser)


def joined(events: Sequence[Any]) -> list[Any]:
    """The blocks, with their deltas joined. Fails where blocks overlap or are left open."""
    blocks: list[Any] = []
    is_open = False
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(blocks)
                is_open = True
                blocks.append([event["content_block"]["type"], event["content_block"].get("name"), ""])
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(blocks) - 1
                blocks[-1][2] += next(value for name, value in event["delta"].items() if name != "type")
            case "content_block_stop":
                is_open = False
    assert not is_open
    return blocks


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 40), max_size=30))
def test_for_every_cut_the_blocks_are_the_same(text: ModelText, sizes: list[int]) -> None:
    assert joined(streamed(text, sizes)) == joined(streamed(text, []))


CALL = '<tool_call>{"name": "look_up", "arguments": {"city":"Rome"}}</tool_call>'


def _text_of(block: Any) -> str:
    if block["type"] == "tool_use":
        return json.dumps(block["input"], separators=(",", ":"), ensure_ascii=False)
    return str(block[block["type"]])


@pytest.mark.parametrize("answer", [ANSWER, f"{ANSWER}\nTwo.\n{CALL} \n{CALL} Three.", CALL, "", " \n"])
def test_the_blocks_of_a_stream_are_those_of_the_whole(text: ModelText, answer: str) -> None:
    heading = ResponseHeader("msg-1", 1, "m", True, False, [[1, 2]], 1)
    choice, reader = WholeChoice(), reader_of(text)
    choice.add(reader.read(TokenBurst(tuple(text.encode(answer) if answer else ()), (), StreamEnd(FinishReason.STOP, 0))))
    usage = {"prompt_tokens": 2, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 1}}
    whole = json.loads(b"".join(MessagesWriter(heading).whole([choice], usage)))
    started = [e["content_block"]["id"] for e in streamed(text, [3], answer) if e["type"] == "content_block_start" and
               e["content_block"]["type"] == "tool_use"]  # fmt: skip
    assert [block["id"] for block in whole["content"] if block["type"] == "tool_use"] == started
    shown = [[block["type"], block.get("name"), _text_of(block)] for block in whole["content"]]
    assert shown == joined(streamed(text, [3], answer))
    assert whole["usage"] == {
        "input_tokens": 1, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 1, "output_tokens": 9,
    }  # fmt: skip
