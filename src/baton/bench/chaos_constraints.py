"""Constraints of a chaos run: drawn from a seed, sent with a request, and checked against the answer.

Four kinds: a JSON schema, a regular expression, a choice of texts, a forced tool call. Owns what "the answer satisfies it"
means. The judges share nothing with what made the masks: jsonschema-rs, `re.fullmatch`, equality. jsonschema-rs is not
needed to serve; where it is not installed, the schemas of answers are not checked, and the report says of how many.

An answer that `max_tokens` cut need not satisfy anything, and is not judged.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

import msgspec
from msgspec import Struct

JsonSchema = Mapping[str, object]

SHOWN_CHARS = 80
ROWS = (1, 3)
NAME_CHARS = (3, 10)
SIZES = (9, 999, 99_999)
COLOURS = ("red", "green", "blue")
TOOL = "look_up"
CUT = "length"
"""Finish reason of an answer that `max_tokens` ended."""


class ChaosConstraintKind(StrEnum):
    SCHEMA = "schema"
    REGEX = "regex"
    CHOICE = "choice"
    CALL = "forced call"


class ConstraintVerdict(StrEnum):
    SATISFIED = "satisfied"
    BROKEN = "broken"
    CUT = "cut"
    """By `max_tokens`."""
    UNKNOWN = "unknown"
    """Nothing here can check it."""


@dataclass(slots=True)
class SeenCall:
    """A tool call of an answer, put together from its pieces."""

    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class AnswerConstraint:
    """What one request asks of its answers. `schema` is of the arguments in a forced call."""

    kind: ChaosConstraintKind
    schema: JsonSchema | None = None
    pattern: str = ""
    texts: tuple[str, ...] = ()

    def fields(self, is_chat: bool) -> dict[str, object]:
        """The fields of a body that ask for it. A forced call is asked of chats only."""
        match self.kind:
            case ChaosConstraintKind.REGEX:
                return {"structured_outputs": {"regex": self.pattern}}
            case ChaosConstraintKind.CHOICE:
                return {"structured_outputs": {"choice": list(self.texts)}}
            case ChaosConstraintKind.CALL:
                function = {"name": TOOL, "strict": True, "parameters": self.schema}
                return {
                    "tools": [{"type": "function", "function": function}],
                    "tool_choice": {"type": "function", "function": {"name": TOOL}},
                    "parallel_tool_calls": False,
                }
            case ChaosConstraintKind.SCHEMA if is_chat:
                named = {"name": "rows", "strict": True, "schema": self.schema}
                return {"response_format": {"type": "json_schema", "json_schema": named}}
            case ChaosConstraintKind.SCHEMA:
                return {"structured_outputs": {"json": self.schema}}

    def why_broken(self, text: str, calls: Sequence[SeenCall]) -> str | None:
        """Why an answer that ended by itself does not satisfy it; None where it does. Raises NoSchemaJudge."""
        if self.kind is ChaosConstraintKind.CALL:
            return self._why_no_call(text, calls)
        if calls:
            return f"{len(calls)} tool calls, and none was asked for"
        match self.kind:
            case ChaosConstraintKind.REGEX:
                return None if re.fullmatch(self.pattern, text) else f"{_short(text)} does not match {self.pattern}"
            case ChaosConstraintKind.CHOICE:
                return None if text in self.texts else f"{_short(text)} is none of the {len(self.texts)} choices"
            case _:
                return self._why_invalid(text)

    def _why_no_call(self, text: str, calls: Sequence[SeenCall]) -> str | None:
        if text.strip() or len(calls) != 1:
            return f"{len(calls)} tool calls and the text {_short(text)}, not one call alone"
        if calls[0].name != TOOL:
            return f"a call of {_short(calls[0].name)}, not of {TOOL}"
        return self._why_invalid(calls[0].arguments)

    def _why_invalid(self, text: str) -> str | None:
        try:
            value = json.loads(text)
        except ValueError as error:
            return f"{_short(text)} is no JSON: {error}"
        judge = schema_judge()
        if judge is None:
            raise NoSchemaJudge
        return judge(self.schema or {}, value)


class NoSchemaJudge(Exception):
    """jsonschema-rs is not installed."""


SchemaJudge = Callable[[JsonSchema, object], str | None]


@cache
def schema_judge() -> SchemaJudge | None:
    """What says why a value is not valid for a schema; None where jsonschema-rs is not installed."""
    try:
        import jsonschema_rs
    except ImportError:
        return None

    def judge(schema: JsonSchema, value: object) -> str | None:
        try:
            jsonschema_rs.validate(dict(schema), value)
        except ValueError as error:  # of a schema, of a value, or of text that is no Unicode
            return f"not valid for its schema: {str(error)[:SHOWN_CHARS]}"
        return None

    return judge


@dataclass(frozen=True, slots=True)
class ConstraintJudgement:
    verdict: ConstraintVerdict
    why: str = ""


class ConstraintCounts(Struct):
    """Requests with a constraint, and the verdicts on their choices."""

    requests: dict[str, int] = msgspec.field(default_factory=dict)
    """By kind."""
    moved: int = 0
    """Of these, those with a choice that moved to another instance."""
    verdicts: dict[str, int] = msgspec.field(default_factory=dict)
    broken: list[str] = msgspec.field(default_factory=list)

    def add(self, about: str, kind: ChaosConstraintKind, has_moved: bool, judgements: Sequence[ConstraintJudgement]) -> None:
        self.requests[kind] = self.requests.get(kind, 0) + 1
        self.moved += has_moved
        for one in judgements:
            self.verdicts[one.verdict] = self.verdicts.get(one.verdict, 0) + 1
            if one.verdict is ConstraintVerdict.BROKEN:
                self.broken.append(f"{about}: {one.why}")


def judged(constraint: AnswerConstraint, finish: str | None, text: str, calls: Sequence[SeenCall]) -> ConstraintJudgement:
    """Judge one choice of a complete answer."""
    if finish == CUT:
        return ConstraintJudgement(ConstraintVerdict.CUT)
    expected = "tool_calls" if constraint.kind is ChaosConstraintKind.CALL else "stop"
    try:
        why = constraint.why_broken(text, calls)
    except NoSchemaJudge:
        return ConstraintJudgement(ConstraintVerdict.UNKNOWN)
    if why is None and finish != expected:
        why = f"finish reason {finish}, not {expected}"
    return (
        ConstraintJudgement(ConstraintVerdict.SATISFIED)
        if why is None
        else ConstraintJudgement(ConstraintVerdict.BROKEN, why)
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…")


# ── drawing ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def draw_constraint(kind: ChaosConstraintKind, draws: random.Random, prose: Callable[[int], str]) -> AnswerConstraint:
    """A constraint whose answers are long enough to be moved and mostly end within 320 tokens of one byte.

    `prose` writes about so many characters."""
    match kind:
        case ChaosConstraintKind.SCHEMA | ChaosConstraintKind.CALL:
            return AnswerConstraint(kind, schema=_draw_schema(draws))
        case ChaosConstraintKind.REGEX:
            return AnswerConstraint(kind, pattern=_draw_pattern(draws))
        case ChaosConstraintKind.CHOICE:
            common = prose(draws.randint(30, 90))  # they differ late, so that a mask lost in a move shows
            return AnswerConstraint(kind, texts=tuple(f"{common}{number} {prose(20).strip()}" for number in range(4)))


def _draw_schema(draws: random.Random) -> JsonSchema:
    properties = {
        "name": {"type": "string", "maxLength": draws.randint(*NAME_CHARS)},
        "size": {"type": "integer", "minimum": 0, "maximum": draws.choice(SIZES)},
        "colours": {"type": "array", "items": {"enum": list(COLOURS)}, "minItems": 1, "maxItems": 3},
        "exact": {"type": "boolean"},
    }
    rows = draws.randint(*ROWS)
    row = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {
        "type": "object",
        "properties": {"rows": {"type": "array", "items": row, "minItems": rows, "maxItems": rows}},
        "required": ["rows"],
        "additionalProperties": False,
    }


def _draw_pattern(draws: random.Random) -> str:
    least = draws.randint(6, 12)
    colours = "|".join(COLOURS)
    return draws.choice(
        (
            rf"([a-z]{{2,7}} ){{{least},{2 * least}}}[0-9]{{4}}",
            rf"({colours})(-({colours})){{{least},{2 * least}}}",
            rf"[A-Z][a-z]{{{4 * least},{8 * least}}}\.",
        )
    )
