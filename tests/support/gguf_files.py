"""Tiny models as GGUF files in every format that the kernels have, made on the spot.

`gguf` cannot quantise to K formats, so that their weights are random blocks of which only the scales are chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from baton.executor.gguf_folder import GgufNote, gguf_mark, note_gguf

FORMATS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
MIXED = "mixed"
"""Every matrix of a layer in another format, one of them floats."""
WIDTH, INNER, HEADS, KV_HEADS, DIM, LAYERS, VOCABULARY, CONTEXT = 256, 512, 4, 2, 64, 2, 320, 256
SPREAD = 0.08
MATRICES = {
    "attn_q": (HEADS * DIM, WIDTH),
    "attn_k": (KV_HEADS * DIM, WIDTH),
    "attn_v": (KV_HEADS * DIM, WIDTH),
    "attn_output": (WIDTH, HEADS * DIM),
    "ffn_gate": (INNER, WIDTH),
    "ffn_up": (INNER, WIDTH),
    "ffn_down": (WIDTH, INNER),
}
MIXTURE = dict(zip(MATRICES, ("Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q8_0", "F16", "Q5_1"), strict=True))


def quantised_rows(form: str, outputs: int, dim: int, spread: float, seed: int) -> np.ndarray:
    """Rows as they lie in a file, of weights with about this standard deviation."""
    draw = np.random.default_rng(seed)
    kind = GGMLQuantizationType[form]
    if not form.endswith("_K"):
        return quantize((draw.standard_normal((outputs, dim)) * spread).astype(np.float32), kind)
    values, size = (int(number) for number in GGML_QUANT_SIZES[kind])
    blocks = draw.integers(0, 256, (outputs, dim // values, size), dtype=np.uint8)
    scales = {"Q4_K": (0, 7.5, 1 / 140), "Q5_K": (0, 15.5, 1 / 280), "Q6_K": (208, 0.0, 1 / 1300)}
    at, minimum, size_of_one = scales[form]
    scale = spread * size_of_one * (0.5 + draw.random((outputs, dim // values, 1)))
    blocks[:, :, at : at + 2] = scale.astype(np.float16).view(np.uint8)
    if minimum:
        blocks[:, :, 2:4] = (scale * minimum).astype(np.float16).view(np.uint8)
    return blocks.reshape(outputs, -1)


@dataclass(frozen=True)
class GgufModel:
    folder: Path
    file: Path
    config: PretrainedConfig


def write_gguf_model(folder: Path, form: str, family: str = "llama", is_tied: bool = False) -> GgufModel:
    """A file, and the folder that is made of it, but for a tokeniser."""
    config_class = LlamaConfig if family == "llama" else Qwen3Config
    config = config_class(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS, head_dim=DIM,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=CONTEXT, rms_norm_eps=1e-5,
        tie_word_embeddings=is_tied, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    file = folder / f"{form}.gguf"
    writer = GGUFWriter(file, family)
    for add, value in (
        (writer.add_block_count, LAYERS), (writer.add_context_length, CONTEXT), (writer.add_embedding_length, WIDTH),
        (writer.add_feed_forward_length, INNER), (writer.add_head_count, HEADS), (writer.add_head_count_kv, KV_HEADS),
        (writer.add_layer_norm_rms_eps, 1e-5), (writer.add_rope_dimension_count, DIM), (writer.add_vocab_size, VOCABULARY),
        (writer.add_key_length, DIM), (writer.add_value_length, DIM),
    ):  # fmt: skip
        add(value)
    _add_tensors(writer, form, family, is_tied)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config.save_pretrained(folder)
    note_gguf(folder, GgufNote(file.name, gguf_mark(file)))
    return GgufModel(folder, file, config)


def _add_tensors(writer: GGUFWriter, form: str, family: str, is_tied: bool) -> None:
    _add_matrix(
        writer, "token_embd.weight", "Q6_K" if form == MIXED else form, (VOCABULARY, WIDTH), 1.0 if not is_tied else 0.3
    )
    if not is_tied:
        _add_matrix(writer, "output.weight", "Q5_0" if form == MIXED else form, (VOCABULARY, WIDTH), SPREAD)
    _add_norm(writer, "output_norm.weight", WIDTH)
    for layer in range(LAYERS):
        for name, shape in MATRICES.items():
            _add_matrix(writer, f"blk.{layer}.{name}.weight", MIXTURE[name] if form == MIXED else form, shape, SPREAD)
        for name in ("attn_norm", "ffn_norm"):
            _add_norm(writer, f"blk.{layer}.{name}.weight", WIDTH)
        if family == "qwen3":
            for name in ("attn_q_norm", "attn_k_norm"):
                _add_norm(writer, f"blk.{layer}.{name}.weight", DIM)


def _add_matrix(writer: GGUFWriter, name: str, form: str, shape: tuple[int, int], spread: float) -> None:
    seed = sum(name.encode()) + len(name)
    if form == "F16":
        draw = np.random.default_rng(seed)
        writer.add_tensor(name, (draw.standard_normal(shape) * spread).astype(np.float16))
        return
    writer.add_tensor(name, quantised_rows(form, *shape, spread, seed), raw_dtype=GGMLQuantizationType[form])


def _add_norm(writer: GGUFWriter, name: str, dim: int) -> None:
    draw = np.random.default_rng(sum(name.encode()))
    writer.add_tensor(name, (1.0 + 0.1 * draw.standard_normal(dim)).astype(np.float32))
