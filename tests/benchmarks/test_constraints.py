"""Schemas as they are served: what is counted of each, and what is a failure."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from baton.api.constraints.schema_writer import OPEN_NAMES_MAX
from baton.executor.constraints import llguidance_grammars
from baton.node.scripted_text import BYTE_VOCABULARY, byte_tokenizer
from benchmarks.constraint_backends import ServedBackend, Walks, measured
from benchmarks.constraints import SERVED, BackendCounts, counted, judged

EOS = BYTE_VOCABULARY - 1
PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
WIDE = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(OPEN_NAMES_MAX)}},
}


def found(schema: object, *instances: tuple[object, bool]) -> dict[str, Any]:
    tokenizer = byte_tokenizer()
    backend, walks = ServedBackend(tokenizer, BYTE_VOCABULARY, EOS), Walks(tokenizer, BYTE_VOCABULARY, EOS)
    row = {"name": "x", "schema": schema, "tests": [{"data": data, "valid": is_valid} for data, is_valid in instances]}
    return measured(row, backend, tokenizer, walks, has_gate=True)


def test_instances_and_an_answer_are_judged_as_served() -> None:
    result = found(PERSON, ({"name": "a"}, True), ({"name": 1}, False), ({"a": 1, "name": "b"}, True))
    assert (result["valid"], result["invalid"], result["wrong_accepts"], result["failed"]) == (2, 1, 0, 0)
    assert result["wrong_rejects"] == 1, "names come in another order"
    assert (result["is_finished"], result["is_invalid"]) == (True, False)


def test_a_matcher_that_gives_up_behind_the_gate_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = [{"p0": "a"}], True
    assert found(WIDE, instance)["failed"] == 0
    monkeypatch.setattr(llguidance_grammars, "ROW_ITEMS_MAX", 500)
    monkeypatch.setattr(ServedBackend, "check", lambda self, schema: None)
    assert found(WIDE, instance)["failed"] > 0


def test_the_trial_is_part_of_what_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llguidance_grammars, "ROW_ITEMS_MAX", 500)
    assert "too many alternatives" in found(WIDE)["not_compiled"]


GOOD: dict[str, Any] = {
    "compile_us": 1.0, "gate_us": 1.0, "mask_us": [], "valid": 1, "invalid": 1, "wrong_accepts": 0, "wrong_rejects": 0,
    "failed": 0, "is_finished": True, "is_invalid": False,
}  # fmt: skip


def counts(**changes: Any) -> BackendCounts:
    return counted(*SERVED, [{"name": "a"}], [{**GOOD, **changes}])


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, None),
        ({"wrong_accepts": 1}, "wrong accepts"),
        ({"failed": 1}, "gave up (a)"),
        ({"is_invalid": True}, "not valid (a)"),
        ({"is_finished": False}, "fewer than 95%"),
        ({"mask_us": [1.0] * 98 + [1_001.0] * 2}, "more than 1,000"),
        ({"mask_us": [1.0] * 98 + [999.0] * 2}, None),
    ],
)
def test_what_is_a_failure(changes: dict[str, Any], word: str | None) -> None:
    failures = judged(counts(**changes), has_floors=True)
    assert len(failures) == (word is not None)
    assert word is None or word in failures[0]


def refusals(*reasons: str) -> BackendCounts:
    rows = [{"name": "a"}] * 100
    return counted(*SERVED, rows, [{"refused": reason} for reason in reasons] + [GOOD] * (100 - len(reasons)))


def test_a_refusal_that_names_no_keyword_is_a_failure() -> None:
    assert judged(refusals("'not' makes the schema too complex", "'$ref' leads nowhere"), has_floors=True) == []
    (failure,) = judged(refusals("'uniqueItems' is not supported", "no 'such' word"), has_floors=True)
    assert failure == "1 refusals that name no keyword (a: no 'such' word)"


def test_of_many_schemas_nine_in_ten_must_be_accepted() -> None:
    some = replace(counts(), count=100, accepted=89, finished=89)
    assert judged(some, has_floors=True) == ["89 of 100 schemas accepted, fewer than 90%"]
    assert judged(some, has_floors=False) == []
    assert judged(replace(some, accepted=90, finished=86), has_floors=True) == []
