"""Conversations of tool calls with the official Python clients, streamed and whole.

They are written as an agent is: the client's own helper puts a streamed answer together, and its own message objects are
sent back. Clients retry nothing, so that no failure of the server is hidden.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai

from benchmarks.agent_script import LIMIT_S, AgentEvent, AgentScript, Asked, Called, ConversationFailed


def openai_calls(script: AgentScript) -> Iterator[AgentEvent]:
    """Raises ConversationFailed."""
    messages: list[Any] = [{"role": "user", "content": script.question}]
    functions = [
        {"name": tool.name, "description": tool.description, "parameters": tool.schema, "strict": True}
        for tool in script.tools
    ]
    asked: dict[str, Any] = {
        "model": script.model,
        "messages": messages,
        "tools": [{"type": "function", "function": function} for function in functions],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": script.max_tokens,
    }
    with openai.OpenAI(base_url=f"{script.url}/v1", api_key="none", max_retries=0, timeout=LIMIT_S) as client:
        for number, result in enumerate(script.results):
            yield Asked(number)
            try:
                choice = _openai_choice(client, {**asked, "seed": script.seed + number}, script.is_streamed)
            except (openai.OpenAIError, ValueError) as error:
                raise ConversationFailed(f"{type(error).__name__}: {error}") from error
            calls = choice.message.tool_calls or []
            if len(calls) != 1:
                raise ConversationFailed(f"{len(calls)} calls, finish reason {choice.finish_reason}")
            yield Called(number, calls[0].function.name, calls[0].function.arguments, calls[0].id)
            messages += [choice.message, {"role": "tool", "tool_call_id": calls[0].id, "content": result}]


def _openai_choice(client: openai.OpenAI, asked: dict[str, Any], is_streamed: bool) -> Any:
    if not is_streamed:
        return client.chat.completions.create(**asked).choices[0]
    with client.chat.completions.stream(**asked) as stream:
        return stream.get_final_completion().choices[0]


def anthropic_calls(script: AgentScript) -> Iterator[AgentEvent]:
    """Raises ConversationFailed."""
    messages: list[Any] = [{"role": "user", "content": script.question}]
    asked: dict[str, Any] = {
        "model": script.model,
        "messages": messages,
        "tools": [
            {"name": tool.name, "description": tool.description, "input_schema": tool.schema, "strict": True}
            for tool in script.tools
        ],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "max_tokens": script.max_tokens,
    }
    with anthropic.Anthropic(base_url=script.url, api_key="none", max_retries=0, timeout=LIMIT_S) as client:
        for number, result in enumerate(script.results):
            yield Asked(number)
            try:
                message = _anthropic_message(
                    client, {**asked, "extra_body": {"seed": script.seed + number}}, script.is_streamed
                )
            except (anthropic.AnthropicError, ValueError) as error:
                raise ConversationFailed(f"{type(error).__name__}: {error}") from error
            calls = [block for block in message.content if block.type == "tool_use"]
            if len(calls) != 1:
                raise ConversationFailed(f"{len(calls)} calls, stop reason {message.stop_reason}")
            yield Called(number, calls[0].name, json.dumps(calls[0].input, ensure_ascii=False), calls[0].id)
            told = {"type": "tool_result", "tool_use_id": calls[0].id, "content": result}
            messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [told]}]


def _anthropic_message(client: anthropic.Anthropic, asked: dict[str, Any], is_streamed: bool) -> Any:
    if not is_streamed:
        return client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        return stream.get_final_message()
