"""Constrained answers through the real API: official clients, all dialects, streaming and not, an instance killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import anthropic
import httpx2 as httpx
import jsonschema_rs
import openai
import pytest
from pydantic import BaseModel, Field

from tests.e2e.test_router import Fleet
from tests.support.server import ServerProcess, baton_serve

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
FUNCTION: dict[str, Any] = {"name": "look_up", "parameters": SCHEMA}
TOOL: Any = {"type": "function", "function": FUNCTION}
OTHER: Any = {"type": "function", "function": {"name": "other", "parameters": {"type": "object", "properties": {}}}}
HI: list[Any] = [{"role": "user", "content": "hi"}]
SEEDS = range(3)


class Colour(StrEnum):
    RED = "red"
    GREEN = "green"


class Fruit(BaseModel):
    colour: Colour
    grams: int = Field(ge=0, le=999)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with baton_serve("--executor", "scripted", "--served-model-name", "m") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def check(arguments: str) -> None:
    jsonschema_rs.validate(SCHEMA, json.loads(arguments))


def test_a_constraint_that_bad_words_leave_no_token_ends_its_own_request_only(client: openai.OpenAI) -> None:
    asked: Any = {"model": "m", "messages": HI, "extra_body": {"guided_regex": "a", "bad_words": ["a"]}}
    with pytest.raises(openai.UnprocessableEntityError) as failure:
        client.chat.completions.create(**asked)
    assert failure.value.code == "constraint_failed"
    assert client.chat.completions.create(model="m", messages=HI, max_tokens=3).choices[0].message.content


@pytest.mark.parametrize("seed", SEEDS)
def test_answers_match_their_schema(client: openai.OpenAI, seed: int) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    asked: dict[str, Any] = {"model": "m", "messages": HI, "max_tokens": 500, "seed": seed, "response_format": form}
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "stop"
    check(whole.message.content or "")
    streamed = "".join(
        chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True)
    )
    assert streamed == whole.message.content


def test_the_official_client_parses_models(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model="m", messages=HI, max_tokens=500, response_format=Fruit).choices[0]
    assert isinstance(answer.message.parsed, Fruit)
    response = client.responses.parse(model="m", input="hi", max_output_tokens=500, text_format=Fruit)
    assert isinstance(response.output_parsed, Fruit)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_forced_call_is_one_and_its_arguments_match(client: openai.OpenAI, seed: int) -> None:
    asked: dict[str, Any] = {
        "model": "m", "messages": HI, "max_tokens": 800, "seed": seed, "tools": [OTHER, TOOL],
        "parallel_tool_calls": False,
    }  # fmt: skip
    named: Any = {"type": "function", "function": {"name": "look_up"}}
    whole = client.chat.completions.create(**asked, tool_choice=named).choices[0]
    assert whole.finish_reason == "tool_calls"
    (call,) = whole.message.tool_calls or []
    assert (call.type, call.function.name) == ("function", "look_up")
    check(call.function.arguments)
    pieces = [
        piece
        for chunk in client.chat.completions.create(**asked, tool_choice=named, stream=True)
        for piece in chunk.choices[0].delta.tool_calls or []
    ]
    assert "".join(piece.function.arguments or "" for piece in pieces if piece.function) == call.function.arguments
    required = client.chat.completions.create(**asked, tool_choice="required").choices[0].message.tool_calls or []
    assert [call.function.name for call in required] in (["other"], ["look_up"])


def test_the_other_dialects_force_calls_and_schemas(server: ServerProcess, client: openai.OpenAI) -> None:
    tool: Any = {"name": "look_up", "input_schema": SCHEMA}
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as claude:
        message = claude.messages.create(
            model="m", max_tokens=800, messages=HI, tools=[tool],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
        )  # fmt: skip
        (block,) = message.content
        assert (message.stop_reason, block.type) == ("tool_use", "tool_use")
        check(json.dumps(block.input))
        with claude.messages.stream(
            model="m", max_tokens=800, messages=HI, extra_body={"output_config": {"format": {"type": "json_schema",
                                                                                             "schema": SCHEMA}}}
        ) as stream:  # fmt: skip
            check("".join(stream.text_stream))
    tools: Any = [{"type": "function", "strict": True, **FUNCTION}]
    response = client.responses.create(
        model="m", input="hi", max_output_tokens=800, tools=tools, tool_choice="required", parallel_tool_calls=False
    )
    (item,) = response.output
    assert item.type == "function_call"
    check(item.arguments)


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"structured_outputs": {"choice": ["red", "green"]}}, {"red", "green"}),
        ({"structured_outputs": {"regex": "a(b|c)"}}, {"ab", "ac"}),
        ({"guided_grammar": 'start: "x" ("y" | "z")'}, {"xy", "xz"}),
        ({"guided_json": {"enum": [1, 2]}}, {"1", "2"}),
    ],
)
def test_completions_match_theirs(client: openai.OpenAI, fields: dict[str, Any], texts: set[str]) -> None:
    found = client.completions.create(model="m", prompt="hi", max_tokens=50, n=4, extra_body=fields).choices
    assert {choice.text.strip() for choice in found} <= texts
    assert {choice.finish_reason for choice in found} == {"stop"}


def test_a_constrained_answer_that_is_cut_says_so(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_object"}
    choice = client.chat.completions.create(model="m", messages=HI, max_tokens=1, response_format=form).choices[0]
    assert choice.finish_reason == "length"


def test_words_and_tokens_are_kept_out(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "m", "prompt": "hi", "max_tokens": 40, "seed": 1}
    text = client.completions.create(**asked, extra_body={"allowed_token_ids": [65, 66]}).choices[0].text
    assert set(text) <= {"a", "b"}
    fields = {"allowed_token_ids": [65, 66], "bad_words": ["ab"]}
    text = client.completions.create(**asked, extra_body=fields).choices[0].text
    assert "ab" not in text
    assert len(text) == 40


def test_large_bodies_are_refused_and_others_served(server: ServerProcess) -> None:
    enum = {"prompt": "hi", "guided_json": {"enum": list(range(500_000))}}
    reply = httpx.post(f"{server.url}/v1/completions", json=enum, timeout=60)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "constraint_too_complex")
    deep = b'{"prompt": "hi", "guided_json": ' + b'{"items":' * 1000 + b"{}" + b"}" * 1001
    headers = {"Content-Type": "application/json"}
    assert httpx.post(f"{server.url}/v1/completions", content=deep, headers=headers, timeout=60).status_code == 400
    huge = {"prompt": "hi", "guided_json": {"enum": ["x" * 100] * 50_000}}
    assert httpx.post(f"{server.url}/v1/completions", json=huge, timeout=60).status_code == 413
    fine = {"prompt": "hi", "guided_choice": ["yes"], "max_tokens": 10}
    assert httpx.post(f"{server.url}/v1/completions", json=fine, timeout=60).json()["choices"][0]["text"] == "yes"


def test_kill_9_in_mid_answer_leaves_a_constrained_answer_as_it_was() -> None:
    """The same tokens as undisturbed, and they match."""
    items = {"type": "array", "items": SCHEMA, "minItems": 5, "maxItems": 5}
    asked: dict[str, Any] = {
        "prompt": "hi", "max_tokens": 3000, "temperature": 1, "seed": 5, "guided_json": items, "return_token_ids": True,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        fleet = Fleet(stack)
        fleet.ensure(2)
        whole = json.loads(fleet.call("POST", "/v1/completions", asked).read())["choices"][0]
        jsonschema_rs.validate(items, json.loads(whole["text"]))
        ids: list[int] = []
        killed = False
        for _, event in fleet.stream(asked):
            if event == "[DONE]":
                continue
            ids += event["choices"][0]["token_ids"] if event["choices"] else []
            if len(ids) > 20 and not killed:
                killed = True
                os.kill(fleet.views()[fleet.serving()]["pid"], signal.SIGKILL)
        assert killed
        assert ids == whole["token_ids"]
        assert fleet.metric("baton_retries_total", cause="lost") >= 1


def test_a_model_with_weights_keeps_to_its_schema_too(plain_tiny: ServerProcess) -> None:
    body = {"model": "m", "prompt": "hi", "max_tokens": 400, "guided_json": SCHEMA, "seed": 1, "n": 3}
    reply = httpx.post(f"{plain_tiny.url}/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    for choice in reply.json()["choices"]:
        assert choice["finish_reason"] in ("stop", "length")
        if choice["finish_reason"] == "stop":
            check(choice["text"])
