"""What a body asks an answer to match: its constraint fields, its tools and the bound of its reasoning, as one job.

A body has one constraint at most. What would let an answer end before it matches, or draw tokens against it, is refused with
the names of both fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.api.constraint_fields import ResponseFormat, StructuredOutputs
from baton.api.constraint_jobs import JOB_BYTES_MAX, ConstraintJob
from baton.api.constraints.answer_grammar import THINKING_FIELD
from baton.api.constraints.wanted import ConstraintKind, WantedConstraint, WantedTool
from baton.api.errors import ApiError, invalid
from baton.api.parsers.choosing import AnswerFormat, ReasoningParserChoice
from baton.api.schema import ChatBody, CompletionBody, GenerateBody
from baton.api.tool_fields import NamedTool, Tool, is_forced


@dataclass(frozen=True, slots=True)
class PreparedConstraint:
    """A constraint that is still to be compiled."""

    job: bytes
    param: str
    """The field that asks for it, by its name in the chat or completion."""
    body: GenerateBody
    wanted: WantedConstraint | None
    """Of the content; None: only calls or reasoning are constrained."""

    def renamed(self, refusal: ApiError) -> ApiError:
        """A refusal with the names that the client's dialect has for fields."""
        if not isinstance(self.body, ChatBody) or refusal.param is None:
            return refusal
        param = own_name(self.body, refusal.param.replace(THINKING_FIELD, "thinking_token_budget"))
        refusal.message = refusal.message.replace(f"'{refusal.param}'", f"'{param}'", 1)
        refusal.param = param
        return refusal


def own_name(body: ChatBody, param: str) -> str:
    """The client's name for a field of the chat."""
    return next((param.replace(name, own) for name, own in body.own_names.items() if name in param), param)


def completion_constraint(body: CompletionBody) -> PreparedConstraint | None:
    wanted = wanted_of(body)
    if wanted is None:
        return None
    _check_others(body, wanted.field)
    return _prepared(ConstraintJob(wanted.kind, wanted.value, wanted.field), wanted.field, body, wanted)


def chat_constraint(
    body: ChatBody, tools: Sequence[Tool], answers: AnswerFormat, begins_inside: bool
) -> PreparedConstraint | None:
    """`tools`: those that the model is told of. `begins_inside`: the prompt ends within reasoning."""
    wanted, budget = _wanted_beside_calls(body), _budget_of(body, answers)
    calls = _calls_field(body, tools)
    param = calls if wanted is None else wanted.field
    if param is None and budget is not None:
        param = "thinking_token_budget"
    if param is None:
        return None
    _check_others(body, param)
    choice = body.tool_choice
    job = ConstraintJob(
        kind=None if wanted is None else wanted.kind,
        value=None if wanted is None else wanted.value,
        field="" if wanted is None else wanted.field,
        tools=tuple(WantedTool(one.function.name, one.function.parameters, one.function.strict) for one in tools),
        tool_choice=choice if isinstance(choice, str) else "auto",
        named_tool=choice.function.name if isinstance(choice, NamedTool) else None,
        parallel=body.parallel_tool_calls is not False,
        tool_parser=answers.tools,
        reasoning_parser=answers.reasoning,
        begins_inside_reasoning=begins_inside,
        thinking_tokens_max=budget,
    )
    return _prepared(job, param, body, wanted)


def _prepared(job: ConstraintJob, param: str, body: GenerateBody, wanted: WantedConstraint | None) -> PreparedConstraint:
    try:
        encoded = job.encode()
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise invalid(param, f"'{param}' cannot be read: {error}") from None
    if len(encoded) > JOB_BYTES_MAX:
        message = f"'{param}' is too large: {len(encoded)} bytes; at most {JOB_BYTES_MAX} are compiled"
        raise invalid(param, message, "constraint_too_complex")
    return PreparedConstraint(encoded, param, body, wanted)


