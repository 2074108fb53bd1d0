"""The embedded model in float32 against `transformers.generate`: differences only where that is undecided."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from baton.executor.cpu.executor import TorchCpuExecutor
from baton.node.models import resolve_model
from baton.node.stage_progress import StageNames
from tests.support.planner import Planner

pytestmark = pytest.mark.smollm2

NEW_TOKENS = 24
UNDECIDED = 1e-4
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "Write one sentence about the sea, and then one about mountains and the weather there in winter.",
    "2 + 2 =",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model("smollm2", StageNames(print), as_safetensors=True)


@pytest.fixture(scope="module")
def kept() -> Path:
    """With the weights of its file as they are."""
    return resolve_model("smollm2", StageNames(print))


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [tokenizer.apply_chat_template(each, add_generation_prompt=True, return_dict=False) for each in messages]


@pytest.fixture(scope="module")
def reference(folder: Path, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """For each prompt its greedy continuation, and the gap between the two best logits at every token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for prompt in prompts:
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = [step[0].topk(2).values for step in out.logits]
        answers.append((out.sequences[0, len(prompt) :].tolist(), [float(pair[0] - pair[1]) for pair in best]))
    return answers


@pytest.mark.parametrize("attention", ["native", "gather"])
def test_greedy_tokens_agree_with_transformers(
    folder: Path, prompts: list[list[int]], reference: list[tuple[list[int], list[float]]], attention: str
) -> None:
    executor = TorchCpuExecutor.load(folder, dtype="float32", slots=4, blocks=40, attention=attention)
    driver = Planner(executor, chunk_tokens=19)
    for prompt in prompts:
        driver.add(prompt, NEW_TOKENS)
    outputs = driver.run()
    executor.close()
    ties = 0
    for given, (wanted, gaps) in zip(outputs, reference, strict=True):
        first = next((at for at, pair in enumerate(zip(given, wanted, strict=True)) if pair[0] != pair[1]), None)
        if first is not None:
            ties += 1
            assert gaps[first] < UNDECIDED, f"token {first}: {given[first]} for {wanted[first]}, gap {gaps[first]}"
    print(f"{attention}: {len(prompts)} prompts of {NEW_TOKENS} tokens, {ties} left the reference at a tie")


def test_bfloat16_knows_the_capital_of_france(folder: Path, prompts: list[list[int]]) -> None:
    assert "Paris" in answered(TorchCpuExecutor.load(folder, dtype="bfloat16", slots=1, blocks=8), folder, prompts[0])


def test_with_the_weights_of_its_file_it_knows_it_too(folder: Path, kept: Path, prompts: list[list[int]]) -> None:
    executor = TorchCpuExecutor.load(kept, dtype="bfloat16", slots=1, blocks=8)
    assert executor.details == "CPU, batch-invariant, weights in Q4_1 and Q8_0"
    assert "Paris" in answered(executor, folder, prompts[0])


def answered(executor: TorchCpuExecutor, folder: Path, prompt: list[int]) -> str:
    driver = Planner(executor)
    driver.add(prompt, 8)
    (output,) = driver.run()
    executor.close()
    return str(AutoTokenizer.from_pretrained(folder).decode(output))


def test_the_converted_model_has_its_chat_template_and_its_end_of_text(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == 2
    assert '"eos_token_id": [\n    2\n  ]' in (folder / "generation_config.json").read_text()
