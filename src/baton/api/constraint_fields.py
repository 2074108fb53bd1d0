"""Fields of requests that say what an answer must match, in the names of OpenAI and of vLLM.

Schemas are taken as they are: what they hold is looked at by the process that compiles them. A body has one constraint at
most; a second one, and whatever would let an answer end elsewhere or without it, is refused with both names.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

CHOICES_MAX = 10_000
TEXT_CHARS_MAX = 256 << 10
"""Of a regular expression, a grammar or a schema that comes as text."""


def _text(value: object) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= TEXT_CHARS_MAX:
        raise PydanticCustomError("value_error", f"must be a string of 1 to {TEXT_CHARS_MAX} characters")
    return value


def _schema(value: object) -> dict[str, object] | bool:
    if not isinstance(value, dict | bool):
        raise PydanticCustomError("value_error", "must be a JSON schema: an object, true or false")
    return value


def _schema_or_text(value: object) -> dict[str, object] | bool | str | None:
    return value if value is None else _text(value) if isinstance(value, str) else _schema(value)


def _object_or_text(value: object) -> dict[str, object] | str | None:
    if value is None or isinstance(value, dict):
        return value
    return _text(value)


def _optional_text(value: object) -> str | None:
    return None if value is None else _text(value)


_SCHEMA: dict[str, object] = {"anyOf": [{"type": "object"}, {"type": "boolean"}]}
_TEXT: dict[str, object] = {"type": "string", "minLength": 1, "maxLength": TEXT_CHARS_MAX}
_NULL: dict[str, object] = {"type": "null"}
Schema = Annotated[dict[str, object] | bool, PlainValidator(_schema), WithJsonSchema(_SCHEMA)]
ConstraintText = Annotated[str | None, PlainValidator(_optional_text), WithJsonSchema({"anyOf": [_TEXT, _NULL]})]
SchemaOrText = Annotated[
    dict[str, object] | bool | str | None,
    PlainValidator(_schema_or_text),
    WithJsonSchema({"anyOf": [_SCHEMA, _TEXT, _NULL]}),
]
"""vLLM takes schemas as text too; whether that is JSON is found by whoever compiles it."""
ObjectOrText = Annotated[
    dict[str, object] | str | None,
    PlainValidator(_object_or_text),
    WithJsonSchema({"anyOf": [{"type": "object"}, _TEXT, _NULL]}),
]
Choices = Annotated[list[str], Field(min_length=1, max_length=CHOICES_MAX)]
TagTriggers = Annotated[list[object], Field(max_length=1000)]


class NamedSchema(BaseModel):
    """The `json_schema` of a response format. It is enforced whether or not it says `strict`."""

    model_config = ConfigDict(
        strict=True, extra="ignore", allow_inf_nan=False, frozen=True, hide_input_in_errors=True, validate_by_name=True
    )
    name: str | None = None
    description: str | None = None
    schema_: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True, hide_input_in_errors=True)
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: NamedSchema | None = None
    format: dict[str, object] | None = None
    structures: TagTriggers | None = None
    triggers: TagTriggers | None = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise PydanticCustomError("missing", "'json_schema' is missing")
        return self

    def structural_tag(self) -> dict[str, object]:
        return self.model_dump(exclude={"json_schema"}, exclude_none=True)


class StructuredOutputs(BaseModel):
    """vLLM's. Exactly one of these says something; what else vLLM has here is refused by name."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True, hide_input_in_errors=True)
    json_: Annotated[SchemaOrText, Field(alias="json")] = None
    json_object: bool | None = None
    regex: ConstraintText = None
    choice: Choices | None = None
    grammar: ConstraintText = None
    structural_tag: ObjectOrText = None
