"""JSON values described by alternatives of one type each: the form into which schemas are brought before they are compiled.

A `Node` is a union of shapes; the empty one describes nothing. Shapes hold only what the backend enforces exactly. What it
cannot express is kept as `Unexpressible`, so that it may still vanish by intersection, and is refused when it remains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

JsonType = Literal["null", "boolean", "number", "string", "array", "object"]


@dataclass(frozen=True, slots=True)
class AnyValue:
    pass


@dataclass(frozen=True, slots=True)
class NullShape:
    pass


@dataclass(frozen=True, slots=True)
class BooleanShape:
    values: tuple[bool, ...] = (False, True)


@dataclass(frozen=True, slots=True)
class NumberShape:
    is_integer: bool = False
    minimum: int | float | None = None
    maximum: int | float | None = None
    is_above_minimum: bool = False
    """The minimum itself is excluded."""
    is_below_maximum: bool = False
    multiple_of: int | float | None = None


@dataclass(frozen=True, slots=True)
class StringShape:
    min_length: int = 0
    max_length: int | None = None
    patterns: tuple[str, ...] = ()
    """Of the whole string; all must match."""
    values: tuple[str, ...] | None = None
    """One of these; None: any."""


@dataclass(frozen=True, slots=True)
class ArrayShape:
    prefix: tuple[Node, ...]
    items: Node
    """Behind the prefix."""
    min_items: int = 0
    max_items: int | None = None
    is_unique: bool = False


@dataclass(frozen=True, slots=True)
class ObjectShape:
    properties: Mapping[str, Node]
    additional: Node
    required: tuple[str, ...] = ()
    patterns: Mapping[str, Node] = field(default_factory=dict)
    """Pattern of names → their values; a declared property that matches must satisfy both."""
    min_properties: int = 0
    max_properties: int | None = None


@dataclass(frozen=True, slots=True)
class Reference:
    """To a node that is written once, by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class Unexpressible:
    """Some values of a type that the backend cannot describe."""

    type: JsonType
    path: str
    reason: str
    are_fractions: bool = False
    """Numbers that are no integers."""


Shape: TypeAlias = (
    AnyValue | NullShape | BooleanShape | NumberShape | StringShape | ArrayShape | ObjectShape | Reference | Unexpressible
)
Node: TypeAlias = tuple[Shape, ...]

ANY: Node = (AnyValue(),)
NOTHING: Node = ()
ANY_ARRAY = ArrayShape((), ANY)
ANY_OBJECT = ObjectShape({}, ANY)
ALL_TYPES: Node = (NullShape(), BooleanShape(), NumberShape(), StringShape(), ANY_ARRAY, ANY_OBJECT)


def type_of(shape: Shape) -> JsonType | None:
    """None: a reference, or any value."""
    match shape:
        case NullShape():
            return "null"
        case BooleanShape():
            return "boolean"
        case NumberShape():
            return "number"
        case StringShape():
            return "string"
        case ArrayShape():
            return "array"
        case ObjectShape():
            return "object"
        case Unexpressible(type=name):
            return name
        case _:
            return None


def constant(value: object) -> Shape:
    """The shape of one JSON value."""
    match value:
        case None:
            return NullShape()
        case bool():
            return BooleanShape((value,))
        case int():
            return NumberShape(True, value, value)
        case float():
            is_integer = value.is_integer()
            number = int(value) if is_integer else value
            return NumberShape(is_integer, number, number)
        case str():
            return StringShape(values=(value,))
        case list():
            return ArrayShape(tuple((constant(item),) for item in value), NOTHING, len(value), len(value))
        case dict():
            nodes: dict[str, Node] = {str(key): (constant(item),) for key, item in value.items()}
            return ObjectShape(nodes, NOTHING, tuple(nodes))
        case _:
            raise TypeError(f"{type(value)} is no JSON")


def constants(values: list[object]) -> Node:
    """A union of values; strings in one shape."""
    texts = tuple(dict.fromkeys(value for value in values if isinstance(value, str)))
    others = [constant(value) for value in values if not isinstance(value, str)]
    return (*([StringShape(values=texts)] if texts else []), *others)
