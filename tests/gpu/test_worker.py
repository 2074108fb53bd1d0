"""A worker with the executor on a device: whatever is done to a request, its tokens are those of an undisturbed run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from baton.core.config import ReservePolicy, WorkerConfig
from baton.core.engine.request import FinishReason, Sampling
from baton.executor.contract import Executor
from baton.executor.drafts import DraftProposer, NaiveProposer, NgramProposer
from tests.support.driver import Driver, shape_of, submission
from tests.support.on_cuda import assert_alike, closing, on_cpu, on_cuda

pytestmark = pytest.mark.cuda

NAME = "tiny-qwen3"
CALM = WorkerConfig(
    slots=8, blocks=256, block_size=16, context_tokens=256, step_tokens=512, depth=1, prefix_cache=False,
    reserve=ReservePolicy.NONE,
)  # fmt: skip
NGRAMS = NgramProposer(drafts=3, ngram_min=1, ngram_max=3)
WISHES = (
    Sampling(seed=0, temperature=0.0),
    Sampling(seed=1, temperature=0.9),
    Sampling(seed=2, temperature=1.0, top_p=0.9),
    Sampling(seed=3, temperature=0.8, top_k=12, min_p=0.01),
    Sampling(seed=4, temperature=0.7, repetition_penalty=1.2, frequency_penalty=0.3),
    Sampling(seed=5, temperature=0.0, logit_bias=((7, 3.0),), presence_penalty=0.5),
    Sampling(seed=6, temperature=0.0),
)
SHARED = np.random.default_rng(9).integers(0, 320, 48).tolist()
"""What all prompts begin with: three whole blocks."""
PROMPTS = [[*SHARED, *np.random.default_rng(seed).integers(0, 320, 5 + 11 * seed).tolist()] for seed in range(len(WISHES))]
NEW_TOKENS = 40
PRECISIONS = ("float32", "bfloat16, batch-invariant")

SCENES: dict[str, tuple[WorkerConfig, DraftProposer]] = {
    "all at once": (replace(CALM, depth=2), NaiveProposer()),
    "chunked": (replace(CALM, step_tokens=24, depth=3), NaiveProposer()),
    "prefix cache": (replace(CALM, prefix_cache=True, depth=2), NaiveProposer()),
    "preempted": (replace(CALM, blocks=24, depth=2), NaiveProposer()),
    "preempted in chunks, with a prefix cache": (
        replace(CALM, blocks=24, step_tokens=32, depth=3, prefix_cache=True),
        NaiveProposer(),
    ),
    "drafts": (replace(CALM, burst=4, depth=2), NGRAMS),
    "drafts, preempted": (replace(CALM, blocks=24, burst=4, step_tokens=64, depth=2, prefix_cache=True), NGRAMS),
    "naive drafts": (replace(CALM, burst=4, depth=2), NaiveProposer()),
}


def build(config: WorkerConfig, precision: str, proposer: DraftProposer) -> Executor:
    if precision == "float32":
        return on_cuda(NAME, shape_of(config), proposer=proposer)
    return on_cuda(NAME, shape_of(config), "bfloat16", invariant=True, proposer=proposer)


def ask_all(driver: Driver) -> list[int]:
    return [
        serial
        for number, (prompt, wish) in enumerate(zip(PROMPTS, WISHES, strict=True))
        for serial in driver.submit(submission(prompt, NEW_TOKENS, name=f"r{number}", sampling=wish))
    ]


def one_by_one(executor: Executor) -> list[list[int]]:
    driver, answers = Driver(CALM, executor), []
    for prompt, wish in zip(PROMPTS, WISHES, strict=True):
        (serial,) = driver.submit(submission(prompt, NEW_TOKENS, sampling=wish))
        driver.run()
        answers.append(driver.outputs[serial])
    return answers


@cache
def undisturbed(precision: str) -> list[list[int]]:
    """Each request alone, in one chunk, without drafts."""
    with closing(build(CALM, precision, NaiveProposer())) as executor:
        return one_by_one(executor)


def test_float32_tokens_on_the_device_are_those_of_the_cpu(tmp_path: Path) -> None:
    with closing(on_cpu(NAME, shape_of(CALM), tmp_path)) as executor:
        assert_alike(undisturbed("float32"), one_by_one(executor))


def happened(driver: Driver, scene: str) -> bool:
    """Whether what a scene is about took place."""
    gauges = driver.worker.gauges()
    claims: dict[str, Callable[[], bool]] = {
        "chunked": lambda: sum(len(launch.plan.chunks) for launch in driver.plans) > 2 * len(PROMPTS),
        "prefix": lambda: any(ended.cached_tokens for ended in driver.ended.values()),
        "preempted": lambda: gauges.preemptions_for_others + gauges.preemptions_of_self > 0,
        "drafts": lambda: driver.worker.scheduler.drafts().accepted > 0 or scene.startswith("naive"),
    }
    return all(holds() for word, holds in claims.items() if word in scene)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("scene", SCENES)
def test_tokens_are_those_of_an_undisturbed_run(scene: str, precision: str) -> None:
    config, proposer = SCENES[scene]
    with closing(build(config, precision, proposer)) as executor:
        driver = Driver(config, executor)
        serials = ask_all(driver)
        driver.run()
        if config.prefix_cache:  # what was computed for the first is there for the second
            serials = ask_all(driver)
            driver.run()
    assert_alike([driver.outputs[serial] for serial in serials], undisturbed(precision), scene)
    assert {ended.reason for ended in driver.ended.values()} == {FinishReason.LENGTH}
    assert happened(driver, scene), f"this was no test of {scene}: {driver.worker.gauges()}"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("proposer", [NaiveProposer(), NGRAMS], ids=str)
def test_those_that_stay_notice_nothing_of_those_that_leave(precision: str, proposer: DraftProposer) -> None:
    config = replace(CALM, blocks=64, burst=4 if proposer is NGRAMS else 1, depth=2)
    with closing(build(config, precision, proposer)) as executor:
        driver = Driver(config, executor)
        serials = ask_all(driver)
        for turn in range(40):
            driver.tick() if driver.is_due else driver.settle_one()
            if turn in (9, 20, 33):
                driver.cancel(serials[turn % 3])
        again = driver.submit(submission(PROMPTS[0], NEW_TOKENS, sampling=WISHES[0]))  # into a slot that was left
        driver.run()
    wanted = undisturbed(precision)
    for number, serial in enumerate(serials):
        given = driver.outputs[serial]
        assert_alike([given], [wanted[number][: len(given)]], f"request {number}")
        if driver.ended[serial].reason is not FinishReason.ABORT:
            assert len(given) == NEW_TOKENS
    assert_alike([driver.outputs[again[0]]], [wanted[0]], "the one that came later")
    assert FinishReason.ABORT in {ended.reason for ended in driver.ended.values()}


def test_a_slot_forgets_the_wishes_of_its_last_occupant_with_drafts_too() -> None:
    config = replace(CALM, slots=2, blocks=64, burst=4, depth=2)
    with closing(build(config, "float32", NGRAMS)) as executor:
        driver = Driver(config, executor)
        serials = ask_all(driver)
        driver.run()
    assert_alike([driver.outputs[serial] for serial in serials], undisturbed("float32"))
