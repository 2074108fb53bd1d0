"""The scripted conversation that every client of `python -m benchmarks agents` has, and what is told of it.

The client asks with three strict tools of which it requires one call a turn, and feeds a result back that depends on the
number of the turn alone. With the same seeds an exact model therefore makes the same calls for every client of a dialect.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

Schema = dict[str, Any]

QUESTION = "Plan a relay race across Europe: look at the weather, search for tracks, and note what is decided."
MAX_TOKENS = 400
SEED = 20
LIMIT_S = 300.0
"""For one answer."""


class Dialect(StrEnum):
    OPENAI = "openai"
    RESPONSES = "responses"
    ANTHROPIC = "anthropic"


class AgentTool(msgspec.Struct, frozen=True):
    name: str
    description: str
    schema: Schema


def _strict(**properties: Schema) -> Schema:
    """An object with exactly these properties."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


TOOLS = (
    AgentTool(
        "weather",
        "The forecast for a city",
        _strict(
            city={"type": "string", "minLength": 3, "maxLength": 20},
            unit={"enum": ["celsius", "fahrenheit"]},
            days={"type": "integer", "minimum": 1, "maximum": 14},
        ),
    ),
    AgentTool(
        "search",
        "Find tracks",
        _strict(
            query={"type": "string", "minLength": 5, "maxLength": 30},
            filters={
                "type": "array",
                "items": _strict(
                    field={"enum": ["country", "length", "surface"]}, value={"type": "string", "maxLength": 10}
                ),
                "minItems": 1,
                "maxItems": 2,
            },
        ),
    ),
    AgentTool(
        "note",
        "Keep a decision",
        _strict(
            title={"type": "string", "minLength": 3, "maxLength": 24},
            tags={"type": "array", "items": {"enum": ["route", "team", "date", "budget"]}, "minItems": 1, "maxItems": 3},
            urgent={"type": "boolean"},
        ),
    ),
)
SCHEMAS = {tool.name: tool.schema for tool in TOOLS}


class AgentScript(msgspec.Struct, frozen=True):
    """One conversation, as it is given to a client."""

    url: str
    """Of the router, without a path."""
    model: str
    dialect: Dialect
    is_streamed: bool
    calls: int
    results: list[str]
    """What the tool returned, a turn."""
    question: str = QUESTION
    tools: tuple[AgentTool, ...] = TOOLS
    max_tokens: int = MAX_TOKENS
    seed: int = SEED
    limit_ms: int = int(LIMIT_S * 1000)


def script_for(url: str, model: str, dialect: Dialect, is_streamed: bool, calls: int) -> AgentScript:
    results = [json.dumps({"turn": number, "status": "done", "value": number * 37 % 100}) for number in range(calls)]
    return AgentScript(url, model, dialect, is_streamed, calls, results)


# ── what is told of a conversation ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Asked:
    """The next request is being sent."""

    number: int


@dataclass(frozen=True, slots=True)
class Called:
    """The model's call, whole."""

    number: int
    name: str
    arguments: str
    id: str


AgentEvent = Asked | Called


class ConversationFailed(Exception):
    """A client raised, or an answer was not one call; the message says what. The conversation ends there."""
