"""How each family writes tool calls, as rules. Its parser reads them; the arguments follow the schemas of the tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from baton.api.constraints.lark_text import LarkText, quoted
from baton.api.constraints.patterns import text_written
from baton.api.constraints.schema_gate import checked_schema
from baton.api.constraints.schema_writer import ExactSchema, Written
from baton.api.constraints.wanted import ConstraintRefused, WantedTool
from baton.api.parsers import deepseek, glm, gpt_oss, hermes, llama3, mistral, qwen3_coder
from baton.api.parsers.argument_values import declared_types
from baton.api.parsers.choosing import ToolParserChoice

ANY_OBJECT: dict[str, object] = {"type": "object"}
NO_ARGUMENTS: dict[str, object] = {"type": "object", "additionalProperties": False}
CALLS_MAX = 64
"""Calls in one answer."""
ANY_NAME = r"/[^<>\n]+/"
"""Of an argument that is written between markers."""


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool, and the schema that its arguments must satisfy."""

    name: str
    field: str
    arguments: ExactSchema
    parameters: Mapping[str, object] | None
    """As the client sent them: the parser reads bare values by these."""
    is_free: bool
    """Any object is allowed as arguments."""


def offered_tool(tool: WantedTool, at: int, is_constrained: bool) -> OfferedTool:
    """Arguments of a tool that describes none are an empty object."""
    declared, field = tool.parameters, f"tools[{at}].function.parameters"
    if not is_constrained:
        return OfferedTool(tool.name, field, ExactSchema(ANY_OBJECT, {}), declared, is_free=True)
    if declared is not None and declared.get("type", "object") != "object":
        raise ConstraintRefused(field, "/type", "'type' of parameters must be 'object'")
    schema = NO_ARGUMENTS if declared is None else {"type": "object", **declared}
    exact = checked_schema(schema, field, prefix=f"t{at}d")
    return OfferedTool(tool.name, field, exact, declared, is_free=False)


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """Rules of the calls of one answer."""

    first: str
    """The first call, with what stands before all calls; without the trigger of the family."""
    further: str
    """Another call behind it."""
    last: str = ""
    """What stands behind all calls."""

    def calls(self, is_parallel: bool) -> str:
        more = f" ({self.further}){{0,{CALLS_MAX - 1}}}" if is_parallel else ""
        return f"{self.first}{more} {self.last}".strip()


def has_call_grammar(family: ToolParserChoice) -> bool:
    return family in _FAMILIES


def call_grammar(lark: LarkText, family: ToolParserChoice, tools: Sequence[OfferedTool]) -> CallGrammar:
    make = _FAMILIES.get(family)
    if make is None:
        reason = f"calls in the form {family.value!r} cannot be constrained"
        raise ConstraintRefused("tools", "", reason)
    return make(lark, tools)


def _either(lark: LarkText, rules: Sequence[str]) -> str:
    return lark.rule(" | ".join(rules), name="call")


def _json_call(lark: LarkText, tools: Sequence[OfferedTool], arguments: str) -> str:
    """{"name": …, "arguments": …}"""
    return _either(lark, [lark.json(_call_schema(tool, arguments)) for tool in tools])


def _call_schema(tool: OfferedTool, arguments: str) -> dict[str, object]:
    return {
        "type": "object",
        "properties": {"name": {"type": "string", "enum": [tool.name]}, arguments: tool.arguments.root},
        "required": ["name", arguments],
        "additionalProperties": False,
        **({"$defs": tool.arguments.definitions} if tool.arguments.definitions else {}),
    }


def _hermes(lark: LarkText, tools: Sequence[OfferedTool]) -> CallGrammar:
    call = _json_call(lark, tools, "arguments")
    body = lark.rule(f"LINE {call} LINE {lark.literal(hermes.CLOSE)}")
    return CallGrammar(body, f"LINE {lark.literal(hermes.OPEN)} {body}")


