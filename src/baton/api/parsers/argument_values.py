"""Arguments that a model writes as bare text, not as JSON: the schema of the tool decides what they are."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice

ToolSchemas = Mapping[str, Mapping[str, object] | None]
"""The parameters of each tool, by its name. None: they are not described."""

SCHEMAS_MAX = 1000
"""Schemas that are looked at for the types of one argument: a client writes them, and the event loop reads them."""
_WORDS: Mapping[str, object] = {"true": True, "false": False, "null": None, "none": None}


class ArgumentTypes:
    """The declared types of the arguments of all tools, each found once."""

    def __init__(self, tools: ToolSchemas) -> None:
        self._tools = tools
        self._found: dict[tuple[str, str], frozenset[str]] = {}

    def __contains__(self, tool: str) -> bool:
        return tool in self._tools

    def value(self, tool: str, name: str, text: str) -> object:
        """The value of an argument that was written as this text."""
        types = self._found.get((tool, name))
        if types is None:
            types = self._found[tool, name] = declared_types(self._tools[tool], name)
        return typed_value(text, types)


def typed_value(text: str, types: frozenset[str]) -> object:
    """Of a declared type if the text is one; a string if that is declared, or nothing fits."""
    if types == {"string"}:
        return text
    value = _json_value(text, is_lenient=bool(types))
    if types and not types & _types_of(value):
        return text
    return value


def declared_types(parameters: Mapping[str, object] | None, name: str) -> frozenset[str]:
    """Types that the schema of an argument names: by itself, by its values, in its alternatives or where it refers to.

    Each reference is followed once, and at most SCHEMAS_MAX schemas are looked at. Empty: none is declared.
    """
    root = parameters or {}
    properties = root.get("properties")
    waiting: deque[object] = deque([properties.get(name) if isinstance(properties, dict) else None])
    followed: set[str] = set()
    types: set[str] = set()
    for _ in range(SCHEMAS_MAX):
        if not waiting:
            break
        schema = waiting.popleft()
        if not isinstance(schema, dict):
            continue
        if schema.get("type") is not None:
            types.update(_named_types(schema["type"]))
            continue
        types.update(_types_of_values(schema))
        room = SCHEMAS_MAX - len(waiting)
        waiting.extend(islice(_alternatives(schema), max(0, room)))
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            waiting.append(_referred(reference, root))
    return frozenset(types)


def _named_types(declared: object) -> Iterator[str]:
    return (one for one in (declared if isinstance(declared, list) else [declared]) if isinstance(one, str))


def _types_of_values(schema: Mapping[str, object]) -> Iterator[str]:
    values = schema.get("enum")
    for value in [*(values if isinstance(values, list) else ()), *([schema["const"]] if "const" in schema else ())]:
        yield from _types_of(value)


def _alternatives(schema: Mapping[str, object]) -> Iterator[object]:
    for name in ("anyOf", "oneOf"):
        alternatives = schema.get(name)
        yield from alternatives if isinstance(alternatives, list) else ()


def _referred(reference: str, root: Mapping[str, object]) -> object:
    found: object = root
    for step in reference.removeprefix("#/").split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _json_value(text: str, is_lenient: bool) -> object:
    """The text itself where it is no JSON. `is_lenient`: words of Python are taken for those of JSON."""
    if is_lenient and (word := text.strip().lower()) in _WORDS:
        return _WORDS[word]
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return text


def _types_of(value: object) -> frozenset[str]:
    """All types of JSON schema that the value has."""
    match value:
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"number", "integer"} if value.is_integer() else {"number"})
        case str():
            return frozenset({"string"})
        case list():
            return frozenset({"array"})
        case dict():
            return frozenset({"object"})
        case _:
            return frozenset({"null"})


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is too large a number")
    return value


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")
