"""What a client asks of an answer's form, and the refusal of what cannot be enforced."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from msgspec import Struct

from baton.core.errors import BatonError


class ConstraintKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class WantedConstraint:
    """A constraint as the client sent it; `answer_grammar` checks the value."""

    kind: ConstraintKind
    value: object
    """The schema or structural tag as a value or as JSON text, the texts of a choice, the text of a regex or grammar."""
    field: str
    """Of the request, for errors."""

    @property
    def excludes_calls(self) -> bool:
        """Whether an answer that satisfies it has no call: tags are often the forms of calls in a free text."""
        return self.kind is not ConstraintKind.STRUCTURAL_TAG

    @property
    def may_begin_with_space(self) -> bool:
        """Whether the content may begin with white space, as far as can be told at once. JSON never does."""
        match self.kind:
            case ConstraintKind.JSON_SCHEMA | ConstraintKind.JSON_OBJECT:
                return False
            case ConstraintKind.CHOICE if isinstance(self.value, list):
                return any(isinstance(text, str) and text[:1].isspace() for text in self.value)
            case _:
                return True


class WantedTool(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A tool that calls may name, as far as a grammar depends on it. Travels to the process that compiles."""

    name: str
    parameters: dict[str, object] | None = None
    strict: bool | None = None


@dataclass(frozen=True, slots=True)
class NamedCall:
    """The answer must call this tool."""

    name: str


CallChoice = Literal["none", "auto", "required"] | NamedCall


class ConstraintRefused(BatonError):
    """A constraint that is malformed, too large, or cannot be enforced exactly."""

    def __init__(self, field: str, path: str, reason: str) -> None:
        self.field = field
        self.path = path
        """JSON pointer of the place inside the value; empty: the value itself."""
        self.reason = reason
        """Begins with the keyword."""
        super().__init__(f"'{field}'{f' at {path}' if path else ''}: {reason}")
