"""Answers of a tiny float64 model that thinks: a budget bounds the reasoning, what follows matches, and an answer continues
after any token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import jsonschema_rs
import pytest
from msgspec.structs import replace
from transformers import LlamaConfig

from baton.api.constraint_jobs import ConstraintJob
from baton.api.constraints.wanted import ConstraintKind
from baton.api.engine import TokenBurst
from baton.api.model_text import load_text
from baton.api.parsers import thinking
from baton.api.parsers.choosing import AnswerFormat, ReasoningParserChoice
from baton.api.parsers.parts import WholeAnswerParts
from baton.api.text_reader import ChoiceReader
from baton.core.engine.request import Constraint, FinishReason, Sampling, Submission, frozen_tokens
from baton.executor.drafts import NgramProposer
from baton.node.constraint_messages import GrammarCompiled
from baton.node.constraint_worker import ConstraintChecker
from baton.node.scripted_text import write_byte_tokenizer
from tests.support.constrained import BACKENDS, EOS, ask, engine
from tests.support.guessing import Listening
from tests.support.tiny import SIZES, save_random

OPEN, CLOSE = EOS + 1, EOS + 2
"""The tokens of the markers."""
BUDGET = 12
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["colour", "age"],
    "additionalProperties": False,
}
INSIDE = pytest.mark.parametrize("begins_inside", [True, False], ids=["begun by the prompt", "begun by the model"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("thinking")
    save_random(LlamaConfig(**SIZES | {"vocab_size": CLOSE + 1}), path)
    write_byte_tokenizer(path)
    file = path / "tokenizer.json"
    written = json.loads(file.read_text())
    for token, text in ((OPEN, thinking.OPEN), (CLOSE, thinking.CLOSE)):
        written["added_tokens"].append({**written["added_tokens"][0], "id": token, "content": text})
    file.write_text(json.dumps(written))
    return path


@pytest.fixture(scope="module", params=[0, 8], ids=["one token a step", "forced tokens drafted"])
def driver(folder: Path, request: pytest.FixtureRequest) -> Iterator[Listening]:
    drafts = {"proposer": NgramProposer(drafts=4, ngram_min=1, ngram_max=3), "burst": 3} if request.param else {}
    made = engine(folder, constrained_burst=request.param, **drafts)  # type: ignore[arg-type]
    yield made
    made.executor.close()


def asks(folder: Path, begins_inside: bool) -> list[Submission]:
    """One that thinks as long as it may, and others that are led to end it sooner or later."""
    job = ConstraintJob(
        kind=ConstraintKind.JSON_SCHEMA, value=SCHEMA, field="f", reasoning_parser=ReasoningParserChoice.THINK,
        begins_inside_reasoning=begins_inside, thinking_tokens_max=BUDGET,
    )  # fmt: skip
    compiled = ConstraintChecker(folder).answer(job.encode())
    assert isinstance(compiled, GrammarCompiled)
    constraint = Constraint(*BACKENDS[0], compiled.source)
    return [
        ask(
            "Which colour?",
            Sampling(seed=seed, temperature=0.9, stop_token_ids=(EOS,), constraint=constraint, logit_bias=bias),
            96,
            request_id=str(seed),
        )
        for seed, bias in enumerate([((OPEN, 50.0),), ((OPEN, 50.0), (CLOSE, 3.0)), ((OPEN, 50.0), (CLOSE, 4.0)), ()])
    ]  # fmt: skip


def answers(driver: Listening, group: list[Submission]) -> list[tuple[list[int], FinishReason]]:
    serials = [driver.submit(item)[0] for item in group]
    driver.run()
    assert driver.worker.scheduler.broken_rows == 0
    return [(driver.outputs[serial], driver.ended[serial].reason) for serial in serials]


def read(folder: Path, tokens: list[int], begins_inside: bool) -> tuple[WholeAnswerParts, int | None]:
    """What a client is shown, and the tokens of reasoning that it is told of."""
    text, form = load_text(folder), AnswerFormat(reasoning=ReasoningParserChoice.THINK)
    shown = form.markers(has_tools=False)
    reader = ChoiceReader(
        0, text.detokenizer(shown=shown), None, {EOS}, parser=form.parser({}, begins_inside),
        reasoning=form.reasoning_counter(text.detokenizer(shown=shown), begins_inside),
    )  # fmt: skip
    delta = reader.read(TokenBurst(tuple(tokens), (), None))
    return WholeAnswerParts(list(delta.parts or ())), reader.reasoning_tokens


@INSIDE
def test_reasoning_stays_within_its_budget_and_what_follows_matches(
    folder: Path, driver: Listening, begins_inside: bool
) -> None:
    lengths = []
    for tokens, reason in answers(driver, asks(folder, begins_inside)):
        assert reason is FinishReason.STOP
        parts, counted = read(folder, tokens, begins_inside)
        jsonschema_rs.validate(SCHEMA, json.loads(parts.content))
        thought = tokens[0 if begins_inside else 1 : tokens.index(CLOSE)] if CLOSE in tokens else None
        if thought is None:
            assert not begins_inside
            assert (parts.reasoning, counted) == ("", 0)
            continue
        assert counted == tokens.index(CLOSE) + 1
        lengths.append(len(thought))
    assert max(lengths) == BUDGET, "one is cut by its budget"
    assert min(lengths) < BUDGET, "another ends its reasoning itself"


@INSIDE
def test_an_answer_that_thinks_continues_after_any_number_of_delivered_tokens(
    folder: Path, driver: Listening, begins_inside: bool
) -> None:
    group = asks(folder, begins_inside)[:2]
    for (tokens, reason), item in zip(answers(driver, group), group, strict=True):
        cuts = range(1, len(tokens))
        found = answers(driver, [replace(item, generated=frozen_tokens(tokens[:cut])) for cut in cuts])
        assert [(tokens[:cut] + rest, end) for cut, (rest, end) in zip(cuts, found, strict=True)] == [
            (tokens, reason)
        ] * len(cuts)
