"""Decoding with drafts: the tokens of decoding without, whatever is guessed, sampled, reused, preempted or aborted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.core.engine.request import FinishReason, Sampling, Serial, Submission
from baton.executor.drafts import DraftProposer, NaiveProposer, NgramProposer
from tests.support.driver import submission
from tests.support.guessing import Listening, Oracle, drafting
from tests.support.tiny import FAMILIES, VOCABULARY, TinyModel, make_model

TOKENS = 24
NGRAMS = NgramProposer(drafts=4, ngram_min=1, ngram_max=3)

SAMPLINGS = [
    Sampling(seed=0, temperature=0.0),
    Sampling(seed=1, temperature=0.9, top_p=0.6),
    Sampling(seed=2, temperature=0.3, top_p=0.95, logprobs=3),
    Sampling(seed=3, temperature=0.7, top_k=5),
    Sampling(seed=4, min_p=0.1, presence_penalty=0.7, frequency_penalty=0.4, logprobs=0),
    Sampling(seed=5, temperature=0.0, repetition_penalty=1.2, logprobs=2),
    Sampling(seed=6, temperature=0.5, logit_bias=((7, 4.0), (9, -100.0)), top_p=0.8),
    Sampling(seed=7, temperature=0.6, stop_token_ids=tuple(range(0, VOCABULARY, 5)), min_tokens=6, logprobs=1),
    Sampling(seed=8, temperature=0.0, stop_token_ids=tuple(range(1, VOCABULARY, 9)), min_tokens=3),
    Sampling(seed=9, temperature=0.2, repetition_penalty=0.8, frequency_penalty=-0.5),
    Sampling(seed=10, temperature=0.8, top_k=30, top_p=0.5, min_p=0.05),
]
"""Greedy and drawn, with every cut, penalties of both signs, bias, banned and allowed stops, with and without reports."""


def asks() -> list[Submission]:
    draws = random.Random(11)
    prompts = [[draws.randrange(VOCABULARY) for _ in range(draws.randrange(1, 30))] * (1 + nth % 2) for nth in range(22)]
    return [submission(prompt, TOKENS, sampling=wish) for prompt, wish in zip(prompts, SAMPLINGS * 2, strict=True)]


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    reason: FinishReason
    counted: int
    logprobs: list[float]


Make = Callable[..., Listening]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama")).folder


@pytest.fixture
def make(folder: Path) -> Iterator[Make]:
    made: list[Listening] = []

    def build(proposer: DraftProposer | None, **choices: object) -> Listening:
        made.append(drafting(folder, proposer, **choices))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for driver in made:
        driver.executor.close()


def answers(driver: Listening, group: list[Submission]) -> list[Answer]:
    serials = [driver.submit(ask)[0] for ask in group]
    driver.run()
    return [answer(driver, serial) for serial in serials]


def answer(driver: Listening, serial: Serial) -> Answer:
    end = driver.ended[serial]
    return Answer(driver.outputs[serial], end.reason, end.generated_tokens, driver.logprobs.get(serial, []))


def same(found: list[Answer], wanted: list[Answer]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one.tokens, one.reason, one.counted) == (other.tokens, other.reason, other.counted)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def wholes(group: list[Submission], found: list[Answer]) -> list[list[int]]:
    return [[*ask.prompt.tolist(), *one.tokens] for ask, one in zip(group, found, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_mixed_wishes_in_slots_that_are_reused_get_the_tokens_of_decoding_without_drafts(make: Make, depth: int) -> None:
    group = asks()
    wanted = answers(make(None), group)
    assert {one.reason for one in wanted} == {FinishReason.STOP, FinishReason.LENGTH}
    known = wholes(group, wanted)
    for proposer in (NGRAMS, Oracle(known, 4), Oracle(known, 4, lies=3), NaiveProposer()):
        driver = make(proposer, depth=depth)
        same(answers(driver, group), wanted)
        drafts = driver.worker.scheduler.drafts()
        assert 0 <= drafts.accepted <= drafts.fed
        assert (drafts.fed == 0) is isinstance(proposer, NaiveProposer)
        assert (drafts.accepted == 0) is isinstance(proposer, NaiveProposer)
        assert driver.worker.scheduler.broken_rows == 0


def test_drafts_that_are_all_right_take_as_few_steps_as_they_fill(make: Make) -> None:
    ask = submission([3, 1, 4, 1, 5], 20)
    (wanted,) = answers(make(None), [ask])
    driver = make(Oracle(wholes([ask], [wanted]), 4), depth=1)
    same(answers(driver, [ask]), [wanted])
    assert sum(len(launch.plan.decode_slots) for launch in driver.plans) == 4  # 1 token by the prefill, then 5 + 5 + 5 + 4
    drafts = driver.worker.scheduler.drafts()
    assert (drafts.fed, drafts.accepted) == (15, 15)


def test_a_rejected_draft_changes_nothing_neither_in_the_cache(make: Make) -> None:
    ask = submission(list(range(30)), TOKENS)
    (wanted,) = answers(make(None), [ask])
    driver = make(Oracle(wholes([ask], [wanted]), 4, lies=1), depth=1)
    same(answers(driver, [ask]), [wanted])
    drafts = driver.worker.scheduler.drafts()
    assert drafts.accepted == 0 < drafts.fed
    longer = submission([*range(30), *wanted.tokens], TOKENS)
    cold = answers(make(None), [longer])
    same(answers(driver, [longer]), cold)
    (serial,) = (serial for serial in driver.ended if driver.ended[serial].cached_tokens)
    assert driver.ended[serial].cached_tokens == 48, "what was generated is in the cache too, but for the last block"


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_go_through_every_kind_of_attention(tmp_path: Path, family: str) -> None:
    model: TinyModel = make_model(family, tmp_path)
    prompts = [[5, 6, 7, 8, 9, 10, 11], [3], list(range(20, 45)), [1, 2] * 8]
    group = [submission(prompt, 16) for prompt in prompts]
    wanted = [model.continuation(prompt, 16) for prompt in prompts]
    known = [[*prompt, *more] for prompt, more in zip(prompts, wanted, strict=True)]
    for proposer in (NGRAMS, Oracle(known, 4, lies=4)):
        driver = drafting(model.folder, proposer)
        assert [one.tokens for one in answers(driver, group)] == wanted
        driver.executor.close()


def test_native_attention_takes_drafts_too(make: Make) -> None:
    group = [submission([5, 6, 7] * 6, TOKENS), submission(list(range(40)), TOKENS), submission([9], TOKENS)]
    sizes = {"dtype": "float32", "attention": "native", "block_size": 16}
    wanted = answers(make(None, **sizes), group)
    driver = make(Oracle(wholes(group, wanted), 4, lies=5), **sizes)
    same(answers(driver, group), wanted)
    assert driver.worker.scheduler.drafts().accepted > 0


@pytest.mark.parametrize("proposer", [NGRAMS, None], ids=["n-grams", "oracle"])
def test_preemption_in_the_middle_of_accepted_runs_changes_no_token(make: Make, proposer: DraftProposer | None) -> None:
    group = asks()
    wanted = answers(make(None), group)
    driver = make(proposer or Oracle(wholes(group, wanted), 4, lies=7), slots=8, blocks=13, context_tokens=104)
    same(answers(driver, group), wanted)
    gauges = driver.worker.gauges()
    assert gauges.preemptions_for_others + gauges.preemptions_of_self > 0
    assert driver.worker.scheduler.drafts().accepted > 0
    assert driver.worker.scheduler.broken_rows == 0


def test_an_abort_with_drafts_in_flight_leaves_the_others_exact(make: Make) -> None:
    group = asks()
    wanted = answers(make(None), group)
    driver = make(Oracle(wholes(group, wanted), 4, lies=6), step_tokens=24)
    serials = [driver.submit(ask)[0] for ask in group]
    for _ in range(5):
        driver.tick(), driver.tick(), driver.settle_one()
    gone = [serial for serial in serials[:3] if serial not in driver.ended]
    assert gone
    for serial in gone:
        driver.cancel(serial)
    driver.run()
    for serial, whole in zip(serials, wanted, strict=True):
        if serial in gone:
            assert driver.ended[serial].reason is FinishReason.ABORT
            assert driver.outputs[serial] == whole.tokens[: len(driver.outputs[serial])]
        else:
            same([answer(driver, serial)], [whole])
    assert driver.worker.gauges().blocks.running == 0


def test_an_answer_cut_at_any_token_goes_on_with_drafts_as_it_would_have(make: Make) -> None:
    """Penalties, bans and log-probabilities are those of the whole answer, not of the leg."""
    ask = submission([3, 1, 4, 1, 5, 9, 2, 6], TOKENS, sampling=SAMPLINGS[4])
    (wanted,) = answers(make(None), [ask])
    driver = make(Oracle(wholes([ask], [wanted]), 4, lies=5))
    for cut in range(1, TOKENS):
        rest = submission(ask.prompt.tolist(), TOKENS, sampling=SAMPLINGS[4], generated=wanted.tokens[:cut])
        (serial,) = driver.submit(rest)
        driver.run()
        assert driver.outputs[serial] == wanted.tokens[cut:]
        assert driver.logprobs[serial] == pytest.approx(wanted.logprobs[cut:], abs=1e-5)
