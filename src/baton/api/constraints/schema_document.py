"""A schema as a document: its draft, where its references lead, and the values of its keywords, checked."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from urllib.parse import unquote

from baton.api.constraints.patterns import PatternRefused, whole_text_pattern
from baton.api.constraints.wanted import ConstraintRefused

Schema = Mapping[str, object]
TYPES = ("null", "boolean", "number", "string", "array", "object")
DRAFTS = {
    "http://json-schema.org/draft-03/schema": 3,
    "http://json-schema.org/draft-04/schema": 4,
    "http://json-schema.org/draft-06/schema": 6,
    "http://json-schema.org/draft-07/schema": 7,
    "https://json-schema.org/draft/2019-09/schema": 2019,
    "https://json-schema.org/draft/2020-12/schema": 2020,
}
NEWEST = 2020
COUNT_MAX = 100_000
"""Of a bound on lengths, items or properties."""


def escaped(step: str) -> str:
    """A step of a JSON pointer."""
    return step.replace("~", "~0").replace("/", "~1")


class SchemaDocument:
    """`field` and `base` tell in refusals where the schema stands."""

    def __init__(self, root: object, field: str, base: str) -> None:
        self.root = root
        self.draft = _draft_of(root)
        self.base = base
        self._field = field
        self._anchors: dict[str, tuple[object, str]] | None = None

    def refused(self, path: str, reason: str) -> ConstraintRefused:
        return ConstraintRefused(self._field, self.base + path, reason)

    def refused_at(self, place: str, reason: str) -> ConstraintRefused:
        """`place`: a path that begins with the base already."""
        return ConstraintRefused(self._field, place, reason)

    def nearest(self, path: str) -> tuple[str, object]:
        """As much of the path as leads somewhere, and what is there: schemas that were worked out may have places that the
        document has not."""
        found, taken = self.root, ""
        for step in path.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                break
            taken = f"{taken}/{step}"
        return taken, found

    def target(self, reference: str, path: str) -> tuple[object, str]:
        """The schema, and its place."""
        address, _, fragment = reference.partition("#")
        fragment = unquote(fragment)
        if address and address != self._own_address():
            raise self.refused(path, "'$ref' to another document is not supported")
        if self._is_below_own_address(path):
            raise self.refused(path, "'$ref' inside a schema with an '$id' of its own is not supported")
        if not fragment:
            return self.root, ""
        if not fragment.startswith("/"):
            return self._anchored(fragment, path)
        found: object = self.root
        for step in fragment[1:].split("/"):
            found = self._step(found, step.replace("~1", "/").replace("~0", "~"), path)
        return found, fragment

    def _step(self, value: object, step: str, path: str) -> object:
        if isinstance(value, dict) and step in value:
            return value[step]
        if isinstance(value, list) and step.isdecimal() and len(step) < 9 and int(step) < len(value):
            return value[int(step)]
        raise self.refused(path, "'$ref' leads nowhere")

    def _id_word(self) -> str:
        return "id" if self.draft <= 4 else "$id"

    def _own_address(self) -> str | None:
        own = self.root.get(self._id_word()) if isinstance(self.root, dict) else None
        return own.removesuffix("#") if isinstance(own, str) else None

    def _is_below_own_address(self, path: str) -> bool:
        found: object = self.root
        for step in path.split("/")[1:-1]:
            step = step.replace("~1", "/").replace("~0", "~")  # noqa: PLW2901
            found = found.get(step) if isinstance(found, dict) else found[int(step)] if isinstance(found, list) else None
            own = found.get(self._id_word()) if isinstance(found, dict) else None
            if isinstance(own, str) and not own.startswith("#"):
                return True
        return False

    def _anchored(self, name: str, path: str) -> tuple[object, str]:
        if self._anchors is None:
            self._anchors = anchors_in(self.root)
        if name not in self._anchors:
            raise self.refused(path, "'$ref' leads nowhere")
        return self._anchors[name]

    def list_of(self, value: object, path: str, is_empty_allowed: bool = False) -> list[object]:
        if not isinstance(value, list) or not (value or is_empty_allowed):
            raise self.refused(
                path, f"'{path.rpartition('/')[2]}' must be a list{'' if is_empty_allowed else ' that is not empty'}"
            )
        return value

    def object_of(self, value: object, path: str) -> dict[str, object]:
        if not isinstance(value, dict):
            raise self.refused(path, f"'{path.rpartition('/')[2]}' must be an object")
        return value

    def names_of(self, value: object, path: str) -> list[str]:
        names = self.list_of(value, path, is_empty_allowed=True)
        if not all(isinstance(name, str) for name in names):
            raise self.refused(path, "'required', 'dependentRequired': names must be strings")
        return [name for name in names if isinstance(name, str)]

    def types(self, schema: Schema, path: str) -> list[str] | None:
        if "type" not in schema:
            return None
        declared = schema["type"]
        names = declared if isinstance(declared, list) else [declared]
        for name in names:
            if not isinstance(name, str) or name not in (*TYPES, "integer"):
                raise self.refused(f"{path}/type", f"'type' has {json.dumps(name)[:40]}, which is no type of JSON schema")
        if "number" in names:
            names = [name for name in names if name != "integer"]
        return list(dict.fromkeys(names))

    def count(self, schema: Schema, word: str, path: str) -> int | None:
        value = schema.get(word)
        if value is None and word not in schema:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.refused(f"{path}/{word}", f"'{word}' must be a whole number that is not negative")
        if value > COUNT_MAX:
            if word.startswith("max"):
                return COUNT_MAX
            raise self.refused(f"{path}/{word}", f"'{word}' is more than {COUNT_MAX}")
        return value

    def bound(self, schema: Schema, word: str, path: str) -> int | float | None:
        value = schema.get(word)
        if value is None and word not in schema:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refused(f"{path}/{word}", f"'{word}' must be a number")
        return value

    def pattern(self, value: object, path: str, word: str) -> str:
        if not isinstance(value, str):
            raise self.refused(path, f"'{word}' must be a string")
        try:
            return whole_text_pattern(value)
        except PatternRefused as error:
            raise self.refused(path, f"'{word}' {error}") from None


def _draft_of(root: object) -> int:
    name = root.get("$schema") if isinstance(root, dict) else None
    return DRAFTS.get(name.removesuffix("#"), NEWEST) if isinstance(name, str) else NEWEST


def anchors_in(root: object) -> dict[str, tuple[object, str]]:
    """Schemas with an anchor, and their places. Values that are no schemas are looked into too."""
    found: dict[str, tuple[object, str]] = {}
    left: list[tuple[object, str]] = [(root, "")]
    while left:
        value, path = left.pop()
        if isinstance(value, list):
            left += [(one, f"{path}/{at}") for at, one in enumerate(value)]
        elif isinstance(value, dict):
            for word in ("$anchor", "$dynamicAnchor"):
                if isinstance(name := value.get(word), str):
                    found.setdefault(name, (value, path))
            left += [(one, f"{path}/{escaped(str(name))}") for name, one in value.items() if name not in ("enum", "const")]
    return found


def overlapping_patterns(value: object, written: Collection[str]) -> tuple[str, list[str]] | None:
    """Where 'patternProperties' has patterns that are written so, and these patterns as the client has them."""
    left: list[tuple[object, str]] = [(value, "")]
    while left:
        found, path = left.pop()
        pairs = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
        left += [(inner, f"{path}/{escaped(str(name))}") for name, inner in pairs]
        if path.endswith("/patternProperties") and isinstance(found, dict):
            named = [source for source in found if _is_written(source, written)]
            if len(named) > 1:
                return path, named
    return None


def _is_written(source: str, written: Collection[str]) -> bool:
    try:
        return whole_text_pattern(source) in written
    except PatternRefused:
        return False