def _llama3(lark: LarkText, tools: Sequence[OfferedTool]) -> CallGrammar:
    call = _json_call(lark, tools, "parameters")
    tag = f"({lark.literal(llama3.TAG)})? " if lark.is_token(llama3.TAG) else ""
    return CallGrammar(f"{tag}{call}", f"/; ?/ {call}")


def _mistral(lark: LarkText, tools: Sequence[OfferedTool]) -> CallGrammar:
    """With a token for arguments the form of 2025, otherwise the list."""
    if not lark.is_token(mistral.ARGUMENTS):
        call = _json_call(lark, tools, "arguments")
        return CallGrammar(f"/ ?\\[/ {call}", f"/, ?/ {call}", '"]"')
    forms = [
        f"{quoted(tool.name)} {lark.literal(mistral.ARGUMENTS)} {lark.json(tool.arguments.written())}" for tool in tools
    ]
    call = _either(lark, forms)
    return CallGrammar(call, f"{lark.literal(mistral.CALLS)} {call}")


def _deepseek(lark: LarkText, tools: Sequence[OfferedTool]) -> CallGrammar:
    """Both forms: with the word `function` and a code block (V3, R1), and bare (V3.1)."""
    between, close = lark.literal(deepseek.BETWEEN), lark.literal(deepseek.CLOSE)
    forms = []
    for tool in tools:
        arguments = lark.json(tool.arguments.written())
        fence = quoted(f"{tool.name}\n{deepseek.FENCE}json\n")
        forms.append(f"{quoted('function')} {between} {fence} {arguments} {quoted(chr(10) + deepseek.FENCE)}")
        forms.append(f"{quoted(tool.name)} {between} {arguments}")
    call = lark.rule(f"({_either(lark, forms)}) {close}")
    opening = lark.literal(deepseek.OPEN)
    return CallGrammar(f"{opening} {call}", f"LINE {opening} {call}", lark.literal(deepseek.AROUND[1]))


def _gpt_oss(lark: LarkText, tools: Sequence[OfferedTool]) -> CallGrammar:
    """One call: its end ends the answer."""
    forms = [
        f"{lark.literal(f'{gpt_oss.CHANNEL}commentary to=functions.{tool.name} {gpt_oss.CONSTRAIN}json{gpt_oss.MESSAGE}')}"
        f" {lark.json(tool.arguments.written())}"
        for tool in tools
    ]
    return CallGrammar(_either(lark, forms), "")


def _glm(lark: LarkText, tools: Sequence[OfferedTool]) -> CallGrammar:
    def pair(name: str, value: str) -> str:
        around = lark.literal(glm.KEY), name, lark.literal(glm.END_KEY), lark.literal(glm.VALUE)
        return f"LINE {around[0]} {around[1]} {around[2]} LINE {around[3]} {value}"

    stops = (glm.END_VALUE, glm.VALUE, glm.KEY, glm.END_KEY, glm.CLOSE)
    calls = [f"{quoted(tool.name)} {_bare_arguments(lark, tool, pair, stops, glm.END_VALUE)}" for tool in tools]
    body = lark.rule(f"LINE {_either(lark, calls)} LINE {lark.literal(glm.CLOSE)}")
    return CallGrammar(body, f"LINE {lark.literal(glm.OPEN)} {body}")


def _qwen3_coder(lark: LarkText, tools: Sequence[OfferedTool]) -> CallGrammar:
    def pair(name: str, value: str) -> str:
        return f"{quoted(chr(10) + qwen3_coder.PARAMETER)} {name} {quoted('>' + chr(10))} {value}"

    stops = (
        qwen3_coder.END_PARAMETER,
        qwen3_coder.PARAMETER,
        qwen3_coder.END_FUNCTION,
        qwen3_coder.FUNCTION,
        qwen3_coder.CLOSE,
        qwen3_coder.OPEN,
    )
    ending = f"\n{qwen3_coder.END_FUNCTION}"
    calls = [
        f"{quoted(f'{qwen3_coder.FUNCTION}{tool.name}>')} "
        f"{_bare_arguments(lark, tool, pair, stops, chr(10) + qwen3_coder.END_PARAMETER)} {quoted(ending)}"
        for tool in tools
    ]
    body = lark.rule(f"LINE {_either(lark, calls)} LINE {lark.literal(qwen3_coder.CLOSE)}")
    return CallGrammar(body, f"LINE {lark.literal(qwen3_coder.OPEN)} {body}")


