"""Decides from the configuration alone, before any weight is read, whether a model can be served.

Everything that inspects `transformers` configurations and classes is here. A model that would compute something else when
its tokens are packed in one row beside another request's is rejected by name, never served wrongly.
"""

from __future__ import annotations

from typing import cast

from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from baton.core.errors import SetupError

SERVED_LAYER_TYPES = ("full_attention", "sliding_attention")
REFUSED_ROPE_TYPES = ("dynamic", "longrope")
"""These choose their frequencies by the largest position in the row, so one request would change others."""


class UnsupportedModel(SetupError):
    """The model needs something this executor does not compute; `feature` names it."""

    def __init__(self, model: str, feature: str) -> None:
        super().__init__(f"the model {model} cannot be served: it uses {feature}, which this executor does not implement")
        self.model = model
        self.feature = feature


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The part of a configuration that describes the decoder (composite models keep it one level down)."""
    return config.get_text_config(decoder=True)


def check_config(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class that runs this configuration; raises UnsupportedModel where it would be served wrongly."""
    name = str(config.model_type)
    if bool(config.is_encoder_decoder):
        raise UnsupportedModel(name, "an encoder with cross attention (encoder-decoder)")
    decoder = text_config(config)
    for feature in _config_features(decoder):
        raise UnsupportedModel(name, feature)
    mapping = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        raise UnsupportedModel(name, "an architecture that transformers does not offer as a causal language model")
    model_class = cast("type[PreTrainedModel]", mapping[type(config)])
    if bool(optional_attribute(model_class, "_is_stateful", False)):
        raise UnsupportedModel(name, "recurrent layers (a state carried from token to token)")
    if not bool(optional_attribute(model_class, "_supports_attention_backend", False)):
        raise UnsupportedModel(name, "attention outside transformers' attention interface")
    return model_class


def optional_attribute(thing: object, name: str, default: object) -> object:
    """An attribute that some architectures lack."""
    return getattr(thing, name, default)


def _config_features(decoder: PretrainedConfig) -> list[str]:
    features = [f"layers of the type {kind!r}" for kind in _layer_types(decoder) if kind not in SERVED_LAYER_TYPES]
    features += [f"{kind!r} RoPE scaling" for kind in _rope_types(decoder) if kind in REFUSED_ROPE_TYPES]
    if optional_attribute(decoder, "num_kv_shared_layers", 0):
        features.append("layers that share another layer's KV")
    if not optional_attribute(decoder, "is_causal", True) or optional_attribute(
        decoder, "use_bidirectional_attention", False
    ):
        features.append("bidirectional attention (is_causal=False)")
    if optional_attribute(decoder, "add_cross_attention", False):
        features.append("cross attention")
    return features


def _layer_types(decoder: PretrainedConfig) -> list[str]:
    types = optional_attribute(decoder, "layer_types", None) or ()
    return [str(kind) for kind in cast("tuple[object, ...]", types)]


def _rope_types(decoder: PretrainedConfig) -> list[str]:
    """RoPE parameters are one dictionary, or one for each layer type."""
    parameters = optional_attribute(decoder, "rope_parameters", None) or {}
    if not isinstance(parameters, dict):
        return []
    groups = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return [str(group["rope_type"]) for group in groups if "rope_type" in group]
