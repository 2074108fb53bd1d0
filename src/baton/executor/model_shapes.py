"""Shapes of known models: their configurations without weights, which are drawn at random when one is loaded.

Owns the shapes, their names (`shape:qwen3-8b`, or `shape:qwen3-8b@7` with another seed) and the file that marks a folder
without weights. A shape takes the same time to compute as its model and generates meaningless text: it is for benchmarks,
and the tiny ones are for tests. Knows nothing of torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from baton.core.errors import SetupError

PREFIX = "shape:"
SHAPE_FILE = "dummy.json"
"""File in a folder without weights that names its shape and the seed of its weights."""
SEED_MAX = (1 << 63) - 1

Fields = Mapping[str, str | int | float | bool | Mapping[str, str | float] | None]
"""Fields of a configuration of `transformers`."""


class UnknownShape(SetupError):
    """No shape has that name; the message says which there are."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    name: str
    seed: int = 0


def _rope(theta: float) -> dict[str, str | float]:
    return {"rope_type": "default", "rope_theta": theta}


_NO_ENDS: Fields = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
"""No token ends an answer: it is as long as requested."""
_EIGHT_BILLION: Fields = {
    "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "tie_word_embeddings": False, **_NO_ENDS,
}  # fmt: skip
# Not tied, whatever their family: an untrained model with tied embeddings repeats its last token for ever.
_TINY: Fields = {
    "vocab_size": 320, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048, "rope_parameters": _rope(1e4),
    "tie_word_embeddings": False, **_NO_ENDS,
}  # fmt: skip
_GEMMA2: Fields = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}

SHAPES: dict[str, Fields] = {
    "qwen3-8b": {
        **_EIGHT_BILLION, "model_type": "qwen3", "vocab_size": 151_936, "intermediate_size": 12_288, "num_hidden_layers": 36,
        "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_parameters": _rope(1e6),
    },
    "llama3-8b": {
        **_EIGHT_BILLION, "model_type": "llama", "vocab_size": 128_256, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_parameters": _rope(5e5),
    },
    "mistral-7b": {
        **_EIGHT_BILLION, "model_type": "mistral", "vocab_size": 32_000, "intermediate_size": 14_336,
        "num_hidden_layers": 32, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5, "sliding_window": 4096,
        "rope_parameters": _rope(1e4),
    },
    "gemma2-9b": {
        **_NO_ENDS, **_GEMMA2, "model_type": "gemma2", "vocab_size": 256_000, "hidden_size": 3584,
        "intermediate_size": 14_336, "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 256, "max_position_embeddings": 8192, "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "rope_parameters": _rope(1e4), "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        **_NO_ENDS, "model_type": "qwen3_moe", "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_parameters": _rope(1e6),
    },
    "tiny-qwen3": {**_TINY, "model_type": "qwen3"},
    "tiny-llama": {**_TINY, "model_type": "llama"},
    "tiny-mistral": {**_TINY, "model_type": "mistral", "sliding_window": 48},
    "tiny-gemma2": {**_TINY, **_GEMMA2, "model_type": "gemma2", "query_pre_attn_scalar": 64, "sliding_window": 48},
    "tiny-qwen3-moe": {
        **_TINY, "model_type": "qwen3_moe", "moe_intermediate_size": 64, "num_experts": 8,
        "num_experts_per_tok": 2, "norm_topk_prob": True,
    },
}  # fmt: skip


def parse_shape(model: str) -> ModelShape | None:
    """The shape of `shape:NAME` or `shape:NAME@SEED`; None for any other model name."""
    if not model.startswith(PREFIX):
        return None
    name, at, seed = model.removeprefix(PREFIX).partition("@")
    shape_fields(name)
    if at and not (re.fullmatch(r"\d{1,19}", seed) and int(seed) <= SEED_MAX):
        raise UnknownShape(f"{model!r}: after the @ comes a seed, a whole number")
    return ModelShape(name, int(seed) if at else 0)


def shape_fields(name: str) -> Fields:
    if name not in SHAPES:
        raise UnknownShape(f"there is no shape {name!r} (known: {', '.join(SHAPES)})")
    return SHAPES[name]


def shape_mark(shape: ModelShape) -> bytes:
    """The mark of a shape and its seed, which determine the weights too."""
    known = json.dumps([shape.name, shape.seed, shape_fields(shape.name)], sort_keys=True)
    return hashlib.blake2b(b"shape:" + known.encode(), digest_size=16).digest()


def note_shape(folder: Path, shape: ModelShape) -> None:
    """Write the file that makes a folder stand for a shape."""
    (folder / "config.json").write_text(json.dumps(shape_fields(shape.name)))
    (folder / SHAPE_FILE).write_text(json.dumps({"shape": shape.name, "seed": shape.seed}))


def shape_in(folder: Path) -> ModelShape | None:
    """The shape that a folder stands for; None if it has a model of its own."""
    path = folder / SHAPE_FILE
    if not path.is_file():
        return None
    note = json.loads(path.read_text())
    shape_fields(str(note["shape"]))
    return ModelShape(str(note["shape"]), int(note["seed"]))
