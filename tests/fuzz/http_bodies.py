"""Borders of HTTP: bodies of requests, up to the submissions that they become, and headers with a form of their own."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.fuzz.border import Border, MakeBorder
from tests.fuzz.inputs import from_bytes, from_json, from_msgpack

if TYPE_CHECKING:
    from baton.api.model_text import ModelText
    from baton.api.prepare import RequestPreparer

COMMON: dict[str, object] = {
    "model": "tiny",
    "stream": True,
    "stream_options": {"include_usage": True},
    "n": 2,
    "seed": 7,
    "max_tokens": 20,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.5, "6": -2},
    "stop": ["end", "\n\n"],
    "stop_token_ids": [1, 2],
    "min_tokens": 3,
    "cache_salt": "salt",
    "priority": 5,
    "baton_usage": True,
    "return_token_ids": True,
}
TOKENS_MAX = 4096
MESSAGES: list[object] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "name": "me", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "é你"}]},
    {"role": "assistant", "content": None},
    {"role": "user", "content": "and?"},
]
CHATS: list[object] = [
    {"messages": MESSAGES},
    {**COMMON, "messages": MESSAGES, "logprobs": True, "top_logprobs": 3, "chat_template_kwargs": {"mood": "good"}},
    {"messages": MESSAGES[-1:], "tools": [], "response_format": {"type": "text"}, "user": "u", "max_completion_tokens": 4},
]
COMPLETIONS: list[object] = [
    {"prompt": "hello"},
    {**COMMON, "prompt": ["hello", "you"], "logprobs": 2},
    {"prompt": [1, 2, 3], "echo": True, "suffix": "", "add_special_tokens": False},
    {"prompt": [[1, 2], [3, 4]], "n": 2, "stop": "x"},
]
PARAMETERS: dict[str, object] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Bonn", "é"]},
        "days": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["city"],
}
CALL: dict[str, object] = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Bonn"}'}}
TOOLS: list[object] = [
    {"type": "function", "function": {"name": "f", "description": "does é", "parameters": PARAMETERS, "strict": False}},
    {"type": "function", "function": {"name": "g-2"}},
]
TOOL_CHATS: list[object] = [
    {"messages": MESSAGES[:2], "tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": True},
    {
        "messages": [
            MESSAGES[3],
            {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees"},
        ],
        "tools": TOOLS[:1],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    },
]
SCHEMA: dict[str, object] = {
    "$defs": {"node": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}},
    "type": "object",
    "properties": {
        "city": {"type": "string", "pattern": "^[a-z]+$", "minLength": 1, "maxLength": 9},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "exclusiveMaximum": 7}, "maxItems": 3},
        "at": {"type": "string", "format": "date-time"},
        "node": {"$ref": "#/$defs/node"},
        "kind": {"enum": ["é", 1, None]},
    },
    "required": ["city"],
    "additionalProperties": False,
}
CONSTRAINED: list[dict[str, object]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
    {"response_format": {"type": "json_object"}, "bad_words": ["no", " é"]},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"regex": "(a|b)+[0-9]{2,3}"}, "stop": ["x"]},
    {"structured_outputs": {"grammar": 'start: "a" b\nb: /[0-9]+/'}},
    {"structured_outputs": {"structural_tag": {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
                                               "triggers": ["<f>"]}}},
    {"guided_choice": ["yes", "é"], "n": 2},
    {"guided_json": '{"type": "integer"}'},
]  # fmt: skip
CONSTRAINED_CHATS: list[object] = [
    *({"messages": MESSAGES[-1:], **fields} for fields in CONSTRAINED),
    {"messages": MESSAGES[-1:], "thinking_token_budget": 9, "reasoning_effort": "low", "allowed_token_ids": [5, 6]},
    {
        "messages": MESSAGES[-1:],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
]
CONSTRAINED_COMPLETIONS: list[object] = [{"prompt": "hi", **fields} for fields in CONSTRAINED]
TURNS: list[object] = [
    {"role": "user", "content": [{"type": "text", "text": "where?", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"city": "Bonn", "days": [1, 2]}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "é"}], "is_error": False},
            {"type": "text", "text": "and?"},
        ],
    },
]
TURN_BODIES: list[object] = [
    {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
    {
        "model": "tiny",
        "max_tokens": 20,
        "system": [{"type": "text", "text": "be brief"}],
        "messages": TURNS,
        "tools": [{"name": "f", "description": "é", "input_schema": PARAMETERS}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": PARAMETERS}},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "stop_sequences": ["end"],
        "stream": True,
        "temperature": 0.5,
        "top_k": 5,
        "metadata": {"user_id": "u"},
    },
]
ITEMS: list[object] = [
    {"role": "user", "content": [{"type": "input_text", "text": "where?"}]},
    {"type": "reasoning", "summary": []},
    {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "call_1", "output": "21 degrees"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "it is é", "annotations": []}]},
    {"role": "user", "content": "and?"},
]
ITEM_BODIES: list[object] = [
    {"model": "tiny", "input": "hi"},
    {
        "model": "tiny",
        "input": ITEMS,
        "instructions": "be brief",
        "max_output_tokens": 20,
        "tools": [{"type": "function", "name": "f", "description": "é", "parameters": PARAMETERS, "strict": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "text": {"format": {"type": "json_schema", "name": "x", "schema": PARAMETERS, "strict": True}},
        "reasoning": {"effort": "low"},
        "stream": True,
        "store": False,
        "metadata": {"a": "b"},
    },
]
ANSWERS = (
    '<think>é</think>see\n<tool_call>\n{"name": "f", "arguments": {"city": "\\u00e9 \\"x"}}\n</tool_call>',
    '{"name": "f", "parameters": {"a": [1, 2.5e3, null, true]}}; {"name": "g-2", "parameters": {}}',
    '[TOOL_CALLS][{"name": "f", "arguments": {"a": "}"}}]',
    "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g-2[ARGS]{}",
    "[f(a='x', b=[1, {'c': None}]), g-2()]",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "<tool_call>\n<function=f>\n<parameter=days>\n[1, 2]\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n</tool_call>",
    '<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.f <|message|>{"a": 1}',
)
CONTINUED_CHATS: list[object] = [
    {"messages": MESSAGES[-1:], "max_tokens": 9, "generated_token_ids": [5, 6, 7], "sent_characters": 2},
    {"messages": MESSAGES[-1:], "max_tokens": 9, "n": 2, "generated_token_ids": [[5, 6], [7]], "sent_characters": [2, 1]},
]
CONTINUED_COMPLETIONS: list[object] = [
    {"prompt": "hi", "max_tokens": 9, "generated_token_ids": [5, 6, 7], "sent_characters": [2], "stop": ["zz"]},
    {"prompt": ["a", "b"], "max_tokens": 9, "generated_token_ids": [[5], [6]], "sent_characters": [1, 1], "echo": True},
]


def _text() -> ModelText:
    from baton.api.model_text import ModelText
    from tests.api.tokenizers_made_here import TEMPLATE, byte_level

    tokenizer = byte_level()
    return ModelText(tokenizer, chat_template=TEMPLATE, eos_ids=[tokenizer.token_to_id("<|end|>")])


TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}"
)


def _tool_preparer() -> RequestPreparer:
    """Of a model that reasons and calls tools."""
    from dataclasses import replace

    from baton.api.parsers.choosing import AnswerFormat, ReasoningParserChoice, ToolParserChoice

    plain = _preparer()
    return replace(
        plain,
        text=plain.text.with_template(TOOL_TEMPLATE),
        answer_format=AnswerFormat(ToolParserChoice.HERMES, ReasoningParserChoice.THINK),
    )


def _preparer() -> RequestPreparer:
    from baton.api.engine import EngineInfo
    from baton.api.prepare import RequestPreparer
    from baton.api.sampling_defaults import SamplingDefaults
    from baton.api.submissions import RequestRules

    text = _text()
    rules = RequestRules(EngineInfo(2048, 320, 4, 64, 16), text.eos_ids, SamplingDefaults(), {})
    text.render_chat([{"role": "user", "content": "hi"}], add_generation_prompt=True, extra={})  # loads the template engine
    return RequestPreparer(text, lambda: rules, ("tiny",))


def _generation(path: str, samples: list[object], proven: bool = False, has_tools: bool = False) -> Border:
    from baton.api.constraint_jobs import decode_job
    from baton.api.constraints.wanted import ConstraintRefused
    from baton.api.errors import ApiError
    from baton.api.original_request import OriginalRequest
    from baton.core.errors import Refused

    preparer = _tool_preparer() if has_tools else _preparer()

    def decode(data: bytes) -> object:
        """Up to the grammar of its constraint."""
        prepared = preparer.prepare(OriginalRequest(path, data, "tenant", "request", 3, 1_000_000), proven)
        if prepared.constraint is not None:
            decode_job(prepared.constraint.job).grammar({"</think>": 300})
        return prepared

    return Border(decode, (ApiError, Refused, ConstraintRefused), from_json(samples))


def _chat() -> Border:
    return _generation("/v1/chat/completions", CHATS, proven=False)


def _completion() -> Border:
    return _generation("/v1/completions", COMPLETIONS, proven=False)


def _tools() -> Border:
    return _generation("/v1/chat/completions", TOOL_CHATS, has_tools=True)


def _constrained_chat() -> Border:
    return _generation("/v1/chat/completions", CONSTRAINED_CHATS, has_tools=True)


def _constrained_completion() -> Border:
    return _generation("/v1/completions", CONSTRAINED_COMPLETIONS)


def _messages() -> Border:
    return _generation("/v1/messages", TURN_BODIES, has_tools=True)


def _responses() -> Border:
    return _generation("/v1/responses", ITEM_BODIES, has_tools=True)


def _answers() -> Border:
    """What a model writes: every parser takes every text, whole and in pieces, to the same parts."""
    from baton.api.parsers.choosing import AnswerFormat, ReasoningParserChoice, ToolParserChoice
    from baton.api.parsers.parts import parsed

    schemas: dict[str, dict[str, object] | None] = {"f": PARAMETERS, "g-2": None}
    formats = [AnswerFormat(tools, reasoning) for tools in ToolParserChoice for reasoning in ReasoningParserChoice]
    made = [one for one in formats if one.parser(schemas, False) is not None]

    def decode(data: bytes) -> object:
        text = data.decode("utf-8", "replace")
        size = 1 + len(data) % 7
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        one = made[len(data) % len(made)]
        found = [parsed(parser, cut) for cut in ([text], pieces) if (parser := one.parser(schemas, False)) is not None]
        if found[0] != found[1]:
            raise AssertionError(f"{one} finds other parts in pieces of {size}")
        return found

    return Border(decode, (), from_bytes([answer.encode() for answer in ANSWERS]))


def _continued_chat() -> Border:
    return _generation("/v1/chat/completions", CONTINUED_CHATS, proven=True)


def _continued_completion() -> Border:
    return _generation("/v1/completions", CONTINUED_COMPLETIONS, proven=True)


def _tokenize() -> Border:
    from baton.api.errors import ApiError
    from baton.api.model_text import TextTooLong
    from baton.api.schema import DetokenizeBody, TokenizeBody, check_tokenize, parse

    preparer = _preparer()
    samples: list[object] = [
        {"model": "tiny", "prompt": "hello é", "add_special_tokens": True, "return_token_strs": True},
        {"messages": MESSAGES, "add_generation_prompt": False},
        {"model": "tiny", "tokens": [1, 2, 300]},
    ]

    def decode(data: bytes) -> object:
        try:
            body = parse(data, TokenizeBody, (check_tokenize,))
        except ApiError:
            ids = parse(data, DetokenizeBody).tokens
            return preparer.text.decode([i for i in ids if i < 320])
        ids = (
            preparer.text.encode(body.prompt or "")
            if body.prompt is not None
            else preparer.chat_ids(body, body.messages or [], TOKENS_MAX)
        )
        return [preparer.text.token(i) for i in ids]

    return Border(decode, (ApiError, TextTooLong), from_json(samples))


def _headers() -> Border:
    """Headers that are parsed: proofs of routers, API keys, ids of events and of requests, keys of idempotent requests."""
    from baton.api.auth import ApiKeys
    from baton.api.errors import ApiError
    from baton.api.open_requests import is_sane_id
    from baton.api.stream_resume import check_reach, parse_marks
    from baton.wire.request_proof import ProofChecker, proof_of

    key = b"the key of the cluster"
    nonces = random.Random(1)
    checker, keys = ProofChecker(key, lambda: 1000.0), ApiKeys(["one", "group:two"])
    fresh = [proof_of(key, "POST", "/v1/completions", b"{}", 1000 + at, nonces.randbytes(16)).encode() for at in range(8)]
    texts = [*fresh, b"Bearer one", b"bearer  two", b"12!,7,-", b"5!.", b"3,-", b"a-request.id_1"]

    def decode(data: bytes) -> object:
        value = data.decode("latin-1")  # what starlette does with headers
        refused = checker.why_not("POST", "/v1/completions", b"{}", value)
        for choices in (1, 3):
            with_refusals(lambda: check_reach(parse_marks(value, choices), [10] * choices))  # noqa: B023
        with_refusals(lambda: keys.tenant(value))
        return refused, is_sane_id(value)

    def with_refusals(ask: Callable[[], object]) -> None:
        with contextlib.suppress(ApiError):
            ask()

    return Border(decode, (), from_bytes(texts))


def _origin() -> Border:
    """What an instance returns to a restarted router: a request as its client sent it, which is prepared again."""
    import json

    from baton.api.errors import ApiError
    from baton.api.original_request import BadOrigin, OriginalRequest, decode_origin
    from baton.core.errors import Refused

    preparer = _preparer()
    samples = [
        OriginalRequest("/v1/chat/completions", json.dumps(CHATS[1]).encode(), "t", "r", 3, 1_000_000).encode(),
        OriginalRequest("/v1/completions", json.dumps(COMPLETIONS[1]).encode(), "", "r" * 128, 2**63 - 1, 0).encode(),
    ]
    return Border(lambda data: preparer.prepare(decode_origin(data)), (BadOrigin, ApiError, Refused), from_msgpack(samples))


BORDERS: dict[str, MakeBorder] = {
    "http-chat": _chat,
    "http-tools": _tools,
    "http-constrained-chat": _constrained_chat,
    "http-constrained-completion": _constrained_completion,
    "http-messages": _messages,
    "http-responses": _responses,
    "http-completion": _completion,
    "http-continued-chat": _continued_chat,
    "http-continued-completion": _continued_completion,
    "http-tokenize": _tokenize,
    "http-headers": _headers,
    "http-origin": _origin,
    "model-answers": _answers,
}
