"""The gate for JSON schemas: bounds first, then the schema in a form that is enforced exactly, or a refusal.

The bounds are looked at without recursion, and end the look at once: the largest schema costs no more than an allowed one.
"""

from __future__ import annotations

import json

from baton.api.constraints.schema_document import escaped
from baton.api.constraints.schema_writer import ExactSchema, exact_schema
from baton.api.constraints.wanted import ConstraintRefused

CHARS_MAX = 512 << 10
"""Of a schema as text, and of all strings of one that came as a value."""
DEPTH_MAX = 64
VALUES_MAX = 50_000
ENUM_MAX = 10_000
"""Entries of all lists in `enum`."""


def checked_schema(value: object, field: str, base: str = "", prefix: str = "d") -> ExactSchema:
    """`value`: the schema, or its JSON text."""
    schema = parsed_json(value, field) if isinstance(value, str) else value
    check_size(schema, field, base)
    return exact_schema(schema, field, base, prefix)


def parsed_json(text: str, field: str) -> object:
    if len(text) > CHARS_MAX:
        raise ConstraintRefused(field, "", f"the text has more than {CHARS_MAX} characters")
    try:
        return json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise ConstraintRefused(field, "", "the text is not JSON, or has too many levels") from None


def _no_number(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def check_size(schema: object, field: str, base: str = "") -> None:
    chars = values = entries = 0
    left: list[tuple[object, str, int]] = [(schema, base, 0)]
    while left:
        value, path, depth = left.pop()
        values += 1
        if isinstance(value, str):
            chars += len(value)
        if not isinstance(value, dict | list):
            continue
        if depth >= DEPTH_MAX:
            raise ConstraintRefused(field, path[:200], f"the schema has more than {DEPTH_MAX} levels")
        values += len(value)
        if path.endswith("/enum"):
            entries += len(value)
        if isinstance(value, dict):
            chars += sum(map(len, value)) if len(value) <= VALUES_MAX else CHARS_MAX
        if values > VALUES_MAX or chars > CHARS_MAX or entries > ENUM_MAX:
            what = (
                f"{ENUM_MAX} entries in 'enum'" if entries > ENUM_MAX else f"{VALUES_MAX} values or {CHARS_MAX} characters"
            )
            raise ConstraintRefused(field, path[:200], f"the schema has more than {what}")
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        left += [(inner, f"{path}/{escaped(str(name))}", depth + 1) for name, inner in pairs]
