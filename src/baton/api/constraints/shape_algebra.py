"""Intersection and complement of nodes. Every step is counted against a budget, so that no schema takes long."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from fractions import Fraction
from math import lcm

from baton.api.constraints.patterns import other_than
from baton.api.constraints.shapes import (
    ALL_TYPES,
    ANY,
    ANY_ARRAY,
    ANY_OBJECT,
    NOTHING,
    AnyValue,
    ArrayShape,
    BooleanShape,
    Node,
    NullShape,
    NumberShape,
    ObjectShape,
    Reference,
    Shape,
    StringShape,
    Unexpressible,
    type_of,
)

STEPS_MAX = 50_000
DEPTH_MAX = 100
"""Nodes within each other that are intersected or complemented."""
EXCLUDED_CHARS_MAX = 2_000
"""Characters of strings that are excluded by name."""


class TooComplex(Exception):
    """The budget is spent."""


class ShapeAlgebra:
    """`resolve`: the node of a reference. `name`: a reference to a node that is made when it is resolved.

    `is_open`: the node of a reference is being made.
    """

    def __init__(
        self,
        resolve: Callable[[str], Node],
        name: Callable[[str, Callable[[], Node]], Reference],
        is_open: Callable[[str], bool],
    ) -> None:
        self._resolve = resolve
        self._name = name
        self._is_open = is_open
        self._pairs = 0
        self._steps = 0
        self._depth = 0
        self._complemented: list[str] = []

    def spend(self, steps: int = 1) -> None:
        self._steps += steps
        if self._steps > STEPS_MAX:
            raise TooComplex

    def union(self, nodes: Iterable[Node]) -> Node:
        shapes: list[Shape] = []
        for node in nodes:
            self.spend(len(node))
            if ANY[0] in node:
                return ANY
            shapes += node
        return tuple(shapes)

    def intersection(self, first: Node, second: Node) -> Node:
        if first == ANY or second == ANY:
            return second if first == ANY else first
        if self._depth >= DEPTH_MAX:
            raise TooComplex
        self._depth += 1
        found = self.union(self._both(one, other) for one in first for other in second)
        self._depth -= 1
        return found

    def _both(self, one: Shape, other: Shape) -> Node:
        self.spend()
        match one, other:
            case (AnyValue(), _):
                return (other,)
            case (_, AnyValue()):
                return (one,)
            case (Reference(), Reference()):
                return self._both_references(one, other)
            case (Reference(), _):
                return self._with_reference(one, other)
            case (_, Reference()):
                return self._with_reference(other, one)
            case (Unexpressible(), _) | (_, Unexpressible()):
                return _with_unexpressible(one, other)
            case (NullShape(), NullShape()):
                return (one,)
            case (BooleanShape(), BooleanShape()):
                values = tuple(value for value in one.values if value in other.values)
                return (BooleanShape(values),) if values else NOTHING
            case (NumberShape(), NumberShape()):
                return both_numbers(one, other)
            case (StringShape(), StringShape()):
                return both_strings(one, other)
            case (ArrayShape(), ArrayShape()):
                return self._both_arrays(one, other)
            case (ObjectShape(), ObjectShape()):
                return self._both_objects(one, other)
            case _:
                return NOTHING

    def _both_references(self, one: Reference, other: Reference) -> Node:
        if one == other:
            return (one,)
        first, second = sorted((one.name, other.name))
        key = f"({first}) and ({second})"
        found = self._name(key, lambda: self.intersection(self._resolve(one.name), self._resolve(other.name)))
        is_ready = not any(map(self._is_open, (one.name, other.name, key)))
        return NOTHING if is_ready and self._resolve(key) == NOTHING else (found,)

    def _with_reference(self, reference: Reference, shape: Shape) -> Node:
        if not self._is_open(reference.name):
            return self.intersection(self._resolve(reference.name), (shape,))
        self._pairs += 1
        key = f"({reference.name}) and #{self._pairs}"
        return (self._name(key, lambda: self.intersection(self._resolve(reference.name), (shape,))),)

    def _both_arrays(self, one: ArrayShape, other: ArrayShape) -> Node:
        length = max(len(one.prefix), len(other.prefix))
        self.spend(length)
        prefix = [self.intersection(item_at(one, at), item_at(other, at)) for at in range(length)]
        items = self.intersection(one.items, other.items)
        shape = ArrayShape(
            tuple(prefix),
            items,
            max(one.min_items, other.min_items),
            _least(one.max_items, other.max_items),
            one.is_unique or other.is_unique,
        )
        return checked_array(shape)

    def _both_objects(self, one: ObjectShape, other: ObjectShape) -> Node:
        if (one.patterns and not _is_open(other)) or (other.patterns and not _is_open(one)):
            return (
                Unexpressible("object", "", "'patternProperties' cannot be combined with other objects that restrict names"),
            )
        names = list(dict.fromkeys([*one.properties, *other.properties]))
        self.spend(len(names))
        properties = {name: self.intersection(value_of(one, name), value_of(other, name)) for name in names}
        patterns = dict(one.patterns)
        for pattern, node in other.patterns.items():
            patterns[pattern] = self.intersection(patterns.get(pattern, ANY), node)
        shape = ObjectShape(
            properties,
            self.intersection(one.additional, other.additional),
            tuple(dict.fromkeys([*one.required, *other.required])),
            patterns,
            max(one.min_properties, other.min_properties),
            _least(one.max_properties, other.max_properties),
        )
        return self.checked_object(shape)

    def checked_object(self, shape: ObjectShape) -> Node:
        """Nothing where a required property cannot be, or there may not be as many."""
        self.spend(len(shape.required))
        if any(
            value_of(shape, name) == NOTHING
            for name in shape.required
            if not (shape.patterns and name not in shape.properties)
        ):
            return NOTHING
        if shape.max_properties is not None and len(shape.required) > shape.max_properties:
            return NOTHING
        return (shape,)

    def complement(self, node: Node, path: str) -> Node:
        """What is not described. `path` is told where that cannot be expressed."""
        found = ANY
        for shape in node:
            found = self.intersection(found, self._other_than(shape, path))
        return found

    def _other_than(self, shape: Shape, path: str) -> Node:
        self.spend()
        if isinstance(shape, AnyValue):
            return NOTHING
        if isinstance(shape, Reference):
            return self._other_than_reference(shape, path)
        own = type_of(shape)
        others = tuple(one for one in ALL_TYPES if type_of(one) != own)
        return (*others, *self._same_type(shape, path))

    def _other_than_reference(self, shape: Reference, path: str) -> Node:
        if shape.name in self._complemented:
            reason = "'$ref' to itself cannot be negated"
            return tuple(Unexpressible(name, path, reason) for one in ALL_TYPES if (name := type_of(one)) is not None)
        self._complemented.append(shape.name)
        found = self.complement(self._resolve(shape.name), path)
        self._complemented.pop()
        return found

    def _same_type(self, shape: Shape, path: str) -> Node:
        """What of the same type is not described."""
        match shape:
            case BooleanShape():
                values = tuple(value for value in (False, True) if value not in shape.values)
                return (BooleanShape(values),) if values else NOTHING
            case NumberShape():
                return other_numbers(shape, path)
            case StringShape():
                return other_strings(shape, path)
            case ArrayShape():
                return self._other_arrays(shape, path)
            case ObjectShape():
                return self._other_objects(shape, path)
            case Unexpressible():
                return (shape,)
            case _:
                return NOTHING

    def _other_arrays(self, shape: ArrayShape, path: str) -> Node:
        found: list[Shape] = []
        if shape.min_items:
            found.append(replace(ANY_ARRAY, max_items=shape.min_items - 1))
        most = shape.max_items
        if shape.items == NOTHING:
            most = len(shape.prefix) if most is None else min(most, len(shape.prefix))
        elif shape.items != ANY:
            found.append(Unexpressible("array", path, "'items' cannot be negated"))
        if most is not None:
            found.append(replace(ANY_ARRAY, min_items=most + 1))
        if shape.is_unique:
            found.append(Unexpressible("array", path, "'uniqueItems' cannot be negated"))
        for at, node in enumerate(shape.prefix):
            if other := self.complement(node, path):
                found.append(ArrayShape((*((ANY,) * at), other), ANY, at + 1))
        return tuple(found)

    def _other_objects(self, shape: ObjectShape, path: str) -> Node:
        found: list[Shape] = [replace(ANY_OBJECT, properties={name: NOTHING}) for name in shape.required]
        for name, node in shape.properties.items():
            if other := self.complement(node, path):
                found.append(ObjectShape({name: other}, ANY, (name,)))
        for name, has_any in (
            ("patternProperties", bool(shape.patterns)),
            ("additionalProperties", shape.additional != ANY),
            ("maxProperties", shape.max_properties is not None),
        ):
            if has_any:
                found.append(Unexpressible("object", path, f"{name!r} cannot be negated"))
        if shape.min_properties > 1:
            found.append(Unexpressible("object", path, "'minProperties' cannot be negated"))
        elif shape.min_properties:
            found.append(ObjectShape({}, NOTHING))
        return tuple(found)


def item_at(shape: ArrayShape, at: int) -> Node:
    return shape.prefix[at] if at < len(shape.prefix) else shape.items


def value_of(shape: ObjectShape, name: str) -> Node:
    """What is said of a property by its name; patterns apart."""
    return shape.properties.get(name, shape.additional)


def _is_open(shape: ObjectShape) -> bool:
    return shape.additional == ANY and not shape.patterns


def checked_array(shape: ArrayShape) -> Node:
    """With `max_items` where an item cannot be; nothing where there must be more."""
    most = shape.max_items
    impossible = next((at for at, node in enumerate(shape.prefix) if node == NOTHING), None)
    if impossible is None and shape.items == NOTHING:
        impossible = len(shape.prefix)
    most = _least(most, impossible)
    if most is not None and shape.min_items > most:
        return NOTHING
    prefix = shape.prefix if most is None else shape.prefix[:most]
    return (replace(shape, prefix=prefix, max_items=most),)


def both_numbers(one: NumberShape, other: NumberShape) -> Node:
    low = max(one, other, key=_low)
    high = min(one, other, key=_high)
    factors = [shape.multiple_of for shape in (one, other) if shape.multiple_of is not None]
    shape = NumberShape(
        one.is_integer or other.is_integer,
        low.minimum,
        high.maximum,
        low.is_above_minimum,
        high.is_below_maximum,
        common_multiple(*factors) if factors else None,
    )
    return checked_number(shape)


def common_multiple(one: int | float, other: int | float | None = None) -> int | float:
    if other is None:
        return one
    first, second = Fraction(str(one)), Fraction(str(other))
    below = lcm(first.denominator, second.denominator)
    found = Fraction(lcm(int(first * below), int(second * below)), below)
    return int(found) if found.denominator == 1 else float(found)


def _low(shape: NumberShape) -> tuple[int | float, bool]:
    return (float("-inf") if shape.minimum is None else shape.minimum, shape.is_above_minimum)


def _high(shape: NumberShape) -> tuple[int | float, bool]:
    return (float("inf") if shape.maximum is None else shape.maximum, not shape.is_below_maximum)


def checked_number(shape: NumberShape) -> Node:
    """With closed bounds for integers; nothing where no number is between the bounds."""
    if shape.is_integer:
        shape = _closed(shape)
    low, high = shape.minimum, shape.maximum
    if low is None or high is None:
        return (shape,)
    if low > high or (low == high and (shape.is_above_minimum or shape.is_below_maximum)):
        return NOTHING
    return (shape,)


def _closed(shape: NumberShape) -> NumberShape:
    low, high = shape.minimum, shape.maximum
    if low is not None:
        whole = -int(-low // 1)
        low = whole + 1 if shape.is_above_minimum and whole == low else whole
    if high is not None:
        whole = int(high // 1)
        high = whole - 1 if shape.is_below_maximum and whole == high else whole
    return replace(shape, minimum=low, maximum=high, is_above_minimum=False, is_below_maximum=False)


def other_numbers(shape: NumberShape, path: str) -> Node:
    found: list[Shape] = []
    if shape.minimum is not None:
        found.append(NumberShape(maximum=shape.minimum, is_below_maximum=not shape.is_above_minimum))
    if shape.maximum is not None:
        found.append(NumberShape(minimum=shape.maximum, is_above_minimum=not shape.is_below_maximum))
    if shape.is_integer:
        reason = "'type' 'integer' cannot be negated: numbers that are no integers cannot be asked for"
        found.append(Unexpressible("number", path, reason, are_fractions=True))
    if shape.multiple_of is not None:
        found.append(Unexpressible("number", path, "'multipleOf' cannot be negated"))
    return tuple(found)


def both_strings(one: StringShape, other: StringShape) -> Node:
    values = one.values if other.values is None else other.values
    if one.values is not None and other.values is not None:
        others = frozenset(other.values)
        values = tuple(value for value in one.values if value in others)
    shape = StringShape(
        max(one.min_length, other.min_length),
        _least(one.max_length, other.max_length),
        tuple(dict.fromkeys([*one.patterns, *other.patterns])),
        values,
    )
    return checked_string(shape)


def checked_string(shape: StringShape) -> Node:
    low, high = shape.min_length, shape.max_length
    if high is not None and low > high:
        return NOTHING
    if shape.values is None:
        return (shape,)
    values = tuple(value for value in shape.values if low <= len(value) and (high is None or len(value) <= high))
    return (replace(shape, values=values, min_length=0, max_length=None),) if values else NOTHING


def other_strings(shape: StringShape, path: str) -> Node:
    found: list[Shape] = []
    if shape.min_length:
        found.append(StringShape(max_length=shape.min_length - 1))
    if shape.max_length is not None:
        found.append(StringShape(min_length=shape.max_length + 1))
    if shape.patterns:
        found.append(Unexpressible("string", path, "'pattern' and 'format' cannot be negated"))
    if shape.values is not None:
        if sum(map(len, shape.values)) > EXCLUDED_CHARS_MAX:
            found.append(Unexpressible("string", path, "'enum' with so many strings cannot be negated"))
        else:
            found.append(StringShape(patterns=(other_than(shape.values),)))
    return tuple(found)


def _with_unexpressible(one: Shape, other: Shape) -> Node:
    """Some values of the type are left, which cannot be expressed either."""
    if type_of(one) != type_of(other):
        return NOTHING
    for inexact, exact in ((one, other), (other, one)):
        if isinstance(inexact, Unexpressible) and inexact.are_fractions and isinstance(exact, NumberShape):
            return NOTHING if exact.is_integer else (inexact,)
    return (one,) if isinstance(one, Unexpressible) else (other,)


def _least(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)
