"""Reads a model folder into memory and learns what its attention layers need. Only safetensors; never a model hub.

Order of refusal: the configuration first, then the class, both before weights are read; last a dry forward of a few tokens,
which shows the arguments that layers really pass.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from baton.executor.attention import ATTENTION_NAME, AttentionContext, Discovery, register_attention
from baton.executor.kv import LayerSpec
from baton.executor.support import UnsupportedModel, check_config, text_config

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

DRY_TOKENS = 3


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: PreTrainedModel
    layers: list[LayerSpec]
    dtype: torch.dtype
    vocabulary: int
    context_tokens: int
    """The most positions the model was made for."""


def load_model(path: Path, dtype: str) -> LoadedModel:
    if dtype not in DTYPES:
        raise UnsupportedModel(str(path), f"the number format {dtype!r} (known: {', '.join(DTYPES)})")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    check_config(config)
    register_attention()
    model = AutoModelForCausalLM.from_pretrained(
        path,
        config=config,
        dtype=DTYPES[dtype],
        attn_implementation=ATTENTION_NAME,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
    )
    model.requires_grad_(False)
    model.train(False)
    return _describe(model, config, DTYPES[dtype])


def _describe(model: PreTrainedModel, config: PretrainedConfig, dtype: torch.dtype) -> LoadedModel:
    decoder = text_config(config)
    return LoadedModel(
        model=model,
        layers=discover_layers(model, int(decoder.num_hidden_layers)),
        dtype=dtype,
        vocabulary=int(decoder.vocab_size),
        context_tokens=int(decoder.max_position_embeddings),
    )


def discover_layers(model: PreTrainedModel, expected: int) -> list[LayerSpec]:
    """Run a few tokens through the model and write down what each attention layer asked for."""
    name = str(model.config.model_type)
    discovery = Discovery(name)
    with torch.inference_mode():
        model(
            input_ids=torch.zeros(1, DRY_TOKENS, dtype=torch.int64),
            position_ids=torch.arange(DRY_TOKENS)[None],
            attention_mask=torch.ones(1, DRY_TOKENS, dtype=torch.int64),
            use_cache=False,
            paged=discovery,
        )
    if sorted(discovery.layers) != list(range(expected)):
        raise UnsupportedModel(name, f"layers without attention ({len(discovery.layers)} of {expected} have it)")
    return [discovery.layers[index] for index in range(expected)]


def forward(
    model: PreTrainedModel,
    ids: torch.Tensor,
    positions: torch.Tensor,
    logit_rows: torch.Tensor | int,
    context: AttentionContext,
) -> torch.Tensor:
    """Logits of the wanted rows, [rows, vocabulary]; of all where 0 is given."""
    output = model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=logit_rows, paged=context)
    logits: torch.Tensor = output.logits[0]
    return logits
