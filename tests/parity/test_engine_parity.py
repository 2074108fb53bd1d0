"""The whole engine against `transformers.generate`, and against itself in other batches: in float64, and where the native
kernels add up every row in an order of its own, in bfloat16 and with quantised weights."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from transformers import LlamaConfig, LlamaForCausalLM

from baton.core.config import ReservePolicy, WorkerConfig
from baton.core.engine.request import FinishReason, Sampling, frozen_tokens
from baton.core.engine.worker import Deliver, Effect
from baton.executor.cpu.executor import TorchCpuExecutor
from tests.support.driver import Driver, submission

BLOCKS, SLOTS, CONTEXT = 96, 6, 256
VOCABULARY = 199


@dataclass(frozen=True)
class Model:
    folder: Path
    reference: LlamaForCausalLM
    dtype: str
    block_size: int
    quantization: str = "auto"

    def load(self, *, slots: int, blocks: int) -> TorchCpuExecutor:
        return TorchCpuExecutor.load(
            self.folder, dtype=self.dtype, slots=slots, block_size=self.block_size, blocks=blocks, context_tokens=CONTEXT,
            batch_invariant=True, quantization=self.quantization,
        )  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return made_model(tmp_path_factory.mktemp("float64"), "float64", hidden=48, heads=6, block_size=8)


@pytest.fixture(scope="module", params=["float64", "bfloat16", "int8", "int4"])
def exact_model(request: pytest.FixtureRequest, model: Model, tmp_path_factory: pytest.TempPathFactory) -> Model:
    if request.param == "float64":
        return model
    made = made_model(tmp_path_factory.mktemp(request.param), "bfloat16", hidden=128, heads=4, block_size=16)
    return made if request.param == "bfloat16" else dataclasses.replace(made, quantization=request.param)


def made_model(folder: Path, dtype: str, *, hidden: int, heads: int, block_size: int) -> Model:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=96, num_hidden_layers=3, num_attention_heads=heads,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, initializer_range=0.2, eos_token_id=None,
        bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    reference = LlamaForCausalLM(config).to(torch.float64).eval()
    reference.save_pretrained(folder)
    return Model(folder, reference, dtype, block_size)


@pytest.fixture(scope="module")
def executors(model: tuple[Path, LlamaForCausalLM]) -> Iterator[list[TorchCpuExecutor]]:
    made: list[TorchCpuExecutor] = []
    yield made
    for executor in made:
        executor.close()


def engine(model: Model, made: list[TorchCpuExecutor], step_tokens: int = 64, slots: int = SLOTS) -> Driver:
    return Driver(*engine_parts(model, made, step_tokens, slots))


def engine_parts(
    model: Model, made: list[TorchCpuExecutor], step_tokens: int = 64, slots: int = SLOTS
) -> tuple[WorkerConfig, TorchCpuExecutor]:
    executor = model.load(slots=slots, blocks=BLOCKS)
    made.append(executor)
    config = WorkerConfig(
        slots=slots, blocks=BLOCKS, block_size=model.block_size, context_tokens=CONTEXT, step_tokens=step_tokens, depth=2
    )
    return config, executor


def generate(reference: LlamaForCausalLM, prompt: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    whole = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return [int(token) for token in whole[0, len(prompt) :]]


def prompts() -> list[list[int]]:
    draws = random.Random(5)
    shared = [draws.randrange(VOCABULARY) for _ in range(40)]
    fresh = [[draws.randrange(VOCABULARY) for _ in range(draws.randrange(1, 70))] for _ in range(6)]
    return [*fresh, [*shared, 1, 2, 3], [*shared, 4], shared, shared[:16]]


@pytest.mark.parametrize("step_tokens", [7, 64, 256])
def test_greedy_equals_generate_batched_chunked_and_with_a_warm_cache(
    model: Model, executors: list[TorchCpuExecutor], step_tokens: int
) -> None:
    driver = engine(model, executors, step_tokens)
    expected = [generate(model.reference, prompt, 24) for prompt in prompts()]
    for warm in (False, True):
        serials = [driver.submit(submission(prompt, 24))[0] for prompt in prompts()]
        driver.run()
        assert [driver.outputs[serial] for serial in serials] == expected
        hits = [driver.ended[serial].cached_tokens for serial in serials]
        assert not warm or max(hits) >= 40


def test_seeded_sampling_gives_the_same_tokens_alone_and_in_any_batch(
    exact_model: Model, executors: list[TorchCpuExecutor]
) -> None:
    samplings = [
        Sampling(seed=11),
        Sampling(seed=12, temperature=0.7, top_k=20),
        Sampling(seed=13, temperature=1.3, top_p=0.8),
        Sampling(seed=14, min_p=0.05, presence_penalty=0.5, frequency_penalty=0.3),
        Sampling(seed=15, repetition_penalty=1.3, logit_bias=((7, 2.0),)),
        Sampling(seed=16, temperature=0.0, stop_token_ids=(3, 5), min_tokens=4),
    ]
    asks = [submission(prompt, 20, sampling=s) for prompt, s in zip(prompts(), samplings * 2, strict=False)]
    alone = []
    for ask in asks:
        driver = engine(exact_model, executors, slots=1)
        (serial,) = driver.submit(ask)
        driver.run()
        alone.append(driver.outputs[serial])
    for order in (asks, asks[::-1]):
        driver = engine(exact_model, executors, step_tokens=19)
        serials = [driver.submit(ask)[0] for ask in order]
        driver.run()
        together = [driver.outputs[serial] for serial in serials]
        assert together == (alone if order is asks else alone[::-1])


def test_choices_of_one_prompt_differ_from_each_other_and_equal_themselves_alone(
    exact_model: Model, executors: list[TorchCpuExecutor]
) -> None:
    prompt = prompts()[6]
    samplings = [Sampling(seed=9, choice=choice) for choice in range(3)]
    driver = engine(exact_model, executors)
    group = [submission(prompt, 16, name=f"{i}", sampling=s, leader="0" if i else None) for i, s in enumerate(samplings)]
    serials = driver.submit(*group)
    driver.run()
    together = [driver.outputs[serial] for serial in serials]
    assert len({tuple(tokens) for tokens in together}) == 3
    for sampling, tokens in zip(samplings, together, strict=True):
        lone = engine(exact_model, executors)
        (serial,) = lone.submit(submission(prompt, 16, sampling=sampling))
        lone.run()
        assert lone.outputs[serial] == tokens


class Listening(Driver):
    """Keeps the log-probabilities too."""

    def _take(self, effect: Effect) -> None:
        super()._take(effect)
        if isinstance(effect, Deliver):
            for line in effect.settled.logprobs:
                self.logprobs.setdefault(int(effect.settled.serials[line.row]), []).extend(line.chosen.tolist())

    @cached_property
    def logprobs(self) -> dict[int, list[float]]:
        return {}


def test_an_answer_cut_at_any_token_goes_on_exactly_with_sampling_penalties_and_log_probabilities(
    exact_model: Model, executors: list[TorchCpuExecutor]
) -> None:
    """Each choice of a body is cut where it likes, and found at another instance among the others that were."""
    prompt, tokens = prompts()[0], 14
    shaped = [
        Sampling(seed=4, repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.5, logprobs=2),
        Sampling(seed=4, choice=1, temperature=0.8, top_k=30, stop_token_ids=tuple(range(150)), min_tokens=9, logprobs=0),
    ]
    whole = Listening(*engine_parts(exact_model, executors))
    group = [submission(prompt, tokens, name=f"{n}", sampling=s, leader="0" if n else None) for n, s in enumerate(shaped)]
    serials = whole.submit(*group)
    whole.run()
    answers = [whole.outputs[serial] for serial in serials]
    assert len(answers[0]) == tokens > len(answers[1]) >= 10, "the second one ends with the first stop token it may draw"
    resumed = Listening(*engine_parts(exact_model, executors))
    asked = {}
    for cut in range(1, tokens):
        cuts = (cut, cut % (len(answers[1]) - 1))
        asked[cut] = (
            cuts,
            resumed.submit(
                *(
                    replace(item, generated=frozen_tokens(answer[:at]))
                    for item, answer, at in zip(group, answers, cuts, strict=True)
                )
            ),
        )
    resumed.run()
    for cuts, resumed_serials in asked.values():
        for serial, first, answer, at in zip(resumed_serials, serials, answers, cuts, strict=True):
            assert resumed.outputs[serial] == answer[at:]
            assert resumed.logprobs[serial] == pytest.approx(whole.logprobs[first][at:])
            assert resumed.ended[serial].reason is whole.ended[first].reason


def test_an_abort_in_flight_leaves_others_exact(model: Model, executors: list[TorchCpuExecutor]) -> None:
    driver = engine(model, executors, step_tokens=16)
    serials = [driver.submit(submission(prompt, 24))[0] for prompt in prompts()]
    for _ in range(6):
        driver.tick(), driver.tick(), driver.settle_one()
    driver.cancel(serials[0])
    driver.cancel(serials[3])
    driver.run()
    assert driver.ended[serials[0]].reason is FinishReason.ABORT
    for index in (1, 2, 4, 5, 6, 7, 8, 9):
        assert driver.outputs[serials[index]] == generate(model.reference, prompts()[index], 24)
    assert driver.worker.gauges().blocks.running == 0


@pytest.mark.parametrize("seeded", [False, True])
def test_preemption_on_a_pool_hardly_larger_than_one_request_changes_no_token(
    exact_model: Model, executors: list[TorchCpuExecutor], seeded: bool
) -> None:
    draws = random.Random(8)
    asks = [
        submission(
            [draws.randrange(VOCABULARY) for _ in range(draws.randrange(4, 40))],
            24,
            sampling=Sampling(seed=i) if seeded else None,
        )
        for i in range(64)
    ]
    largest = -(-(39 + 24) // exact_model.block_size)
    roomy, tight = (_pool_of(exact_model, executors, blocks) for blocks in (64 * largest, largest + 1))
    runs = []
    for driver in (roomy, tight):
        serials = [driver.submit(ask)[0] for ask in asks]
        driver.run()
        runs.append([driver.outputs[serial] for serial in serials])
        assert max(driver.ended[serial].bill.preemptions for serial in serials) <= 8
    gauges = tight.worker.gauges()
    assert gauges.preemptions_for_others + gauges.preemptions_of_self > 0
    assert runs[0] == runs[1]


def _pool_of(model: Model, made: list[TorchCpuExecutor], blocks: int) -> Driver:
    executor = model.load(slots=64, blocks=blocks)
    made.append(executor)
    return Driver(
        WorkerConfig(
            slots=64, blocks=blocks, block_size=model.block_size, context_tokens=CONTEXT, step_tokens=128,
            reserve=ReservePolicy.NONE,
        ),
        executor, audited=False,
    )  # fmt: skip
