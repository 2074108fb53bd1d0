"""A tiny model answers schemas from a real server: what is counted, and what is a failure."""

from __future__ import annotations

import pytest

from benchmarks.tiny_answers import TinyAnswer, TinyAnswerCounts, counted, judged_answers, tiny_answers

ENDED = TinyAnswer("a", 200, "stop", 20, True)


def many(*others: TinyAnswer) -> TinyAnswerCounts:
    return counted([ENDED] * 95 + list(others))


def test_answers_are_counted_by_how_they_ended() -> None:
    found = many(TinyAnswer("b", 200, "length", 2000), TinyAnswer("c", 400), TinyAnswer("d", 200, "stop", 30))
    assert (found.accepted, found.refused, found.finished, found.median_tokens) == (97, 1, 96, 20.0)
    assert (found.cut, found.invalid, found.failed) == (["b"], ["d"], [])


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (TinyAnswer("b", 200, "stop", 30), "tiny model: 1 answers ended and are not valid (b)"),
        (TinyAnswer("b", 200, "error", 30), "tiny model: 1 answers failed (b)"),
        (TinyAnswer("b", 500), "tiny model: 1 answers failed (b)"),
    ],
)
def test_one_that_is_not_valid_or_failed_is_a_failure(answer: TinyAnswer, failure: str) -> None:
    assert judged_answers(many(answer), has_floor=True) == [failure]


def test_of_many_answers_nineteen_in_twenty_must_end() -> None:
    cut = TinyAnswer("b", 200, "length", 2000)
    assert judged_answers(many(*[cut] * 5), has_floor=True) == []
    found = judged_answers(many(*[cut] * 6), has_floor=True)
    assert found == ["tiny model: 95 of 101 answers ended, fewer than 95%"]
    assert judged_answers(many(*[cut] * 6), has_floor=False) == []


@pytest.mark.slow
def test_a_real_server_answers_what_it_accepts_and_the_answers_are_valid() -> None:
    person = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"type": "boolean"}}},
        "required": ["name", "tags"],
    }
    schemas = [person, {"enum": ["red", "green"]}, {"contains": {}}]
    found = tiny_answers([{"name": f"{at}", "schema": schema} for at, schema in enumerate(schemas)])
    assert (found.accepted, found.refused, found.finished) == (2, 1, 2)
    assert judged_answers(found, has_floor=True) == []
