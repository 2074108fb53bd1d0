"""What every backend for constraints must do. A new backend joins by one entry in BACKENDS."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from baton.executor.constraints.compiled_cache import CompiledConstraints
from baton.executor.constraints.contract import (
    ConstraintBackend,
    ConstraintError,
    Matcher,
    allowed_of,
    set_bits,
    words_of,
)
from baton.executor.constraints.llguidance_backend import LlguidanceBackend
from baton.executor.constraints.llguidance_grammars import matching_tokenizer
from baton.executor.constraints.scripted_backend import ScriptedBackend, ScriptedSource
from baton.executor.constraints.xgrammar_backend import XgrammarBackend
from baton.node.scripted_text import BYTE_VOCABULARY, byte_tokenizer

EOS = BYTE_VOCABULARY - 1
WIDE = 300
"""A model may have more logits than its tokenizer has tokens."""
SCHEMAS = (
    {"type": "object", "properties": {"name": {"enum": ["x", "yy"]}, "n": {"type": "integer"}}, "required": ["name"]},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    {"type": "string", "maxLength": 4},
)


@dataclass(frozen=True)
class Case:
    backend: ConstraintBackend
    sources: tuple[str, ...]
    vocabulary: int
    stops: tuple[int, ...]
    bad: str


@cache
def _llguidance() -> Case:
    made = [LLMatcher.grammar_from_json_schema(json.dumps(one), overrides={"whitespace_flexible": False}) for one in SCHEMAS]
    sources = (*made, LLMatcher.grammar_from_regex("(ab|c)*d?"), 'start: "a" [ "b" ] start?')
    backend = LlguidanceBackend(matching_tokenizer(byte_tokenizer(), WIDE, [EOS, 200]))
    return Case(backend, sources, WIDE, (EOS, 200), "start: }")


@cache
def _xgrammar() -> Case:
    sources = (*map(json.dumps, SCHEMAS), 'root ::= ("ab" | "c")* "d"?')
    return Case(XgrammarBackend(byte_tokenizer(), WIDE, [EOS]), sources, WIDE, (EOS,), "root ::= (")


@cache
def _scripted() -> Case:
    sources = tuple(ScriptedSource(seed, 32, (3, 7) if seed % 3 else ()).text() for seed in range(6))
    return Case(ScriptedBackend(), sources, 32, (3, 7), '{"seed": 1}')


BACKENDS: dict[str, Callable[[], Case]] = {"llguidance": _llguidance, "xgrammar": _xgrammar, "scripted": _scripted}


@pytest.fixture(params=BACKENDS.values(), ids=BACKENDS)
def case(request: pytest.FixtureRequest) -> Case:
    made: Case = request.param()
    return made


def allowed(matcher: Matcher, vocabulary: int) -> list[int]:
    words = np.full(words_of(vocabulary), 0xDEADBEEF, dtype=np.uint32)
    matcher.mask(words)
    return np.flatnonzero(allowed_of(words, vocabulary)).tolist()


def walk(case: Case, source: str, seed: int, steps: int) -> tuple[Matcher, list[int]]:
    """A matcher after random allowed tokens, up to the end of its answer."""
    draws, matcher, tokens = random.Random(seed), case.backend.compile(source).matcher(), list[int]()
    for _ in range(steps):
        tokens.append(draws.choice(allowed(matcher, case.vocabulary)))
        assert matcher.consume(tokens[-1])
        if tokens[-1] in case.stops:
            break
    return matcher, tokens


def test_a_backend_says_its_name_and_version(case: Case) -> None:
    assert case.backend.name
    assert case.backend.version


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), steps=st.integers(0, 25))
@pytest.mark.parametrize("name", BACKENDS)
def test_the_mask_is_exactly_what_can_be_consumed_anywhere_in_an_answer(name: str, seed: int, steps: int) -> None:
    case = BACKENDS[name]()
    matcher, _ = walk(case, case.sources[seed % len(case.sources)], seed, steps)
    may = allowed(matcher, case.vocabulary)
    assert may, "some token may always come"
    assert [token for token in range(case.vocabulary) if matcher.copy().consume(token)] == may
    assert allowed(matcher, case.vocabulary) == may, "copies and refused tokens changed nothing, and asking again is free"


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), steps=st.integers(1, 25))
@pytest.mark.parametrize("name", BACKENDS)
def test_a_matcher_follows_from_the_tokens_and_a_copy_goes_its_own_way(name: str, seed: int, steps: int) -> None:
    case = BACKENDS[name]()
    source = case.sources[seed % len(case.sources)]
    matcher, tokens = walk(case, source, seed, steps)
    again = case.backend.compile(source).matcher()
    assert all(again.consume(token) for token in tokens)
    assert allowed(again, case.vocabulary) == allowed(matcher, case.vocabulary)
    before, other = allowed(matcher, case.vocabulary), matcher.copy()
    assert other.consume(before[seed % len(before)])
    assert allowed(matcher, case.vocabulary) == before


def test_a_refused_token_changes_nothing(case: Case) -> None:
    matcher, _ = walk(case, case.sources[0], 1, 3)
    before = allowed(matcher, case.vocabulary)
    refused = next(token for token in range(case.vocabulary) if token not in before)
    assert not matcher.consume(refused)
    assert not matcher.consume(refused)
    assert allowed(matcher, case.vocabulary) == before
    assert matcher.consume(before[0])


def test_an_ended_matcher_allows_only_stop_tokens_and_can_be_asked_again(case: Case) -> None:
    ended = 0
    for seed in range(40):
        matcher, tokens = walk(case, case.sources[1], seed, 60)
        if tokens and tokens[-1] in case.stops:
            ended += 1
            for _ in range(2):
                assert allowed(matcher, case.vocabulary) == sorted(case.stops)
                assert matcher.is_stopped
                assert matcher.consume(case.stops[0])
                assert not matcher.consume(1)
            assert matcher.copy().forced_tokens() == []
    assert ended > 3


def test_forced_tokens_are_allowed_one_after_the_other(case: Case) -> None:
    forced = 0
    for seed in range(30):
        matcher, _ = walk(case, case.sources[seed % len(case.sources)], seed, seed % 7)
        for token in matcher.forced_tokens():
            forced += 1
            assert token in allowed(matcher, case.vocabulary)
            assert matcher.consume(token)
    assert forced > 2 or case.backend.name == "xgrammar"


def test_what_does_not_compile_is_a_constraint_error(case: Case) -> None:
    with pytest.raises(ConstraintError):
        case.backend.compile(case.bad)


def test_outputs_that_do_not_fit_are_a_constraint_error(case: Case) -> None:
    from baton.core.engine.request import Constraint, frozen_tokens

    compiled = CompiledConstraints([case.backend])
    constraint = Constraint(case.backend.name, case.backend.version, case.sources[0])
    _, tokens = walk(case, case.sources[0], 1, 3)
    assert allowed(compiled.matcher(constraint, frozen_tokens(tokens)), case.vocabulary)
    first = allowed(compiled.matcher(constraint, frozen_tokens([])), case.vocabulary)
    refused = next(token for token in range(case.vocabulary) if token not in first)
    with pytest.raises(ConstraintError, match="output 0 of 1"):
        compiled.matcher(constraint, frozen_tokens([refused]))


def test_a_matcher_at_its_limits_says_so_and_never_allows_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from llguidance import LLParserLimits

    from baton.executor.constraints import llguidance_grammars

    tight = LLParserLimits(step_lexer_fuel=1, step_max_items=1, max_lexer_states=4, verbose_errors=False)
    monkeypatch.setattr(llguidance_grammars, "parser_limits", lambda: tight)
    case = _llguidance()
    with pytest.raises(ConstraintError):
        walk(case, case.sources[0], 1, 60)


def test_the_least_used_constraints_are_compiled_again() -> None:
    compiled = list[str]()

    class Counting(ScriptedBackend):
        def compile(self, source: str):  # type: ignore[no-untyped-def]
            compiled.append(source)
            return super().compile(source)

    from baton.core.engine.request import NO_TOKENS, Constraint

    cache_of_two = CompiledConstraints([Counting()], compiled_max=2)
    made = [Constraint("scripted", "1", ScriptedSource(seed, 8).text()) for seed in range(3)]
    for nth in (0, 1, 0, 2, 0, 1):
        cache_of_two.matcher(made[nth], NO_TOKENS)
    assert [made[nth].source for nth in (0, 1, 2, 1)] == compiled


@pytest.mark.parametrize("tokens", [(), (0,), (31, 32), (299, 1, 64)])
def test_words_hold_the_tokens_that_were_set(tokens: tuple[int, ...]) -> None:
    words = np.full(words_of(WIDE), 7, dtype=np.uint32)
    set_bits(words, tokens)
    assert np.flatnonzero(allowed_of(words, WIDE)).tolist() == sorted(tokens)
