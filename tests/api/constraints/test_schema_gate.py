"""The gate for JSON schemas: what it accepts is enforced exactly, what it refuses is named."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from llguidance import LLMatcher

from baton.api.constraints.lark_text import JSON_OPTIONS
from baton.api.constraints.schema_gate import checked_schema
from baton.api.constraints.wanted import ConstraintKind, ConstraintRefused
from baton.node.scripted_text import BYTE_VOCABULARY
from baton.node.scripted_text import byte_tokenizer as scripted_tokenizer
from benchmarks.constraint_backends import ServedBackend, Walks, measured
from benchmarks.constraints import SERVED, BackendCounts, counted, judged, suite_rows
from tests.api.constraints.matching import byte_tokenizer, is_instance, is_whole, matcher, schema_matcher, wanted
from tools.json_schema_suite import NotReached, suite

SCHEMAS_FILE = os.environ.get("BATON_JSON_SCHEMAS")
SUITE = os.environ.get("BATON_JSON_SCHEMA_SUITE")
SUITE_SCHEMAS = 368
"""As the documentation tells."""

ENFORCED: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "type": ({"type": "integer"}, [0, -17, 10**12], [1.5, "1", True, None]),
    "several types": ({"type": ["boolean", "null"]}, [True, None], [0, "null"]),
    "enum": ({"enum": ["red", 3, None, [1]]}, ["red", 3, None, [1]], ["blue", 4, [2], []]),
    "enum of a type": ({"type": "string", "enum": ["a", 5]}, ["a"], [5, "b"]),
    "const": ({"const": {"k": [True]}}, [{"k": [True]}], [{"k": [False]}, {}, {"k": [True], "m": 1}]),
    "properties": ({"properties": {"n": {"type": "number"}}}, [{"n": 1.5}, {}, 7, {"other": "x"}], [{"n": "1"}]),
    "required": ({"type": "object", "required": ["z"]}, [{"z": 1}], [{}, {"y": 1}]),
    "additionalProperties": (
        {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "null"}},
        [{"a": 1, "b": None}],
        [{"b": 1}, {"a": 1, "b": "x"}],
    ),
    "no additionalProperties": ({"type": "object", "additionalProperties": False}, [{}], [{"a": 1}]),
    "items": ({"type": "array", "items": {"type": "string"}}, [[], ["a", "b"]], [[1], ["a", None]]),
    "prefixItems": (
        {"type": "array", "prefixItems": [{"const": 1}, {"type": "string"}], "items": False},
        [[], [1], [1, "x"]],
        [["x"], [1, 2], [1, "x", 3]],
    ),
    "minItems, maxItems": ({"type": "array", "minItems": 1, "maxItems": 2}, [[1], [1, 2]], [[], [1, 2, 3]]),
    "minLength, maxLength": ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "äöü", "😀😀"], ["a", "abcd", "😀"]),
    "pattern": ({"type": "string", "pattern": "^[A-Z]\\d{2}$"}, ["A12"], ["A1", "a12", "xA12", "A123"]),
    "pattern anywhere": ({"type": "string", "pattern": "cat|^dog"}, ["a cat", "dogma"], ["a dog", "bird"]),
    "minimum, maximum": ({"type": "integer", "minimum": -3, "maximum": 12}, [-3, 0, 12], [-4, 13, 120]),
    "exclusive bounds": (
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 2.5},
        [0.1, 2.49, 1],
        [0, 2.5, 3, -1],
    ),
    "multipleOf": ({"type": "integer", "multipleOf": 7}, [0, 14, -21], [1, 15]),
    "anyOf": ({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 5}]}, ["x", 6], [4, None]),
    "oneOf that overlaps": (
        {"type": "integer", "oneOf": [{"minimum": 0}, {"maximum": 10}]},
        [-1, 11],
        [0, 5, 10],
    ),
    "allOf": (
        {"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"properties": {"a": {"minimum": 3}}}]},
        [{"a": 3}, "not an object"],
        [{"a": 2}, {"a": "x"}, {}],
    ),
    "not": ({"type": "object", "not": {"required": ["bad"]}}, [{}, {"good": 1}], [{"bad": 1}, {"good": 1, "bad": 2}]),
    "not a string": ({"type": "string", "not": {"enum": ["no", "never"]}}, ["", "n", "nob", "nev"], ["no", "never"]),
    "if, then, else": (
        {
            "type": "object",
            "properties": {"kind": {"enum": ["a", "b"]}, "n": {"type": "integer"}},
            "required": ["kind"],
            "if": {"properties": {"kind": {"const": "a"}}},
            "then": {"required": ["n"]},
            "else": {"properties": {"n": False}},
        },
        [{"kind": "a", "n": 1}, {"kind": "b"}],
        [{"kind": "a"}, {"kind": "b", "n": 1}],
    ),
    "dependentRequired": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
        [{}, {"b": 1}, {"a": 1, "b": 2}],
        [{"a": 1}],
    ),
    "minProperties": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "additionalProperties": False, "minProperties": 1},
        [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}],
        [{}],
    ),
    "maxProperties": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1},
        [{}, {"a": 1}, {"b": 1}, {"c": 1}],
        [{"a": 1, "b": 1}, {"a": 1, "c": 1}],
    ),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^n_": {"type": "integer"}}, "additionalProperties": False},
        [{"n_a": 1, "n_b": 2}, {}],
        [{"n_a": "x"}, {"m": 1}],
    ),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}}, [{"ab": 1}, {}], [{"AB": 1}]),
    "$ref": (
        {"$ref": "#/$defs/even", "$defs": {"even": {"type": "integer", "multipleOf": 2}}},
        [2, 4],
        [3, "2"],
    ),
    "$ref that recurses": (
        {
            "$defs": {
                "tree": {
                    "type": "object",
                    "properties": {"v": {"type": "integer"}, "kids": {"items": {"$ref": "#/$defs/tree"}}},
                    "required": ["v"],
                }
            },
            "$ref": "#/$defs/tree",
        },
        [{"v": 1}, {"v": 1, "kids": [{"v": 2, "kids": []}]}],
        [{"kids": []}, {"v": 1, "kids": [{"v": "2"}]}],
    ),
    "$ref beside other words": (
        {"$ref": "#/$defs/word", "maxLength": 3, "$defs": {"word": {"type": "string", "pattern": "^[a-z]+$"}}},
        ["abc"],
        ["abcd", "AB"],
    ),
    "$anchor": ({"items": {"$ref": "#here"}, "$defs": {"x": {"$anchor": "here", "type": "null"}}}, [[None]], [[1]]),
    "draft 4": (
        {"$schema": "http://json-schema.org/draft-04/schema#", "type": "number", "minimum": 3, "exclusiveMinimum": True},
        [3.5, 4],
        [3, 2],
    ),
    "items as a list, draft 7": (
        {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"const": 1}], "additionalItems": False},
        [[1], []],
        [[2], [1, 2]],
    ),
    "uniqueItems of one": ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[], [1]], [[1, 1], [1, 2]]),
    "true": (True, [1, {"a": []}, None], []),
    "annotations": ({"title": "t", "default": 1, "x-ours": {"type": "string"}, "nullable": True}, [1, "x"], []),
    "unknown format": ({"type": "string", "format": "colour"}, ["x"], [1]),
}  # fmt: skip


@pytest.mark.parametrize("name", ENFORCED)
def test_a_keyword_is_enforced(name: str) -> None:
    schema, valid, invalid = ENFORCED[name]
    made = schema_matcher(schema)
    assert [value for value in valid if not is_instance(made, value)] == []
    assert [value for value in invalid if is_instance(made, value)] == []


@pytest.mark.parametrize("name", ENFORCED)
def test_the_examples_of_this_file_are_those_of_json_schema(name: str) -> None:
    schema, valid, invalid = ENFORCED[name]
    judge = jsonschema_rs.validator_for(schema)
    assert all(map(judge.is_valid, valid))
    assert not any(map(judge.is_valid, invalid))


FORMATS = {
    "date": (["2024-02-29", "1999-12-31"], ["2023-02-29", "1900-02-29", "2024-13-01", "2024-1-1"]),
    "time": (["23:59:59Z", "00:00:00.5+01:30"], ["24:00:00Z", "12:00:00", "12:60:00Z"]),
    "date-time": (["2024-02-29T12:00:00Z"], ["2023-02-29T12:00:00Z", "2024-02-28 12:00:00Z"]),
    "uuid": (["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08-aa98-11ea-b4aa-73b441d1638", "2eb8aa08"]),
    "ipv4": (["127.0.0.1"], ["256.0.0.1", "1.2.3"]),
    "ipv6": (["::1", "2001:db8::1", "::"], ["1::2::3", "12345::"]),
    "email": (["a.b@example.org"], ["a@", "@b.org", "a b@c.org"]),
    "uri": (["https://files.example/a?b#c"], ["//example.org", "a b:c"]),
    "hostname": (["a.example"], ["-a.example", "a..b"]),
    "duration": (["P1DT2H", "PT5M"], ["P", "1D", "PT1D"]),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_enforced(name: str) -> None:
    valid, invalid = FORMATS[name]
    made = schema_matcher({"type": "string", "format": name})
    assert [value for value in valid if not is_instance(made, value)] == []
    assert [value for value in invalid if is_instance(made, value)] == []


REFUSED = {
    "/properties/a/contains": {"properties": {"a": {"contains": {"type": "null"}}}},
    "/$dynamicRef": {"$dynamicRef": "#x"},
    "/unevaluatedItems": {"unevaluatedItems": False},
    "/unevaluatedProperties": {"unevaluatedProperties": False, "allOf": [{"properties": {"a": {}}}]},
    "/items/type": {"items": {"type": "dict"}},
    "/pattern": {"pattern": "(?=a)b"},
    "/$ref": {"$ref": "https://other.example/x.json"},
    "/anyOf/1/$ref": {"anyOf": [True, {"$ref": "#/$defs/none"}]},
    "/anyOf": {"anyOf": []},
    "/format": {"format": "regex"},
    "/required": {"required": "a"},
    "/minLength": {"minLength": -1},
    "/maximum": {"maximum": "3"},
    "/properties/a~1b/pattern": {"properties": {"a/b": {"pattern": "\\bx"}}},
}


@pytest.mark.parametrize("path", REFUSED)
def test_a_refusal_names_the_place_and_the_keyword(path: str) -> None:
    with pytest.raises(ConstraintRefused) as caught:
        checked_schema(REFUSED[path], "response_format")
    assert (caught.value.field, caught.value.path) == ("response_format", path)
    assert path in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "number", "multipleOf": 0.1}, "multipleOf"),
        ({"type": "object", "minProperties": 3}, "minProperties"),
        ({"not": {"pattern": "a"}}, "pattern"),
        ({"type": "number", "not": {"type": "integer"}}, "'type' 'integer' cannot be negated"),
        ({"oneOf": [{"$ref": "#"}, {"type": "null"}]}, "'$ref'"),
        ({"not": {"enum": ["a" * 3_000]}}, "'enum'"),
        (
            {"allOf": [{"patternProperties": {"^a": {"type": "null"}}}, {"additionalProperties": False}]},
            "'patternProperties'",
        ),
        ({"enum": ["a\u0000b"]}, "'enum', 'const': strings with control characters"),
        ({"required": [1]}, "'required'"),
        (False, "no value"),
        ({"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}, "no value"),
        ({"$ref": "#"}, "no value"),
        ({"type": "integer", "const": 1 << 60}, "'minimum', 'maximum': numbers beyond 2^53"),
        ({"minimum": 1e-12}, "'minimum', 'maximum': bounds"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(schema: object, word: str) -> None:
    with pytest.raises(ConstraintRefused, match=re.escape(word)):
        checked_schema(schema, "f")


@pytest.mark.parametrize(
    ("schema", "path", "reason"),
    [
        ({"enum": [1], "type": "string"}, "", "'enum', 'type': no value that ends"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "/properties/a", "'$ref': no value"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}}},
         "", "'$ref': no value that ends"),
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "/properties/a", "'uniqueItems' is"),
        ({"items": {"additionalProperties": {"multipleOf": 0.1}}}, "/items/additionalProperties", "'multipleOf' is"),
        ({"items": {"allOf": [{"anyOf": [{"minLength": n} for n in range(50)]} for _ in range(50)]}}, "/items/allOf",
         "'allOf' makes the schema too complex"),
    ],
)  # fmt: skip
def test_refusals_of_whole_schemas_name_place_and_keywords(schema: object, path: str, reason: str) -> None:
    with pytest.raises(ConstraintRefused) as caught:
        checked_schema(schema, "f")
    assert (caught.value.path, reason in caught.value.reason) == (path, True), str(caught.value)


def test_a_name_in_escapes_does_not_pass_for_an_additional_one() -> None:
    made = schema_matcher({"type": "object", "properties": {"a": {"type": "integer"}}})
    assert is_whole(made, '{"a":1}')
    assert not is_whole(made, '{"\\u0061":"x"}')


def test_an_integer_without_bounds_ends() -> None:
    made = schema_matcher({"type": "integer"})
    assert is_whole(made, str(1 << 53))
    assert is_whole(made, str(-(1 << 53)))
    assert not is_whole(made, "1" + "0" * 30)


def test_a_number_without_bounds_is_one_that_clients_can_read() -> None:
    made = schema_matcher({"type": "number"})
    assert is_whole(made, "-12.75")
    assert not is_whole(made, "-" + "9" * 400)


def test_white_space_is_bounded() -> None:
    made = schema_matcher({"type": "object", "required": ["a"]})
    assert is_whole(made, '{ "a" :\n 1\t}')
    assert not is_whole(made, '{   "a":1}')
    assert not is_whole(made, ' {"a":1}')


def test_an_answer_may_end_only_where_the_value_does() -> None:
    made = schema_matcher({"type": "object", "required": ["a"]})
    assert not is_whole(made, '{"a":1')
    assert not is_whole(made, '{"a":1}}')


def _deep(levels: int) -> object:
    schema: object = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


HOSTILE = {
    "1,000 levels": lambda: _deep(1_000),
    "a million entries": lambda: {"enum": list(range(1_000_000))},
    "4 MiB of names": lambda: {"properties": {f"name {at}": {} for at in range(200_000)}},
    "4 MiB of text": lambda: "[" * (4 << 20),
    "a long pattern": lambda: {"pattern": "a" * 100_000},
    "groups": lambda: {"pattern": "(" * 5_000 + ")" * 5_000},
    "anchors": lambda: {"pattern": "(^|a)(^|b)(^|c)(^|d)(^|e)(^|f)(^|g)(^|h)(^|i)(^|j)"},
    "products of unions": lambda: {"allOf": [{"anyOf": [{"minLength": n} for n in range(50)]} for _ in range(50)]},
    "complements": lambda: {
        "oneOf": [{"properties": {f"p{at}": {"enum": [f"v{k}" for k in range(20)]} for at in range(30)}} for _ in range(40)]
    },
    "a circle": lambda: {"allOf": [{"$ref": "#"}], "type": "object"},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_refused_at_once(name: str) -> None:
    with pytest.raises(ConstraintRefused):
        checked_schema(HOSTILE[name](), "f")


def test_references_that_double_at_each_step_cost_one_step_each() -> None:
    steps = {f"d{at}": {"allOf": [{"$ref": f"#/$defs/d{at + 1}"}] * 2} for at in range(40)}
    schema = {"$defs": steps | {"d40": {"type": "integer"}}, "$ref": "#/$defs/d0"}
    assert is_instance(schema_matcher(schema), 3)


def test_equal_schemas_are_written_alike() -> None:
    schema = {"$defs": {"a": {"properties": {"b": {"$ref": "#/$defs/a"}}}}, "$ref": "#/$defs/a"}
    assert checked_schema(schema, "f") == checked_schema(json.dumps(schema), "f")


def _walk(made: LLMatcher, seed: int) -> str | None:
    """A random answer that leans towards closing; None: it did not end in time."""
    chance, taken = random.Random(seed), bytearray()
    own, letters = made.deep_copy(), dict(sorted(_letters()))
    for _ in range(2_000):
        mask = own.compute_bitmask()
        allowed = [token for token in letters if mask[token // 8] >> token % 8 & 1]
        if own.is_accepting() and (not allowed or chance.random() < 0.5):
            return taken.decode()
        closing = [token for token in allowed if letters[token] in b'"}]']
        token = chance.choice(closing if closing and chance.random() < 0.7 else allowed)
        assert own.consume_token(token)
        taken.append(letters[token])
    return None


def _letters() -> Iterator[tuple[int, int]]:
    for byte in range(0x20, 0x7F):
        (token,) = byte_tokenizer(()).encode(chr(byte), add_special_tokens=False).ids
        yield token, byte


@pytest.mark.parametrize("name", [name for name in ENFORCED if name != "pattern anywhere"])  # chance does not write "cat"
def test_what_the_grammar_allows_is_valid(name: str) -> None:
    schema = ENFORCED[name][0]
    judge = jsonschema_rs.validator_for(schema)
    made = schema_matcher(schema)
    texts = [text for seed in range(3) if (text := _walk(made, seed)) is not None]
    assert texts, "no answer ended"
    assert [text for text in texts if not judge.is_valid(json.loads(text))] == []


def _source(schema: object) -> str:
    return LLMatcher.grammar_from_json_schema(
        json.dumps(checked_schema(schema, "f").written() | {"x-guidance": JSON_OPTIONS})
    )


def _served(rows: list[dict[str, Any]]) -> BackendCounts:
    """All that serving does with each schema, its instances and one random answer, with a token for each byte."""
    tokenizer = scripted_tokenizer()
    backend = ServedBackend(tokenizer, BYTE_VOCABULARY, BYTE_VOCABULARY - 1)
    walks = Walks(tokenizer, BYTE_VOCABULARY, BYTE_VOCABULARY - 1)
    return counted(*SERVED, rows, [measured(row, backend, tokenizer, walks, has_gate=True) for row in rows])


@pytest.mark.skipif(SCHEMAS_FILE is None, reason="BATON_JSON_SCHEMAS names no file of schemas")
def test_real_schemas_are_accepted_enforced_and_answered() -> None:
    with gzip.open(SCHEMAS_FILE or "") as lines:
        found = _served([json.loads(line) for line in lines])
    assert judged(found, has_floors=True) == []


@pytest.fixture
def suite_folder() -> Path:
    """Fetched by pip on first use, and kept in an ignored folder."""
    if SUITE is not None:
        return Path(SUITE)
    try:
        return suite()
    except NotReached as reason:
        pytest.skip(f"JSON-Schema-Test-Suite is not here and cannot be fetched: {str(reason).splitlines()[-1]}")


def test_no_required_test_of_the_suite_is_accepted_and_violated(suite_folder: Path) -> None:
    found = _served(list(suite_rows(suite_folder)))
    assert found.count == SUITE_SCHEMAS or SUITE is not None
    assert judged(found, has_floors=False) == []
    assert 0 < found.accepted < found.count


def test_a_schema_as_text_must_be_json() -> None:
    with pytest.raises(ConstraintRefused, match="not JSON"):
        checked_schema("{", "f")
    assert is_instance(matcher(_source('{"type": "null"}')), None)
    assert wanted(ConstraintKind.JSON_SCHEMA, {}).field == "field"
