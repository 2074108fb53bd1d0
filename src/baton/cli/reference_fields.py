"""docs/reference/fields.md: what each endpoint does with each field of a request's body, from the bodies themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from baton.api.messages.body import CountTokensBody, MessagesBody
from baton.api.paths import CHAT_PATH, COMPLETION_PATH, COUNT_TOKENS_PATH, MESSAGES_PATH, RESPONSES_PATH
from baton.api.responses_api.body import ResponsesBody
from baton.api.schema import (
    INTERNAL,
    ChatBody,
    CompletionBody,
    ContinuationFields,
    DetokenizeBody,
    RequestBody,
    TokenizeBody,
)
from baton.cli.field_meanings import MEANINGS, MEANINGS_AT

BODIES: Mapping[str, type[RequestBody]] = {
    CHAT_PATH: ChatBody,
    COMPLETION_PATH: CompletionBody,
    RESPONSES_PATH: ResponsesBody,
    MESSAGES_PATH: MessagesBody,
    COUNT_TOKENS_PATH: CountTokensBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
_INT32_MAX = 2**31 - 1
_INTRODUCTION = """\
`null` is the same as a field that is left out. Types are strict: no `"5"` for 5, no `true` for 1. A field that asks for \
something Baton does not do is refused with 400 and `unsupported_parameter`, unless its value asks for nothing; a field \
that changes no answer is ignored. Fields of no list here are ignored too, and each such name is logged once."""


@dataclass(frozen=True, slots=True)
class FieldRow:
    path: str
    """`messages[].role`."""
    value: str
    is_required: bool
    is_refused: bool
    """Known, and refused with a message of its own unless it is null."""
    meaning: str


def field_rows(endpoint: str) -> list[FieldRow]:
    schema = BODIES[endpoint].model_json_schema()
    rows = _rows(schema, schema.get("$defs", {}), "")
    return [replace(row, meaning=MEANINGS_AT.get((endpoint, row.path), row.meaning)) for row in rows]


def _rows(node: Mapping[str, Any], models: Mapping[str, Any], above: str) -> Iterator[FieldRow]:
    for name, schema in node["properties"].items():
        path = f"{above}{name}"
        yield FieldRow(
            path=path,
            value=_value(schema, models),
            is_required=name in node.get("required", ()),
            is_refused=_is_only_null(schema),
            meaning=MEANINGS.get(path, ""),
        )
        for model, suffix in _models_in(schema, models):
            yield from _rows(model, models, f"{path}{suffix}.")


def _models_in(schema: Mapping[str, Any], models: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Objects whose fields are told one by one, and what their place adds to the path."""
    for one in _alternatives(schema):
        if "$ref" in one:
            yield _model(one, models), ""
        elif "$ref" in one.get("items", {}):
            yield _model(one["items"], models), "[]"


def _model(reference: Mapping[str, Any], models: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = models[reference["$ref"].rpartition("/")[2]]
    return found


def _alternatives(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = [deeper for one in schema["anyOf"] for deeper in _alternatives(one)] if "anyOf" in schema else [schema]
    return [one for one in found if one.get("type") != "null"]


def _is_only_null(schema: Mapping[str, Any]) -> bool:
    return not _alternatives(schema)


# ── as Markdown ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _value(schema: Mapping[str, Any], models: Mapping[str, Any]) -> str:
    told = [_alternative(one, models) for one in _alternatives(schema)]
    return " or ".join(dict.fromkeys(told)) or "`null`"


def _alternative(one: Mapping[str, Any], models: Mapping[str, Any]) -> str:
    if "enum" in one:
        return ", ".join(f"`{choice}`" for choice in one["enum"] if choice is not None)
    if "const" in one:
        return f"`{one['const']}`"
    match one.get("type"):
        case "integer" | "number":
            return _number(one)
        case "boolean":
            return "bool"
        case "string":
            return "string" + _bounds(one.get("minLength", 0), one.get("maxLength"), "characters")
        case "array":
            items = _value(one["items"], models) if one.get("items") else "anything"
            return f"list of {items}" + _bounds(one.get("minItems", 0), one.get("maxItems"), "items")
        case _:
            return "object" + _bounds(0, one.get("maxProperties"), "entries")


def _number(one: Mapping[str, Any]) -> str:
    kind = {"integer": "int", "number": "float"}[one["type"]]
    above, least, most = one.get("exclusiveMinimum"), one.get("minimum"), one.get("maximum")
    if most is not None and most >= _INT32_MAX:
        most = None
    if least is not None and least < -_INT32_MAX:
        least = None
    low = (
        f"above {above:g}"
        if above is not None
        else ""
        if least is None
        else f"{least:g} to"
        if most is not None
        else f"≥ {least:g}"
    )
    high = "" if most is None else f"up to {most:g}" if above is not None else f"{most:g}"
    return " ".join(part for part in (kind, low, high) if part)


def _bounds(least: int, most: int | None, what: str) -> str:
    if most is None:
        return " (not empty)" if least else ""
    return f" ({least} to {most:,} {what})" if least else f" (up to {most:,} {what})"


def fields_page(generated: str) -> str:
    """`generated`: the line that says how the page is made."""
    parts = ["# Request fields", generated, _INTRODUCTION]
    for path, kind in BODIES.items():
        parts += [f"## {path}", *_section(path, kind)]
    parts += ["## Fields of routers", _of_routers()]
    return "\n\n".join(parts) + "\n"


def _section(path: str, kind: type[RequestBody]) -> Iterator[str]:
    lines = [f"| `{row.path}` | {_status(row)} | {_cell(row.value)} | {row.meaning} |" for row in field_rows(path)]
    yield "\n".join(("| Field | | Value | Meaning |", "|---|---|---|---|", *lines))
    if ignored := ignored_fields(kind):
        yield f"Ignored: {_names(ignored)}."
    if refused := refused_fields(kind):
        yield f"Refused: {', '.join(_refused(name, values) for name, values in refused.items())}."


def _status(row: FieldRow) -> str:
    return "refused" if row.is_refused else "needed" if row.is_required else "supported"


def ignored_fields(kind: type[RequestBody]) -> list[str]:
    return sorted(kind.ignored - kind.model_fields.keys())


def refused_fields(kind: type[RequestBody]) -> dict[str, tuple[object, ...]]:
    """Fields of features that are not there, with the values that are accepted because they ask for nothing."""
    return {name: values for name, values in sorted(kind.unsupported.items()) if name not in kind.model_fields}


def _refused(name: str, values: tuple[object, ...]) -> str:
    allowed = [_json(value) for value in values if value is not None]
    return f"`{name}`" + (f" (except {', '.join(allowed)})" if allowed else "")


def _json(value: object) -> str:
    return f"`{value}`".lower() if isinstance(value, bool) else f"`{value!r}`".replace("'", '"')


def _of_routers() -> str:
    proven = sorted(ContinuationFields.model_fields)
    return (
        f"Refused from everybody whatever their value: {_names(sorted(INTERNAL - set(proven)))}. A router that "
        f"[proves the cluster key](../continuation.md) may set {_names(proven)} at `{CHAT_PATH}` and `{COMPLETION_PATH}`."
    )


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
