"""Tiny random models of the families we serve, made on the spot in float64."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

VOCABULARY = 99
WINDOW = 9

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GEMMA = {"sliding_window": WINDOW, "query_pre_attn_scalar": 20}


def family_config(family: str) -> PretrainedConfig:
    match family:
        case "llama":
            return LlamaConfig(**SIZES)
        case "qwen3":
            return Qwen3Config(**SIZES)
        case "mistral":
            return MistralConfig(**SIZES, sliding_window=WINDOW)
        case "gemma2":
            return Gemma2Config(**SIZES, **GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=3.0)
        case "gemma3":
            return Gemma3TextConfig(
                **SIZES, **GEMMA, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
            )
        case _:
            raise ValueError(family)


FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "gemma3")


@dataclass(frozen=True)
class TinyModel:
    family: str
    folder: Path
    reference: PreTrainedModel

    def continuation(self, prompt: list[int], new_tokens: int) -> list[int]:
        """What `transformers` itself generates, greedily."""
        with torch.inference_mode():
            output = self.reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
            )
        return output[0, len(prompt) :].tolist()


def save_random(config: PretrainedConfig, folder: Path, seed: int = 0) -> None:
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.float64).save_pretrained(folder)


def make_model(family: str, folder: Path) -> TinyModel:
    save_random(family_config(family), folder)
    # soft-capping of scores exists only in the plain implementation
    implementation = "eager" if family == "gemma2" else "sdpa"
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation=implementation)
    return TinyModel(family, folder, reference)
