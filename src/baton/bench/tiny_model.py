"""A tiny model with random float64 weights and a byte vocabulary, made in a moment.

In float64 what it says depends neither on the batch nor on who computes it, so answers of two runs can be compared token by
token.
"""

from __future__ import annotations

from pathlib import Path

from baton.node.scripted_text import BYTE_VOCABULARY, write_byte_tokenizer

CONTEXT_TOKENS = 1024
_SEED = 4


def make_tiny(folder: Path, context_tokens: int = CONTEXT_TOKENS) -> None:
    # Imported here because they take seconds and most commands do not need them.
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # written before a bar could be read
    torch.manual_seed(_SEED)
    config = LlamaConfig(
        vocab_size=BYTE_VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=context_tokens, initializer_range=0.2, eos_token_id=None,
        bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    finally:
        torch.set_default_dtype(before)
    write_byte_tokenizer(folder)
