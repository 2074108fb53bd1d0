"""Hostile schemas: what is sent is as large and as deep as its name says, and late answers are complained of."""

from __future__ import annotations

import json

from msgspec.structs import replace

from benchmarks.hostile_schemas import BODY_BYTES, KINDS, SchemaFigures, body_of, judged

GOOD = SchemaFigures("kind", 100, (400, 400), ("a", "a"), 1.9, 1.6, 90.0, 30.0)


def test_bodies_are_on_both_sides_of_the_limit() -> None:
    assert BODY_BYTES - 64 * 1024 < len(body_of(KINDS["body of 4 MiB"](1))) <= BODY_BYTES
    assert len(body_of(KINDS["body beyond 4 MiB"](1))) > BODY_BYTES


def test_a_second_schema_of_a_kind_is_another_one() -> None:
    for kind, made in KINDS.items():
        assert body_of(made(1)) != body_of(made(2)), kind


def test_a_million_entries_fit_into_a_body() -> None:
    body = body_of(KINDS["10^6 enum entries"](1))
    assert len(json.loads(body)["guided_json"]["enum"]) == 10**6 + 1
    assert len(body) < BODY_BYTES


def test_late_answers_and_errors_of_the_server_are_failures() -> None:
    assert judged(GOOD) == []
    assert judged(replace(GOOD, cold_s=2.1)) == ["kind: 2.10 s cold, limit 2"]
    assert judged(replace(GOOD, statuses=(400, 500))) == ["kind: status 500"]


def test_too_much_memory_is_a_failure() -> None:
    assert judged(replace(GOOD, front_end_mib=400.0, compiler_mib=640.0)) == []
    assert judged(replace(GOOD, front_end_mib=401.0)) == ["kind: the front end held 401 MiB, limit 400"]
    assert judged(replace(GOOD, compiler_mib=641.0)) == ["kind: the compiler held 641 MiB, limit 640"]
