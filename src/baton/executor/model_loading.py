"""Reads a model folder into memory and learns what its attention layers need. Only safetensors; never a model hub.

A folder that stands for a shape has no weights to read: they are drawn, straight into the device's memory.

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

from baton.executor.dummy_weights import draw_weights
from baton.executor.fingerprint import model_mark
from baton.executor.kv_pool import LayerSpec
from baton.executor.model_shapes import ModelShape, shape_fields, shape_in, shape_mark
from baton.executor.model_support import UnsupportedModel, check_config, optional_attribute, text_config
from baton.executor.paged_attention import ATTENTION_NAME, AttentionContext, LayerDiscovery, register_attention

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
    mark: bytes
    """What the fingerprints of all who serve this model begin with; see `fingerprint`."""


def load_model(path: Path, dtype: str, device: str = "cpu") -> LoadedModel:
    shape = shape_in(path)
    if shape is not None:
        return load_shape(shape.name, dtype, device, shape.seed)
    number_format = _number_format(str(path), dtype)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    check_config(config)
    register_attention()
    model = AutoModelForCausalLM.from_pretrained(
        path,
        config=config,
        dtype=number_format,
        attn_implementation=ATTENTION_NAME,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        **_experts(config, number_format),
    )
    model.to(device)  # type: ignore[arg-type]  # it takes what any module takes
    return _describe(model, config, number_format, model_mark(path))


def load_shape(name: str, dtype: str, device: str = "cpu", seed: int = 0) -> LoadedModel:
    """A model of that shape with weights drawn from the seed; see `shapes`."""
    number_format = _number_format(name, dtype)
    config = shape_config(name)
    check_config(config)
    register_attention()
    with torch.device(device):  # every tensor is made where it stays: nothing as large is ever copied
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=number_format, attn_implementation=ATTENTION_NAME, **_experts(config, number_format)
        )
    draw_weights(model, seed)
    return _describe(model, config, number_format, shape_mark(ModelShape(name, seed)))


def shape_config(name: str) -> PretrainedConfig:
    fields = dict(shape_fields(name))
    return AutoConfig.for_model(str(fields.pop("model_type")), **fields)


def _experts(config: PretrainedConfig, dtype: torch.dtype) -> dict[str, str]:
    """How a model computes its experts, where what it would choose cannot."""
    has_experts = optional_attribute(text_config(config), "num_experts", None) is not None
    return {"experts_implementation": "eager"} if has_experts and dtype is torch.float64 else {}


def _number_format(model: str, dtype: str) -> torch.dtype:
    if dtype not in DTYPES:
        raise UnsupportedModel(model, f"the number format {dtype!r} (known: {', '.join(DTYPES)})")
    return DTYPES[dtype]


def _describe(model: PreTrainedModel, config: PretrainedConfig, dtype: torch.dtype, mark: bytes) -> LoadedModel:
    model.requires_grad_(False)
    model.train(False)
    decoder = text_config(config)
    return LoadedModel(
        model=model,
        layers=discover_layers(model, int(decoder.num_hidden_layers)),
        dtype=dtype,
        vocabulary=int(decoder.vocab_size),
        context_tokens=int(decoder.max_position_embeddings),
        mark=mark,
    )


def discover_layers(model: PreTrainedModel, expected: int) -> list[LayerSpec]:
    """Run a few tokens through the model and write down what each attention layer asked for."""
    name = str(model.config.model_type)
    discovery = LayerDiscovery(name)
    row = torch.arange(DRY_TOKENS, device=model.device)[None]
    with torch.inference_mode():
        model(
            input_ids=torch.zeros_like(row),
            position_ids=row,
            attention_mask=torch.ones_like(row),
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