def _bare_arguments(
    lark: LarkText, tool: OfferedTool, pair: Callable[[str, str], str], stops: Sequence[str], end: str
) -> str:
    """Declared properties, each at most once and in order; strings are bare text, other values JSON.

    Of a free tool, any names with any text. `pair` gets the rules of a name and of a value with its end.
    """
    if tool.is_free:
        return f"({pair(lark.terminal(ANY_NAME), _bare_text(lark, '(?s:.*)', stops, end))})*"
    root = tool.arguments.root
    properties = root.get("properties") if isinstance(root, dict) else None
    if not isinstance(root, dict) or not isinstance(properties, dict):
        raise ConstraintRefused(
            tool.field, "", "the parameters must be one object, for a model that writes arguments one by one"
        )
    required = root.get("required")
    needed = required if isinstance(required, list) else []
    undeclared = [name for name in needed if name not in properties]
    if undeclared:
        raise ConstraintRefused(
            tool.field, "/required", f"'required' names {undeclared[0]!r}, which 'properties' does not describe"
        )
    parts = []
    for name, schema in properties.items():
        if schema is False:
            continue
        written = pair(quoted(name), _bare_value(lark, tool, name, schema, stops, end))
        parts.append(f"({written})" if name in needed else f"({written})?")
    return " ".join(parts) or '""'


def _bare_value(lark: LarkText, tool: OfferedTool, name: str, schema: Written, stops: Sequence[str], end: str) -> str:
    """A value, and the marker behind it."""
    if declared_types(tool.parameters, name) != {"string"}:
        return f"{lark.json(ExactSchema(schema, tool.arguments.definitions).written())} {lark.literal(end)}"
    pattern = bare_pattern(schema)
    if pattern is None:
        path = f"/properties/{name}"
        raise ConstraintRefused(tool.field, path, "a string that is written as bare text must be of one plain schema")
    return _bare_text(lark, pattern, stops, end)


def _bare_text(lark: LarkText, pattern: str, stops: Sequence[str], end: str) -> str:
    """Text without stops, and the marker behind it."""
    excluded = "|".join(text_written(stop) for stop in stops)
    text = lark.terminal(f"/{pattern}/ & ~/(?s:.*)({excluded})(?s:.*)/")
    return f"{text} {lark.literal(end)}" if lark.is_token(end) else lark.rule(f"{text} {quoted(end)}", "lazy")


def bare_pattern(schema: Written) -> str | None:
    """A pattern for the text of a string; None: there is no one pattern."""
    if not isinstance(schema, dict) or schema.get("type") != "string" or "allOf" in schema:
        return None
    values, pattern = schema.get("enum"), schema.get("pattern")
    has_length = "minLength" in schema or "maxLength" in schema
    if isinstance(values, list):
        return "|".join(text_written(str(value)) for value in values) if pattern is None else None
    if isinstance(pattern, str):
        return None if has_length else pattern.removeprefix("^").removesuffix("$")
    return f"(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})" if has_length else "(?s:.*)"


_FAMILIES: Mapping[ToolParserChoice, Callable[[LarkText, Sequence[OfferedTool]], CallGrammar]] = {
    ToolParserChoice.HERMES: _hermes,
    ToolParserChoice.LLAMA3_JSON: _llama3,
    ToolParserChoice.MISTRAL: _mistral,
    ToolParserChoice.DEEPSEEK: _deepseek,
    ToolParserChoice.GLM: _glm,
    ToolParserChoice.QWEN3_CODER: _qwen3_coder,
    ToolParserChoice.GPT_OSS: _gpt_oss,
}
