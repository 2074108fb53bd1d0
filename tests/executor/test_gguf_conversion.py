"""A GGUF file becomes a model, and how many of its tensors are read is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers import modeling_gguf_pytorch_utils as gguf_reading

from baton.executor import gguf_conversion
from baton.executor.gguf_conversion import take_floats

HIDDEN, INNER, WORDS = 32, 64, 48
TENSORS = {
    "token_embd.weight": (WORDS, HIDDEN),
    "output_norm.weight": (HIDDEN,),
    "output.weight": (WORDS, HIDDEN),
    "blk.0.attn_norm.weight": (HIDDEN,),
    "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
    "blk.0.attn_k.weight": (HIDDEN, HIDDEN),
    "blk.0.attn_v.weight": (HIDDEN, HIDDEN),
    "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
    "blk.0.ffn_norm.weight": (HIDDEN,),
    "blk.0.ffn_gate.weight": (INNER, HIDDEN),
    "blk.0.ffn_up.weight": (INNER, HIDDEN),
    "blk.0.ffn_down.weight": (HIDDEN, INNER),
}


def written(path: Path) -> Path:
    """A model of one layer."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(WORDS)
    for at, (name, shape) in enumerate(TENSORS.items()):
        writer.add_tensor(name, np.full(shape, at, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(gguf: Path, told: list[tuple[int, int]]) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    take_floats(gguf, model, torch.bfloat16, lambda done, total: told.append((done, total)))
    return model


def test_each_tensor_that_is_read_is_told(tmp_path: Path) -> None:
    bar = gguf_reading.tqdm
    told: list[tuple[int, int]] = []
    model = read(written(tmp_path / "small.gguf"), told)
    assert told == [(done, len(TENSORS)) for done in range(len(TENSORS) + 1)]
    assert torch.equal(model.get_input_embeddings().weight, torch.zeros(WORDS, HIDDEN, dtype=torch.bfloat16))
    assert gguf_reading.tqdm is bar, "the library has its own again"


def test_a_library_that_shows_no_bar_tells_nothing_and_converts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_conversion, "LIBRARY_BAR", "no_such_bar")
    told: list[tuple[int, int]] = []
    read(written(tmp_path / "small.gguf"), told)
    assert not told
