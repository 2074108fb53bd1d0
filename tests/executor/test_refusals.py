"""Models that would be served wrongly are refused at load, by the name of what they need."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.tiny import SIZES, family_config, save_random
from transformers import (
    BambaConfig,
    Gemma3TextConfig,
    JambaConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    PretrainedConfig,
    Qwen3NextConfig,
    T5Config,
)

from baton.executor.model_loading import load_model
from baton.executor.model_support import UnsupportedModel
from baton.executor.paged_attention import LayerDiscovery, paged_attention

PLAIN = {name: value for name, value in SIZES.items() if name != "head_dim"}


def scaled(kind: str, **more: object) -> LlamaConfig:
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64, **more}
    return LlamaConfig(**SIZES, rope_parameters=rope)


LONG = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}


@pytest.mark.parametrize(
    ("config", "feature"),
    [
        (T5Config(), "encoder-decoder"),
        (MambaConfig(), "linear_attention"),
        (JambaConfig(), "recurrent|layers of the type"),
        (BambaConfig(), "recurrent|layers of the type"),
        (Qwen3NextConfig(), "linear_attention"),
        (Llama4TextConfig(), "chunked_attention"),
        (scaled("dynamic"), "'dynamic' RoPE"),
        (scaled("longrope", **LONG), "'longrope' RoPE"),
        (Gemma3TextConfig(**SIZES, use_bidirectional_attention=True), "bidirectional"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.model_type,
)
def test_refused_from_the_configuration_alone(config: PretrainedConfig, feature: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)  # no weights: the refusal must come before they are read
    with pytest.raises(UnsupportedModel, match=feature):
        load_model(tmp_path, "float32")


def test_static_rope_scaling_is_served(tmp_path: Path) -> None:
    save_random(scaled("linear"), tmp_path)
    assert len(load_model(tmp_path, "float32").layers) == 3


def test_an_unknown_number_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="int4"):
        load_model(tmp_path, "int4")


def call(**arguments: object) -> None:
    module = torch.nn.Module()
    module.layer_idx = 0
    heads = torch.zeros(1, 2, 3, 16)
    context = LayerDiscovery("probe")
    paged_attention(module, heads, heads, heads, None, **{"paged": context, **arguments})


def test_an_unknown_attention_argument_is_refused_by_name() -> None:
    call(position_ids=torch.arange(3), bias=None)
    with pytest.raises(UnsupportedModel, match="'alibi_slopes'"):
        call(alibi_slopes=torch.ones(2))


def test_layers_that_do_not_pass_arguments_on_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="do not receive"):
        call(paged=None)


def test_bidirectional_attention_is_refused_at_the_call() -> None:
    with pytest.raises(UnsupportedModel, match="is_causal=False"):
        call(is_causal=False)


def test_a_mask_that_is_not_ours_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose mask has a window that it does not tell attention of."""
    save_random(family_config("mistral"), tmp_path)
    from transformers.models.mistral import modeling_mistral

    whole = modeling_mistral.create_sliding_window_causal_mask
    monkeypatch.setattr(modeling_mistral, "create_causal_mask", whole)
    original = modeling_mistral.MistralAttention.forward

    def forgetful(self: torch.nn.Module, *arguments: object, **keywords: object) -> object:
        self.config.sliding_window, kept = None, self.config.sliding_window
        try:
            return original(self, *arguments, **keywords)
        finally:
            self.config.sliding_window = kept

    monkeypatch.setattr(modeling_mistral.MistralAttention, "forward", forgetful)
    with pytest.raises(UnsupportedModel, match="neither causal nor a sliding window"):
        load_model(tmp_path, "float32")
