"""Writes shapes as JSON schemas in the few forms that llguidance enforces exactly: one type a schema, `anyOf` around them.

Values that have no end (a property that always needs another of the same kind) are left out, so that every answer can end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from baton.api.constraints.patterns import is_writable
from baton.api.constraints.schema_document import SchemaDocument, escaped
from baton.api.constraints.schema_reader import RESTRICTING, SchemaReader
from baton.api.constraints.shape_algebra import value_of
from baton.api.constraints.shapes import (
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
)
from baton.api.constraints.wanted import ConstraintRefused

Written = dict[str, object] | bool
EXACT_INTEGER = 1 << 53
"""Bounds are floating-point numbers in the backend."""
PLACES_MAX = 9
"""Digits behind the point of a bound."""
MULTIPLE_MAX = 1 << 30
OPEN_NAMES_MAX = 480
"""Names of properties that may come next at one place of an answer: each takes up to four of the backend's
`llguidance_grammars.ROW_ITEMS_MAX`."""


@dataclass(frozen=True, slots=True)
class ExactSchema:
    """A schema that is enforced exactly; its references lead into `definitions`."""

    root: Written
    definitions: dict[str, Written]

    def written(self) -> dict[str, object]:
        root = self.root if isinstance(self.root, dict) else {"anyOf": [self.root]}
        return {**root, **({"$defs": self.definitions} if self.definitions else {})}


class SchemaWriter:
    """`prefix`: of the names of definitions, so that those of several schemas can stand together."""

    def __init__(self, document: SchemaDocument, reader: SchemaReader, prefix: str = "") -> None:
        self._document = document
        self._reader = reader
        self._prefix = prefix
        self._names: dict[str, str] = {}
        self._finite: set[str] = set()

    def write(self, root: Node) -> ExactSchema:
        self._find_finite(root)
        written = self._node(root, "")
        definitions: dict[str, Written] = {}
        done = 0
        while done < len(self._names):
            for name, short in list(self._names.items())[done:]:
                definitions[short] = self._node(self._reader.resolve(name), name if name.startswith("/") else "")
                done += 1
        if written is False:
            raise self._endless(root)
        return ExactSchema(written, definitions)

    def _refused(self, path: str, reason: str) -> ConstraintRefused:
        return self._document.refused(self._document.nearest(path)[0], reason)

    # Which references describe values that end.

    def _find_finite(self, root: Node) -> None:
        nodes = self._reached(root)
        while True:
            more = {name for name, node in nodes.items() if name not in self._finite and self._ends(node)}
            if not more:
                return
            self._finite |= more

    def _reached(self, root: Node) -> dict[str, Node]:
        found: dict[str, Node] = {}
        left = [*_references(root)]
        while left:
            name = left.pop()
            if name not in found:
                found[name] = self._reader.resolve(name)
                self._reader.spend("", len(found))
                left += _references(found[name])
        return found

    def _ends(self, node: Node) -> bool:
        return any(self._shape_ends(shape) for shape in node)

    def _shape_ends(self, shape: Shape) -> bool:
        match shape:
            case Reference(name=name):
                return name in self._finite
            case ArrayShape():
                needed = [*shape.prefix[: shape.min_items], *([shape.items] if shape.min_items > len(shape.prefix) else [])]
                return all(map(self._ends, needed))
            case ObjectShape():
                # A name that only patterns describe is left to the backend.
                needed = [value_of(shape, name) for name in shape.required if name in shape.properties or not shape.patterns]
                return all(map(self._ends, needed))
            case _:
                return True

    def _endless(self, node: Node) -> ConstraintRefused:
        """The refusal of a schema without values that end, with the place that has none."""
        path, seen = "", set[str]()
        while (step := self._endless_step(node, seen)) is not None:
            node = step[1]
            path += step[0]
        path, schema = self._document.nearest(path)
        words = [word for word in schema if word in RESTRICTING] if isinstance(schema, dict) else ["false"]
        named = ", ".join(f"'{word}'" for word in words)
        reason = f"{named}: no value that ends satisfies the schema" if named else "no value that ends satisfies the schema"
        return self._document.refused(path, reason)

    def _endless_step(self, node: Node, seen: set[str]) -> tuple[str, Node] | None:
        """A part that every value has, and where it stands; None: there is no such part."""
        match node:
            case (Reference(name=name),) if name not in seen:
                seen.add(name)
                return "", self._reader.resolve(name)
            case (ObjectShape() as shape,):
                parts = ((f"/properties/{escaped(name)}", value_of(shape, name)) for name in shape.required)
                return next((part for part in parts if not self._ends(part[1])), None)
            case _:
                return None

    # Writing.

    def _node(self, node: Node, path: str) -> Written:
        self._reader.spend(path)
        options = [
            written for shape in node if self._shape_ends(shape) and (written := self._shape(shape, path)) is not False
        ]
        if True in options:
            return True
        if _open_names(options) > OPEN_NAMES_MAX:
            reason = f"'properties' has more than {OPEN_NAMES_MAX} optional names, or alternatives with as many in all"
            raise self._refused(path, reason)
        if len(options) == 1:
            return options[0]
        return {"anyOf": options} if options else False

    def _shape(self, shape: Shape, path: str) -> Written:
        match shape:
            case AnyValue():
                return True
            case Reference(name=name):
                short = self._names.setdefault(name, f"{self._prefix}{len(self._names)}")
                return {"$ref": f"#/$defs/{short}"}
            case Unexpressible():
                raise self._document.refused_at(shape.path or path, shape.reason)
            case NullShape():
                return {"type": "null"}
            case BooleanShape(values):
                return {"type": "boolean"} if len(values) > 1 else {"type": "boolean", "enum": list(values)}
            case NumberShape():
                return self._number(shape, path)
            case StringShape():
                return self._string(shape, path)
            case ArrayShape():
                return self._array(shape, path)
            case ObjectShape():
                return self._object(shape, path)

    def _number(self, shape: NumberShape, path: str) -> Written:
        low, high = shape.minimum, shape.maximum
        if shape.multiple_of is None:  # a model that repeats a digit would never end the number
            low, high = -EXACT_INTEGER if low is None else low, EXACT_INTEGER if high is None else high
        found: dict[str, object] = {"type": "integer" if shape.is_integer else "number"}
        if low is not None:
            low = max(low, -EXACT_INTEGER)
            found["exclusiveMinimum" if shape.is_above_minimum else "minimum"] = self._plain(low, path)
        if high is not None:
            high = min(high, EXACT_INTEGER)
            found["exclusiveMaximum" if shape.is_below_maximum else "maximum"] = self._plain(high, path)
        if low is not None and high is not None and low > high:
            raise self._refused(path, "'minimum', 'maximum': numbers beyond 2^53 cannot be asked for exactly")
        if shape.multiple_of is not None:
            if not shape.is_integer or shape.multiple_of != int(shape.multiple_of) or shape.multiple_of > MULTIPLE_MAX:
                raise self._refused(path, "'multipleOf' is supported only for integers, as a whole number")
            found["multipleOf"] = int(shape.multiple_of)
        return found

    def _plain(self, value: int | float, path: str) -> int | float:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, float) and ("e" in repr(value) or len(repr(value).partition(".")[2]) > PLACES_MAX):
            raise self._refused(
                path, f"'minimum', 'maximum': bounds of numbers may have {PLACES_MAX} digits behind the point"
            )
        return value

    def _string(self, shape: StringShape, path: str) -> Written:
        found: dict[str, object] = {"type": "string"}
        if shape.values is not None:
            if not all(map(is_writable, shape.values)):
                raise self._refused(path, "'enum', 'const': strings with control characters cannot be asked for")
            found["enum"] = list(shape.values)
        if shape.min_length:
            found["minLength"] = shape.min_length
        if shape.max_length is not None:
            found["maxLength"] = shape.max_length
        anchored = [f"^(?:{pattern})$" for pattern in shape.patterns]
        if len(anchored) == 1 and shape.values is None:
            found["pattern"] = anchored[0]
        elif anchored:
            found["allOf"] = [{"type": "string", "pattern": pattern} for pattern in anchored]
        return found

    def _array(self, shape: ArrayShape, path: str) -> Written:
        most = shape.max_items
        if shape.is_unique and (most is None or most > 1):
            raise self._refused(path, "'uniqueItems' is not supported for more than one item")
        prefix = [self._node(node, f"{path}/prefixItems/{at}") for at, node in enumerate(shape.prefix[:most])]
        items = self._node(shape.items, f"{path}/items") if most is None or most > len(prefix) else False
        found: dict[str, object] = {"type": "array", **({"prefixItems": prefix} if prefix else {}), "items": items}
        if shape.min_items:
            found["minItems"] = shape.min_items
        if most is not None:
            found["maxItems"] = most
        return found

    def _object(self, shape: ObjectShape, path: str) -> Written:
        forms = [self._plain_object(form, path) for form in self._counted_forms(shape, path)]
        return forms[0] if len(forms) == 1 else {"anyOf": forms} if forms else False

    def _plain_object(self, shape: ObjectShape, path: str) -> Written:
        found: dict[str, object] = {
            "type": "object",
            "properties": {
                name: self._node(node, f"{path}/properties/{escaped(name)}") for name, node in shape.properties.items()
            },
            "required": list(shape.required),
            "additionalProperties": self._node(shape.additional, f"{path}/additionalProperties"),
        }
        if shape.patterns:
            here = f"{path}/patternProperties"
            found["patternProperties"] = {f"^(?:{name})$": self._node(node, here) for name, node in shape.patterns.items()}
        if shape.min_properties:
            found["minProperties"] = shape.min_properties
        if shape.max_properties is not None:
            found["maxProperties"] = shape.max_properties
        return found

    def _counted_forms(self, shape: ObjectShape, path: str) -> Iterator[ObjectShape]:
        """Objects in which the backend counts exactly: bounds only where no declared property is optional.

        It counts names that are written twice twice, so of undeclared ones at most one can be demanded.
        """
        optional = [name for name, node in shape.properties.items() if name not in shape.required and node != NOTHING]
        is_closed = shape.additional == NOTHING and not shape.patterns
        fewest = shape.min_properties - len(shape.required)
        most = None if shape.max_properties is None else shape.max_properties - len(shape.required)
        if most is not None and is_closed and len(optional) <= most:
            most = None
        if fewest <= 0 and most is None:
            yield replace(shape, min_properties=0, max_properties=None)
            return
        if fewest > 1 or (most is not None and most > 1 and optional):
            word = "minProperties" if fewest > 1 else "maxProperties"
            raise self._refused(path, f"'{word}' is supported only for one more than the required properties")
        bare = replace(shape, properties={**shape.properties, **dict.fromkeys(optional, NOTHING)})
        if fewest <= 0 or not is_closed:
            yield replace(bare, min_properties=len(shape.required) + max(fewest, 0))
        for name in optional:
            one = replace(shape, required=(*shape.required, name), min_properties=0, max_properties=None)
            if most is None:
                yield one
            elif most:
                none_else = {**shape.properties, **dict.fromkeys((other for other in optional if other != name), NOTHING)}
                yield replace(one, properties=none_else, additional=NOTHING, patterns={})


def _open_names(options: Sequence[Written]) -> int:
    """The most declared names that may come next at one place of any of these."""
    after: Counter[str | None] = Counter()
    for properties, required in _objects(options):
        following = 0
        for name in reversed(properties):
            after[name] += following
            following = 1 if name in required else following + 1
        after[None] += following
    return max(after.values(), default=0)


def _objects(options: Sequence[Written]) -> Iterator[tuple[list[str], frozenset[str]]]:
    """Names that objects may have, in their order, and names that they must have."""
    for option in options:
        match option:
            case {"anyOf": list(inner)}:
                yield from _objects(inner)
            case {"properties": dict(properties), "required": list(required)}:
                yield [name for name, value in properties.items() if value is not False], frozenset(required)
            case _:
                pass


def _references(node: Node) -> Iterator[str]:
    """Names in a node, outside of other references."""
    left: list[Shape] = [*node]
    while left:
        shape = left.pop()
        match shape:
            case Reference(name=name):
                yield name
            case ArrayShape():
                left += [inner for one in (*shape.prefix, shape.items) for inner in one]
            case ObjectShape():
                nodes = (*shape.properties.values(), shape.additional, *shape.patterns.values())
                left += [inner for one in nodes for inner in one]
            case _:
                pass


def exact_schema(schema: object, field: str, base: str = "", prefix: str = "d") -> ExactSchema:
    """Raises ConstraintRefused."""
    document = SchemaDocument(schema, field, base)
    reader = SchemaReader(document)
    return SchemaWriter(document, reader, prefix).write(reader.read_root())
