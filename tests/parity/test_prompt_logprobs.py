"""Log-probabilities of prompts against transformers' own: in chunks, in batches, after preemptions, from warm caches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM, PreTrainedModel

from baton.core.config import WorkerConfig
from baton.core.engine.request import PromptLogprobs, Sampling, frozen_tokens
from baton.core.engine.worker import Deliver, Effect
from baton.executor import prompt_scores
from baton.executor.cpu.executor import TorchCpuExecutor
from tests.support.driver import Driver, submission
from tests.support.tiny import family_config, save_random

BLOCK_SIZE = 8
ASKED = 3
Make = Callable[..., "Scored"]


class Scored(Driver):
    """Keeps the log-probabilities of prompts too."""

    def _take(self, effect: Effect) -> None:
        super()._take(effect)
        if isinstance(effect, Deliver):
            for part in effect.settled.prompt_logprobs:
                serial = int(effect.settled.serials[part.row])
                self._parts.append((serial, part))

    def parts_of(self, serial: int) -> list[PromptLogprobs]:
        return [part for of, part in self._parts if of == serial]

    @cached_property
    def _parts(self) -> list[tuple[int, PromptLogprobs]]:
        return []


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_random(family_config(request.param), path)
    return path


@pytest.fixture
def make(folder: Path) -> Iterator[Make]:
    made: list[TorchCpuExecutor] = []

    def build(step_tokens: int = 64, blocks: int = 96, slots: int = 6) -> Scored:
        executor = TorchCpuExecutor.load(
            folder, dtype="float64", slots=slots, block_size=BLOCK_SIZE, blocks=blocks, context_tokens=96
        )
        made.append(executor)
        config = WorkerConfig(
            slots=slots, blocks=blocks, block_size=BLOCK_SIZE, context_tokens=96, step_tokens=step_tokens, depth=2
        )
        return Scored(config, executor)

    yield build
    for executor in made:
        executor.close()


@cache
def model_of(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()


def reference(folder: Path, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.log_softmax(model_of(folder)(torch.tensor([prompt])).logits[0], dim=-1)


def prompts() -> list[list[int]]:
    draws = random.Random(4)
    shared = [draws.randrange(90) for _ in range(24)]
    return [[*shared, 1, 2, 3], shared, [7], [draws.randrange(90) for _ in range(50)], [*shared, 9]]


def check(folder: Path, prompt: list[int], parts: list[PromptLogprobs]) -> None:
    wanted = reference(folder, prompt)[:-1]
    positions = [position for part in parts for position in range(part.begin, part.end)]
    assert positions == list(range(1, len(prompt))), "each position once, in order"
    if not parts:
        return
    named = torch.tensor(prompt[1:]).unsqueeze(1)
    chosen = wanted.gather(1, named)
    ranks = (wanted > chosen).sum(dim=1) + 1
    top = wanted.sort(dim=1, descending=True, stable=True)
    np.testing.assert_allclose(np.concatenate([part.chosen for part in parts]), chosen[:, 0].numpy(), atol=1e-6)
    np.testing.assert_allclose(np.concatenate([part.top for part in parts]), top.values[:, :ASKED].numpy(), atol=1e-6)
    assert np.concatenate([part.ranks for part in parts]).tolist() == ranks.tolist()
    assert np.concatenate([part.top_ids for part in parts]).tolist() == top.indices[:, :ASKED].tolist()


@pytest.mark.parametrize("step_tokens", [7, 64])
def test_they_are_those_of_transformers_in_any_chunks_and_from_a_warm_cache(
    folder: Path, make: Make, monkeypatch: pytest.MonkeyPatch, step_tokens: int
) -> None:
    monkeypatch.setattr(prompt_scores, "PIECE_ELEMENTS", 600)  # a few rows at a time
    driver = make(step_tokens)
    for _ in range(2):
        asks = [
            submission(prompt, 4, sampling=Sampling(seed=1, temperature=0.0, prompt_logprobs=ASKED)) for prompt in prompts()
        ]
        serials = [driver.submit(ask)[0] for ask in asks]
        driver.run()
        for serial, prompt in zip(serials, prompts(), strict=True):
            check(folder, prompt, driver.parts_of(serial))
            assert driver.ended[serial].cached_tokens == 0
            assert len(driver.outputs[serial]) == 4


def test_others_use_what_such_a_request_has_computed(make: Make) -> None:
    driver = make()
    prompt = prompts()[3]
    driver.submit(submission(prompt, 2, sampling=Sampling(seed=1, prompt_logprobs=0)))
    driver.run()
    (serial,) = driver.submit(submission(prompt, 2))
    driver.run()
    assert driver.ended[serial].cached_tokens >= 40


def test_after_a_preemption_they_do_not_come_again(folder: Path, make: Make) -> None:
    driver = make(step_tokens=16, blocks=8)
    draws = random.Random(8)
    asked = [[draws.randrange(90) for _ in range(draws.randrange(4, 40))] for _ in range(8)]
    sampling = Sampling(seed=1, prompt_logprobs=ASKED)
    serials = [driver.submit(submission(prompt, 16, sampling=sampling))[0] for prompt in asked]
    driver.run()
    gauges = driver.worker.gauges()
    assert gauges.preemptions_for_others + gauges.preemptions_of_self > 0
    for serial, prompt in zip(serials, asked, strict=True):
        check(folder, prompt, driver.parts_of(serial))


def test_a_request_with_outputs_has_reported_them_before(make: Make) -> None:
    driver = make()
    ask = submission(prompts()[0], 6, sampling=Sampling(seed=1, prompt_logprobs=2))
    (serial,) = driver.submit(replace(ask, generated=frozen_tokens([5, 6])))
    driver.run()
    assert len(driver.outputs[serial]) == 4
    assert driver.parts_of(serial) == []
