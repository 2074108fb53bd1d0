"""Which constraints chaos sends, and when it says that an answer satisfies one."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from rich.console import Console

from baton.bench import chaos_constraints
from baton.bench.chaos import ChaosReport, ChaosTally
from baton.bench.chaos_cases import CHAT, ChaosCase, draw_cases
from baton.bench.chaos_constraints import (
    AnswerConstraint,
    ChaosConstraintKind,
    ConstraintCounts,
    ConstraintVerdict,
    SeenCall,
    draw_constraint,
    judged,
)
from baton.bench.chaos_request import SeenAnswer, differences
from baton.bench.chaos_table import show
from baton.bench.stats import describe
from tests.bench.test_chaos import DONE, answered, chunk, usage

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
JSON = AnswerConstraint(ChaosConstraintKind.SCHEMA, schema=SCHEMA)
REGEX = AnswerConstraint(ChaosConstraintKind.REGEX, pattern="a+")
CHOICE = AnswerConstraint(ChaosConstraintKind.CHOICE, texts=("red", "green"))
CALL = AnswerConstraint(ChaosConstraintKind.CALL, schema=SCHEMA)
RIGHT_CALL = SeenCall("look_up", '{"a": 1}')


# ── what is sent ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_quarter_of_the_requests_carries_a_constraint_of_each_kind() -> None:
    cases = draw_cases(32, 3, "m")
    kinds = Counter(case.constraint.kind for case in cases if case.constraint is not None)
    assert kinds == dict.fromkeys(ChaosConstraintKind, 2)


def test_no_request_has_fields_that_are_refused_beside_a_constraint() -> None:
    for case in draw_cases(400, 3, "m"):
        if case.constraint is not None:
            assert not {"ignore_eos", "min_tokens", "stop"} & set(case.body)
            assert not case.wants_stop
            assert case.constraint.kind is not ChaosConstraintKind.CALL or case.path == CHAT


@pytest.mark.parametrize(
    ("constraint", "is_chat", "field"),
    [
        (JSON, True, "response_format"),
        (JSON, False, "structured_outputs"),
        (REGEX, True, "structured_outputs"),
        (CHOICE, False, "structured_outputs"),
        (CALL, True, "tool_choice"),
    ],
)
def test_the_body_asks_for_what_is_judged(constraint: AnswerConstraint, is_chat: bool, field: str) -> None:
    asked = constraint.fields(is_chat)
    assert field in asked
    wanted = constraint.schema or constraint.pattern or list(constraint.texts)
    assert msgspec.json.encode(wanted) in msgspec.json.encode(asked)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_drawn_can_be_judged(seed: int) -> None:
    draws = random.Random(seed)
    for kind in ChaosConstraintKind:
        drawn = draw_constraint(kind, draws, lambda chars: "x" * chars + " ")
        if drawn.schema is not None:
            jsonschema_rs.validator_for(dict(drawn.schema))
        re.compile(drawn.pattern)
        assert len(set(drawn.texts)) == len(drawn.texts)


# ── what is judged ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("constraint", "finish", "text", "calls"),
    [
        (JSON, "stop", '{"a": 1}', []),
        (REGEX, "stop", "aaa", []),
        (CHOICE, "stop", "green", []),
        (CALL, "tool_calls", "", [RIGHT_CALL]),
    ],
)
def test_an_answer_that_matches_satisfies_its_constraint(
    constraint: AnswerConstraint, finish: str, text: str, calls: list[SeenCall]
) -> None:
    assert judged(constraint, finish, text, calls).verdict is ConstraintVerdict.SATISFIED


@pytest.mark.parametrize(
    ("constraint", "finish", "text", "calls", "why"),
    [
        (JSON, "stop", '{"a": "1"}', [], "not valid for its schema"),
        (JSON, "stop", '{"a": 1, "b": 2}', [], "not valid for its schema"),
        (JSON, "stop", '{"a": 1', [], "is no JSON"),
        (JSON, "stop", "", [], "is no JSON"),
        (JSON, "stop", '{"a": 1}', [RIGHT_CALL], "none was asked for"),
        (JSON, "tool_calls", '{"a": 1}', [], "finish reason tool_calls"),
        (REGEX, "stop", "aab", [], "does not match"),
        (REGEX, "stop", "aa\n", [], "does not match"),
        (CHOICE, "stop", "gree", [], "none of the 2 choices"),
        (CALL, "stop", "", [RIGHT_CALL], "finish reason stop"),
        (CALL, "tool_calls", "", [], "0 tool calls"),
        (CALL, "tool_calls", "", [RIGHT_CALL, RIGHT_CALL], "2 tool calls"),
        (CALL, "tool_calls", "well,", [RIGHT_CALL], "well,"),
        (CALL, "tool_calls", "", [SeenCall("other", '{"a": 1}')], "a call of 'other'"),
        (CALL, "tool_calls", "", [SeenCall("look_up", '{"a": null}')], "not valid for its schema"),
        (CALL, "tool_calls", "", [SeenCall("look_up", '{"a": ')], "is no JSON"),
    ],
)
def test_an_answer_that_ended_and_does_not_match_is_broken(
    constraint: AnswerConstraint, finish: str, text: str, calls: list[SeenCall], why: str
) -> None:
    found = judged(constraint, finish, text, calls)
    assert found.verdict is ConstraintVerdict.BROKEN
    assert why in found.why


def test_an_answer_that_was_cut_is_not_judged() -> None:
    assert judged(JSON, "length", '{"a"', []).verdict is ConstraintVerdict.CUT


def test_without_a_judge_of_schemas_nothing_is_said_to_be_satisfied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos_constraints, "schema_judge", lambda: None)
    assert judged(JSON, "stop", '{"a": 1}', []).verdict is ConstraintVerdict.UNKNOWN
    assert judged(JSON, "stop", "no JSON", []).verdict is ConstraintVerdict.BROKEN
    assert judged(REGEX, "stop", "aaa", []).verdict is ConstraintVerdict.SATISFIED


# ── answers as they come ─────────────────────────────────────────────────────────────────────────────────────────────────


def case_of(constraint: AnswerConstraint) -> ChaosCase:
    return ChaosCase(3, CHAT, {"stream": True}, constraint=constraint)


def piece(index: int, **function: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, "function": function}]}


async def called(*pieces: dict[str, Any], finish: str = "tool_calls") -> SeenAnswer:
    """What a client makes of a stream of tool calls."""
    chunks = [chunk(ids=(number,), delta=one) for number, one in enumerate(pieces)]
    end = chunk(finish=finish, delta={})
    return await answered(*chunks, end, usage(len(pieces)), DONE, case=case_of(CALL))


async def test_a_call_is_put_together_from_its_pieces() -> None:
    answer = await called(piece(0, name="look_up", arguments=""), piece(0, arguments='{"a":'), piece(0, arguments=" 1}"))
    assert answer.parts[0].calls == [RIGHT_CALL]
    assert [one.verdict for one in answer.judgements(case_of(CALL))] == [ConstraintVerdict.SATISFIED]


async def test_a_call_with_other_arguments_is_a_difference() -> None:
    one = await called(piece(0, name="look_up", arguments='{"a": 1}'))
    other = await called(piece(0, name="look_up", arguments='{"a": 2}'))
    assert any("tool calls" in what for what in differences(one, other))
    assert differences(one, one) == []


async def test_a_piece_of_a_call_that_never_began_is_a_fault() -> None:
    assert "call 1 came before call 0" in str((await called(piece(1, arguments="{}"))).fault)


async def test_the_calls_of_a_whole_answer_are_read() -> None:
    message = {"content": None, "tool_calls": [{"function": {"name": "look_up", "arguments": '{"a": 1}'}}]}
    choice = {"index": 0, "message": message, "token_ids": [1], "finish_reason": "tool_calls"}
    counts = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    body = msgspec.json.encode({"choices": [choice], "usage": counts})
    answer = await answered(body, case=ChaosCase(0, CHAT, {}, constraint=CALL))
    assert answer.parts[0].calls == [RIGHT_CALL]


# ── the report ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def tallied(text: str) -> ChaosTally:
    answer = await answered(chunk(text=text, ids=(1,), finish="stop"), usage(1, attempts=2), DONE)
    tally = ChaosTally()
    tally.add(case_of(REGEX), answer, [])
    return tally


def report_of(counts: ConstraintCounts, gaps_s: Sequence[float] = (), gap_s_max: float | None = None) -> ChaosReport:
    return ChaosReport(
        faults={}, asked_for=0, requests=1, least_requests=1, streamed=1, moved=1, moves=1, differences=[],
        constrained=counts, gaps_s=describe(gaps_s), moved_gaps_s=None, gaps_by_kind_s={}, held={}, false=[],
        cut_short=None, took_s=1.0, gap_s_max=gap_s_max,
    )  # fmt: skip


def printed(report: ChaosReport) -> str:
    console = Console(width=120, no_color=True)
    with console.capture() as capture:
        show(console, report)
    return capture.get()


async def test_satisfied_answers_are_counted_with_their_moves() -> None:
    report = report_of((await tallied("aaa")).constrained)
    assert report.is_clean
    assert report.constrained.requests == {"regex": 1}
    assert report.constrained.moved == 1
    assert report.constrained.verdicts == {"satisfied": 1}
    assert "1 (1 regex)" in printed(report)


async def test_an_answer_that_breaks_its_constraint_fails_the_run_though_it_is_the_same_as_before() -> None:
    report = report_of((await tallied("aab")).constrained)
    assert not report.is_clean
    assert f"constraint of case 3 ({CHAT}): 'aab' does not match a+" in printed(report)


def test_gaps_are_judged_where_they_have_a_limit() -> None:
    gaps_s, counts = [0.1] * 50 + [2.0] * 50, ConstraintCounts()
    assert report_of(counts, gaps_s).is_clean
    assert report_of(counts, gaps_s, gap_s_max=2.0).is_clean
    long = report_of(counts, gaps_s, gap_s_max=1.5)
    assert not long.is_clean
    assert "longest gap of a stream: 2.00 s (p99), limit 1.5 s" in printed(long)
    assert not report_of(counts, gap_s_max=1.5).is_clean, "nothing was measured"
