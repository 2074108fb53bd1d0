"""Constrained answers of a tiny float64 model: the same tokens however they are batched, drafted or preempted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jsonschema_rs
import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from baton.bench.tiny_model import make_tiny
from baton.core.engine.plan import Int32s
from baton.core.engine.request import FinishReason, Sampling, Serial, Submission
from baton.executor.constraints.llguidance_grammars import matching_tokenizer
from baton.executor.constraints.slot_matchers import Bools, SlotMatchers
from baton.executor.drafts import NgramProposer
from baton.node.scripted_text import BYTE_VOCABULARY
from tests.support.constrained import EOS, PERSON, TOKENIZER, ask, engine, ids_of, regex, schema, text_of
from tests.support.guessing import Listening

NGRAMS = NgramProposer(drafts=4, ngram_min=1, ngram_max=3)
CONSTRAINT = schema(PERSON)
WISHES = [
    Sampling(seed=1, temperature=0.0, stop_token_ids=(EOS,), constraint=CONSTRAINT),
    Sampling(seed=2, temperature=0.8, stop_token_ids=(EOS,), constraint=CONSTRAINT),
    Sampling(seed=3, temperature=0.7, top_p=0.8, stop_token_ids=(EOS,), constraint=regex(r"(ab|cd){2,9}x?[0-9]{3}")),
    Sampling(seed=4, temperature=1.0, top_k=5, presence_penalty=0.9, stop_token_ids=(EOS,), constraint=CONSTRAINT),
    Sampling(seed=5, temperature=0.9),
    Sampling(seed=6, temperature=0.5, stop_token_ids=(EOS,), constraint=CONSTRAINT, bad_words=((ids_of("7")[0],),)),
    Sampling(seed=7, temperature=0.5, min_p=0.01, stop_token_ids=(EOS,), constraint=CONSTRAINT, logprobs=2),
    Sampling(seed=8, temperature=0.9, allowed_token_ids=tuple(ids_of("abcdefgh"))),
    Sampling(seed=9, temperature=0.7, bad_words=(tuple(ids_of("ab")), tuple(ids_of("e")))),
]
PROMPTS = ["Once", "a person: ", "abcdabcd", "tell me", "x", "yy", "a longer prompt than the others have", "ab", "cd"]

Make = Callable[..., Listening]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bytes")
    make_tiny(path, 256)
    return path


@pytest.fixture
def make(folder: Path) -> Iterator[Make]:
    made: list[Listening] = []

    def build(**choices: object) -> Listening:
        made.append(engine(folder, **choices))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for driver in made:
        driver.executor.close()


def asks() -> list[Submission]:
    return [
        ask(prompt, wish, 110, request_id=str(nth)) for nth, (prompt, wish) in enumerate(zip(PROMPTS, WISHES, strict=True))
    ]


def answers(driver: Listening, group: Sequence[Submission]) -> list[tuple[list[int], FinishReason]]:
    serials = [driver.submit(item)[0] for item in group]
    driver.run()
    assert driver.worker.scheduler.broken_rows == 0
    return [(driver.outputs[serial], driver.ended[serial].reason) for serial in serials]


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> list[tuple[list[int], FinishReason]]:
    """Each alone, one token a step."""
    driver = engine(folder, slots=1, depth=1)
    found = [answers(driver, [item])[0] for item in asks()]
    driver.executor.close()
    return found


def test_an_answer_that_ends_by_itself_satisfies_its_schema(undisturbed: list[tuple[list[int], FinishReason]]) -> None:
    ended = 0
    for (tokens, reason), wish in zip(undisturbed, WISHES, strict=True):
        if wish.constraint is CONSTRAINT and reason is FinishReason.STOP:
            jsonschema_rs.validate(PERSON, json.loads(text_of(tokens)))
            ended += 1
    assert ended >= 3


def test_a_greedy_answer_is_the_best_allowed_token_of_the_plain_model_at_each_place(
    folder: Path, undisturbed: list[tuple[list[int], FinishReason]]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    matcher = LLMatcher(matching_tokenizer(TOKENIZER, BYTE_VOCABULARY, [EOS]), CONSTRAINT.source)
    tokens = ids_of(PROMPTS[0])
    wanted, _ = undisturbed[0]
    for token in wanted:
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0, -1]
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = torch.from_numpy(bits[:BYTE_VOCABULARY].astype(bool))
        best = int(logits.masked_fill(~allowed, -torch.inf).argmax())
        assert best == token
        if best != EOS:
            assert matcher.consume_token(best)
        tokens.append(best)


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"depth": 3, "step_tokens": 7},
        {"proposer": NGRAMS, "burst": 5},
        {"constrained_burst": 8},
        {"proposer": NGRAMS, "burst": 3, "constrained_burst": 8, "depth": 3},
        {"blocks": 22},
        {"blocks": 22, "constrained_burst": 8, "depth": 3, "proposer": NGRAMS, "burst": 5},
    ],
    ids=["batched", "chunked", "drafted", "forced", "forced and drafted", "preempted", "preempted and drafted"],
)
def test_constrained_answers_do_not_depend_on_how_they_are_computed(
    make: Make, undisturbed: list[tuple[list[int], FinishReason]], choices: dict[str, object]
) -> None:
    driver = make(**choices)
    assert answers(driver, asks()) == undisturbed
    gauges = driver.worker.gauges()
    if "blocks" in choices:
        assert gauges.preemptions > 0, "this is about preemptions"


@pytest.mark.parametrize(
    "choices",
    [{}, {"proposer": NGRAMS, "burst": 3, "constrained_burst": 8, "depth": 3}, {"blocks": 22, "constrained_burst": 8}],
    ids=["batched", "forced and drafted", "preempted"],
)
def test_constrained_answers_do_not_depend_on_which_masks_are_late(
    make: Make,
    undisturbed: list[tuple[list[int], FinishReason]],
    choices: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draws = np.random.default_rng(7)

    def late(self: SlotMatchers, slots: Int32s, patient: Bools, **_: object) -> Bools:
        return self.held[slots] & patient & (draws.random(len(slots)) < 0.4)

    monkeypatch.setattr(SlotMatchers, "late", late)
    driver = make(**choices)
    assert answers(driver, asks()) == undisturbed
    assert driver.worker.gauges().sat_out_rows > 20


@pytest.mark.parametrize("constrained_burst", [0, 8])
def test_an_answer_continues_after_any_number_of_delivered_tokens(
    make: Make, undisturbed: list[tuple[list[int], FinishReason]], constrained_burst: int
) -> None:
    driver = make(constrained_burst=constrained_burst)
    for nth in (0, 1, 3):
        (tokens, reason), item = undisturbed[nth], asks()[nth]
        cuts = range(1, len(tokens), 17)
        group = [replace(item, generated=np.array(tokens[:cut], dtype=np.int32)) for cut in cuts]
        found = answers(driver, group)
        assert [(tokens[:cut] + rest, end) for cut, (rest, end) in zip(cuts, found, strict=True)] == [
            (tokens, reason)
        ] * len(cuts)


def test_forced_tokens_save_steps_without_speculation(make: Make, undisturbed: list[tuple[list[int], FinishReason]]) -> None:
    plain, forcing = make(depth=1), make(constrained_burst=8, depth=1)
    for driver in (plain, forcing):
        assert answers(driver, [asks()[1]]) == [undisturbed[1]]
    steps, saved = len(plain.plans), len(plain.plans) - len(forcing.plans)
    print(f"steps with one token each {steps}, with forced tokens {steps - saved}")
    assert saved > 0.3 * steps
    drafts = forcing.worker.scheduler.drafts()
    assert drafts.accepted > 20


def test_the_slot_of_a_constrained_answer_is_free_again(
    make: Make, undisturbed: list[tuple[list[int], FinishReason]]
) -> None:
    driver = make(slots=1, depth=1)
    for nth in (2, 4, 2, 8):
        assert answers(driver, [asks()[nth]]) == [undisturbed[nth]]


def test_a_matcher_that_gives_up_ends_its_own_request_only(
    make: Make, undisturbed: list[tuple[list[int], FinishReason]]
) -> None:
    driver = make()
    group = asks()[:2]
    broken = replace(group[0], sampling=replace(WISHES[0], constraint=replace(CONSTRAINT, source="{no grammar")))
    found = answers(driver, [broken, *group])
    assert found[0] == ([], FinishReason.CONSTRAINT_FAILED)
    assert found[1:] == undisturbed[:2]


def test_outputs_that_the_grammar_does_not_allow_end_in_the_same_way(make: Make) -> None:
    strange = replace(asks()[0], generated=np.array(ids_of("]]]"), dtype=np.int32))
    assert answers(make(), [strange]) == [([], FinishReason.CONSTRAINT_FAILED)]


def test_nothing_is_drawn_where_nothing_is_permitted(make: Make) -> None:
    brace = tuple(ids_of("{"))
    wish = replace(WISHES[1], bad_words=(brace,))
    assert answers(make(), [ask("x", wish)]) == [([], FinishReason.CONSTRAINT_FAILED)]


@pytest.mark.parametrize(
    ("backends", "code"), [((), "constraint_unsupported"), ((("llguidance", "0.0"),), "constraint_version")]
)
def test_an_engine_without_the_backend_refuses_and_another_version_takes_only_beginnings(
    make: Make, backends: tuple[tuple[str, str], ...], code: str
) -> None:
    driver = make(backends=backends)
    begun = replace(asks()[0], generated=np.array(ids_of('{"'), dtype=np.int32), request_id="begun")
    assert driver.submit(begun) == ()
    assert driver.refusals[-1].code == code
    serials: tuple[Serial, ...] = driver.submit(asks()[0])
    assert bool(serials) == bool(backends)
