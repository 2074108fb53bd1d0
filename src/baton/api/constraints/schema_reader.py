"""Reads JSON schemas into shapes: all keywords of drafts 4 to 2020-12, or a refusal that names the keyword and its place.

Keywords that no draft defines are annotations, as JSON schema says. References are nodes by name, read when they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from baton.api.constraints import formats
from baton.api.constraints.patterns import PatternRefused, whole_text_pattern
from baton.api.constraints.schema_document import NEWEST, TYPES, Schema, SchemaDocument, escaped
from baton.api.constraints.shape_algebra import (
    ShapeAlgebra,
    TooComplex,
    checked_array,
    checked_number,
    checked_string,
)
from baton.api.constraints.shapes import (
    ANY,
    NOTHING,
    ArrayShape,
    BooleanShape,
    Node,
    NullShape,
    NumberShape,
    ObjectShape,
    Reference,
    StringShape,
    constants,
)

T = TypeVar("T")
REFUSED = ("$dynamicRef", "$recursiveRef", "contains", "unevaluatedItems")
"""Not enforced, whatever their value."""
APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "dependencies")
NUMBER_WORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
STRING_WORDS = ("minLength", "maxLength", "pattern", "format")
ARRAY_WORDS = ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems")
OBJECT_WORDS = (
    "properties",
    "required",
    "patternProperties",
    "additionalProperties",
    "propertyNames",
    "minProperties",
    "maxProperties",
    "unevaluatedProperties",
)
TYPED_WORDS = frozenset((*NUMBER_WORDS, *STRING_WORDS, *ARRAY_WORDS, *OBJECT_WORDS))
RESTRICTING = frozenset((*TYPED_WORDS, *APPLICATORS, "type", "enum", "const"))
"""Words that may leave no value."""


class SchemaReader:
    """Reads one document."""

    def __init__(self, document: SchemaDocument) -> None:
        self._document = document
        self._nodes: dict[str, Node] = {}
        self._pending: dict[str, Callable[[], Node]] = {}
        self._open: list[str] = []
        self.algebra = ShapeAlgebra(self.resolve, self._named, self._open.__contains__)

    def read_root(self) -> Node:
        return self.resolve(self._named("/", lambda: self.read(self._document.root, "")).name)

    def resolve(self, name: str) -> Node:
        if name in self._nodes:
            return self._nodes[name]
        if name in self._open:
            raise self._document.refused(
                name if name.startswith("/") else "", "'$ref' refers to itself, with nothing between"
            )
        self._open.append(name)
        self._nodes[name] = self._pending[name]()
        self._open.pop()
        return self._nodes[name]

    def _named(self, name: str, make: Callable[[], Node]) -> Reference:
        if name not in self._nodes:
            self._pending.setdefault(name, make)
        return Reference(name)

    def read(self, schema: object, path: str) -> Node:
        if isinstance(schema, bool):
            return ANY if schema else NOTHING
        if not isinstance(schema, dict):
            raise self._document.refused(path, "a schema must be an object or a boolean")
        self.spend(path)
        for word in REFUSED:
            if word in schema and not (word == "unevaluatedItems" and schema[word] is True):
                raise self._document.refused(f"{path}/{word}", f"'{word}' is not supported")
        steps, node = dict(self._steps()), ANY
        typed = [word for word in schema if word in TYPED_WORDS or word == "type"]
        names_at = "properties" if "properties" in typed else typed[0] if typed else None
        for word in schema:  # in its order, which becomes that of the properties
            if word == names_at:
                node = self._both(node, self._typed(schema, path), path)
            elif word in steps:
                node = self._both(node, steps[word](schema, schema[word], f"{path}/{word}"), f"{path}/{word}")
        return node

    def _steps(self) -> Iterable[tuple[str, Callable[[Schema, object, str], Node]]]:
        return (
            ("const", lambda _, value, __: constants([value])),
            ("enum", self._enum),
            ("$ref", self._reference),
            ("allOf", self._all_of),
            ("anyOf", self._any_of),
            ("oneOf", self._one_of),
            ("not", self._not),
            ("if", self._if),
            ("dependentRequired", self._dependencies),
            ("dependentSchemas", self._dependencies),
            ("dependencies", self._dependencies),
        )

    def spend(self, path: str, steps: int = 1) -> None:
        self._counted(path, lambda: self.algebra.spend(steps))

    def _both(self, one: Node, other: Node, path: str) -> Node:
        return self._counted(path, lambda: self.algebra.intersection(one, other))

    def _counted(self, path: str, work: Callable[[], T]) -> T:
        try:
            return work()
        except TooComplex:
            word = path.rpartition("/")[2]
            what = f"'{word}' makes the schema" if word in RESTRICTING else "the schema is"
            raise self._document.refused(path, f"{what} too complex") from None
        except PatternRefused as error:
            raise self._document.refused(path, f"the schema {error}") from None

    # Words for all types.

    def _enum(self, _schema: Schema, values: object, path: str) -> Node:
        return constants(self._document.list_of(values, path, is_empty_allowed=True))

    def _schemas(self, value: object, path: str) -> list[Node]:
        return [self.read(one, f"{path}/{at}") for at, one in enumerate(self._document.list_of(value, path))]

    def _all_of(self, _schema: Schema, value: object, path: str) -> Node:
        node = ANY
        for one in self._schemas(value, path):
            node = self._both(node, one, path)
        return node

    def _any_of(self, _schema: Schema, value: object, path: str) -> Node:
        return self._counted(path, lambda: self.algebra.union(self._schemas(value, path)))

    def _one_of(self, schema: Schema, value: object, path: str) -> Node:
        """Alternatives that exclude each other are a union; of others each is taken without the rest."""
        around = self._typed(schema, path.rpartition("/")[0])
        nodes = [self._both(around, node, path) for node in self._schemas(value, path)]
        found: list[Node] = []
        for at, node in enumerate(nodes):
            for other_at, other in enumerate(nodes):
                if at != other_at and self._both(node, other, path) != NOTHING:
                    node = self._both(node, self._complement(other, path), path)  # noqa: PLW2901
            found.append(node)
        return self._counted(path, lambda: self.algebra.union(found))

    def _complement(self, node: Node, path: str) -> Node:
        return self._counted(path, lambda: self.algebra.complement(node, self._document.base + path))

    def _not(self, _schema: Schema, value: object, path: str) -> Node:
        return self._complement(self.read(value, path), path)

    def _if(self, schema: Schema, value: object, path: str) -> Node:
        parent = path.rpartition("/")[0]
        if "then" not in schema and "else" not in schema:
            return ANY
        condition = self.read(value, path)
        then = self.read(schema.get("then", True), f"{parent}/then")
        otherwise = self.read(schema.get("else", True), f"{parent}/else")
        met = self._both(condition, then, path)
        missed = self._both(self._complement(condition, path), otherwise, path)
        return self._counted(path, lambda: self.algebra.union((met, missed)))

    def _dependencies(self, _schema: Schema, value: object, path: str) -> Node:
        """Either the property is absent, or what depends on it holds."""
        node = ANY
        for name, wanted in self._document.object_of(value, path).items():
            here = f"{path}/{escaped(name)}"
            has = (ObjectShape({}, ANY, (name,)),)
            if isinstance(wanted, list):
                held: Node = (ObjectShape({}, ANY, (name, *self._document.names_of(wanted, here))),)
            else:
                held = self._both(has, self.read(wanted, here), here)
            either = (*self._complement(has, here), *held)
            node = self._both(node, either, here)
        return node

    # References.

    def _reference(self, _schema: Schema, value: object, path: str) -> Node:
        if not isinstance(value, str):
            raise self._document.refused(path, "'$ref' must be a string")
        target, place = self._document.target(value, path)
        return (self._named(place or "/", lambda: self.read(target, place)),)

    # Words for one type.

    def _typed(self, schema: Schema, path: str) -> Node:
        types = self._document.types(schema, path)
        if types is None and not any(word in TYPED_WORDS for word in schema):
            return ANY
        readers: dict[str, Callable[[], Node]] = {
            "null": lambda: (NullShape(),),
            "boolean": lambda: (BooleanShape(),),
            "number": lambda: self._number(schema, path, is_integer=False),
            "integer": lambda: self._number(schema, path, is_integer=True),
            "string": lambda: self._string(schema, path),
            "array": lambda: self._array(schema, path),
            "object": lambda: self._object_shape(schema, path),
        }
        return tuple(shape for name in types or TYPES for shape in readers[name]())

    def _number(self, schema: Schema, path: str, is_integer: bool) -> Node:
        bound, is_old = self._document.bound, self._document.draft <= 4
        low, high = bound(schema, "minimum", path), bound(schema, "maximum", path)
        is_above, is_below = False, False
        if is_old and isinstance(schema.get("exclusiveMinimum", False), bool):
            is_above = schema.get("exclusiveMinimum") is True
        elif (above := bound(schema, "exclusiveMinimum", path)) is not None and (low is None or above >= low):
            low, is_above = above, True
        if is_old and isinstance(schema.get("exclusiveMaximum", False), bool):
            is_below = schema.get("exclusiveMaximum") is True
        elif (below := bound(schema, "exclusiveMaximum", path)) is not None and (high is None or below <= high):
            high, is_below = below, True
        multiple = self._document.bound(schema, "multipleOf", path)
        if multiple is not None and multiple <= 0:
            raise self._document.refused(f"{path}/multipleOf", "'multipleOf' must be more than 0")
        return checked_number(NumberShape(is_integer, low, high, is_above, is_below, multiple))

    def _string(self, schema: Schema, path: str) -> Node:
        patterns = []
        most = self._document.count(schema, "maxLength", path)
        if "pattern" in schema:
            patterns.append(self._document.pattern(schema["pattern"], f"{path}/pattern", "pattern"))
        if (name := schema.get("format")) is not None:
            if not isinstance(name, str):
                raise self._document.refused(f"{path}/format", "'format' must be a string")
            if name in formats.REFUSED:
                raise self._document.refused(f"{path}/format", f"'format': {name!r} is not supported")
            if name in formats.PATTERNS:
                patterns.append(whole_text_pattern(formats.PATTERNS[name], is_search=False))
        return checked_string(StringShape(self._document.count(schema, "minLength", path) or 0, most, tuple(patterns)))

    def _array(self, schema: Schema, path: str) -> Node:
        if "uniqueItems" in schema and not isinstance(schema["uniqueItems"], bool):
            raise self._document.refused(f"{path}/uniqueItems", "'uniqueItems' must be true or false")
        prefix, rest, word = schema.get("prefixItems"), schema.get("items", True), "items"
        if isinstance(rest, list):
            if self._document.draft >= NEWEST:
                raise self._document.refused(f"{path}/items", "'items' must be a schema; 'prefixItems' takes a list")
            prefix, rest, word = rest, schema.get("additionalItems", True), "additionalItems"
        prefix_path = f"{path}/{'items' if word == 'additionalItems' else 'prefixItems'}"
        nodes = [] if prefix is None else self._schemas(prefix, prefix_path) if prefix else []
        shape = ArrayShape(
            tuple(nodes),
            self.read(rest, f"{path}/{word}"),
            self._document.count(schema, "minItems", path) or 0,
            self._document.count(schema, "maxItems", path),
            schema.get("uniqueItems") is True,
        )
        return checked_array(shape)

    def _object_shape(self, schema: Schema, path: str) -> Node:
        words = ("properties", "patternProperties")
        named, patterned = (
            {
                name: self.read(one, f"{path}/{word}/{escaped(name)}")
                for name, one in self._document.object_of(schema.get(word, {}), f"{path}/{word}").items()
            }
            for word in words
        )
        patterns: dict[str, Node] = {}
        for source, node in patterned.items():
            pattern = self._document.pattern(source, f"{path}/patternProperties/{escaped(source)}", "patternProperties")
            patterns[pattern] = self._both(patterns.get(pattern, ANY), node, path)
        shape = ObjectShape(
            named,
            self._additional(schema, path),
            tuple(dict.fromkeys(self._document.names_of(schema.get("required", []), f"{path}/required"))),
            patterns,
            self._document.count(schema, "minProperties", path) or 0,
            self._document.count(schema, "maxProperties", path),
        )
        if "propertyNames" in schema:
            shape = self._with_names(shape, self.read(schema["propertyNames"], f"{path}/propertyNames"), path)
        return self._counted(path, lambda: self.algebra.checked_object(shape))

    def _additional(self, schema: Schema, path: str) -> Node:
        if "additionalProperties" in schema:
            return self.read(schema["additionalProperties"], f"{path}/additionalProperties")
        word = "unevaluatedProperties"
        if schema.get(word, True) is True or self._document.draft < 2019:
            return ANY
        if any(other in schema for other in APPLICATORS):
            raise self._document.refused(f"{path}/{word}", f"'{word}' beside '$ref', 'allOf' and the like is not supported")
        return self.read(schema[word], f"{path}/{word}")

    def _with_names(self, shape: ObjectShape, names: Node, path: str) -> ObjectShape:
        """An object whose names are restricted: those of other properties become a pattern or a list."""
        node = self._both(names, (StringShape(),), path)
        if node == (StringShape(),):
            return shape
        if node == NOTHING:
            return ObjectShape({}, NOTHING, shape.required, {}, shape.min_properties, shape.max_properties)
        (only,) = node if len(node) == 1 else (None,)
        here = f"{path}/propertyNames"
        if not isinstance(only, StringShape) or shape.patterns:
            raise self._document.refused(here, "'propertyNames' must be one string schema, without 'patternProperties'")
        if only.values is not None and not only.patterns:
            allowed = {name: shape.properties.get(name, shape.additional) for name in only.values}
            return ObjectShape(allowed, NOTHING, shape.required, {}, shape.min_properties, shape.max_properties)
        if shape.properties or shape.required or len(only.patterns) > 1 or only.values is not None:
            raise self._document.refused(here, "'propertyNames' beside 'properties' or 'required' must be an 'enum'")
        pattern = _with_length(only)
        if pattern is None:
            raise self._document.refused(here, "'propertyNames' with both a pattern and a length is not supported")
        return ObjectShape({}, NOTHING, (), {pattern: shape.additional}, shape.min_properties, shape.max_properties)


def _with_length(shape: StringShape) -> str | None:
    """One pattern for the string; None: there is none."""
    has_length = shape.min_length > 0 or shape.max_length is not None
    if not has_length:
        return shape.patterns[0]
    return (
        None
        if shape.patterns
        else f"(?s:.{{{shape.min_length},{shape.max_length if shape.max_length is not None else ''}}})"
    )