def _wanted_beside_calls(body: ChatBody) -> WantedConstraint | None:
    """A forced call leaves no content that a response format could apply to; agents send both. Other constraints are of the
    whole answer, and exclude a forced call."""
    wanted = wanted_of(body)
    if wanted is None or not is_forced(body.tool_choice):
        return wanted
    if body.response_format is None:
        raise invalid(wanted.field, f"'{wanted.field}' and 'tool_choice' exclude each other where a call is forced")
    return None


def _calls_field(body: ChatBody, tools: Sequence[Tool]) -> str | None:
    """The field that asks for constrained calls; None: calls are as the model writes them."""
    if not tools:
        return None
    if is_forced(body.tool_choice):
        return "tool_choice"
    if any(tool.function.strict for tool in tools):
        return "tools"
    return "parallel_tool_calls" if body.parallel_tool_calls is False else None


def _budget_of(body: ChatBody, answers: AnswerFormat) -> int | None:
    """A model without reasoning has none to bound."""
    return None if answers.reasoning is ReasoningParserChoice.NONE else body.thinking_token_budget


def _check_others(body: GenerateBody, param: str) -> None:
    others = {
        "ignore_eos": bool(body.ignore_eos),
        "min_tokens": bool(body.min_tokens),
        "allowed_token_ids": bool(body.allowed_token_ids),
    }
    for name, is_given in others.items():
        if is_given:
            own = own_name(body, param) if isinstance(body, ChatBody) else param
            raise invalid(own, f"'{own}' and '{name}' exclude each other")


def wanted_of(body: GenerateBody) -> WantedConstraint | None:
    """The one constraint that the fields ask for, by their names in chats and completions. Raises a 400 for two."""
    asked = [
        *_of_format(body.response_format),
        *_of_structured(body.structured_outputs),
        *_of_guided(body),
    ]
    if len(asked) > 1:
        first, second = asked[0].field, asked[1].field
        raise invalid(second, f"'{first}' and '{second}' exclude each other: an answer has one constraint at most")
    return asked[0] if asked else None


def _of_format(asked: ResponseFormat | None) -> list[WantedConstraint]:
    if asked is None or asked.type == "text":
        return []
    if asked.type == "json_object":
        return [WantedConstraint(ConstraintKind.JSON_OBJECT, None, "response_format")]
    if asked.type == "structural_tag":
        return [WantedConstraint(ConstraintKind.STRUCTURAL_TAG, asked.structural_tag(), "response_format")]
    schema = None if asked.json_schema is None else asked.json_schema.schema_
    return [WantedConstraint(ConstraintKind.JSON_SCHEMA, schema, "response_format.json_schema.schema")]


def _of_structured(asked: StructuredOutputs | None) -> list[WantedConstraint]:
    if asked is None:
        return []
    values: list[tuple[ConstraintKind, object, str]] = [
        (ConstraintKind.JSON_SCHEMA, asked.json_, "json"),
        (ConstraintKind.JSON_OBJECT, asked.json_object or None, "json_object"),
        (ConstraintKind.REGEX, asked.regex, "regex"),
        (ConstraintKind.CHOICE, asked.choice, "choice"),
        (ConstraintKind.GRAMMAR, asked.grammar, "grammar"),
        (ConstraintKind.STRUCTURAL_TAG, asked.structural_tag, "structural_tag"),
    ]
    found = [
        WantedConstraint(kind, None if kind is ConstraintKind.JSON_OBJECT else value, f"structured_outputs.{name}")
        for kind, value, name in values
        if value is not None
    ]
    if not found:
        raise invalid("structured_outputs", "'structured_outputs' names no constraint")
    return found


def _of_guided(body: GenerateBody) -> list[WantedConstraint]:
    values: list[tuple[ConstraintKind, object, str]] = [
        (ConstraintKind.JSON_SCHEMA, body.guided_json, "guided_json"),
        (ConstraintKind.REGEX, body.guided_regex, "guided_regex"),
        (ConstraintKind.CHOICE, body.guided_choice, "guided_choice"),
        (ConstraintKind.GRAMMAR, body.guided_grammar, "guided_grammar"),
    ]
    return [WantedConstraint(kind, value, field) for kind, value, field in values if value is not None]
