"""Python in the documents does what is said of it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from baton.executor.kv_pool import LayerSpec, kv_bytes_per_block
from baton.executor.model_shapes import shape_fields
from baton.wire.keyfile import key_of_text
from baton.wire.request_proof import ProofChecker
from tests.docs.pages import blocks


def test_a_proof_made_as_the_page_about_continuing_says_holds() -> None:
    (block,) = [one for one in blocks("python") if one.page == "docs/continuation.md"]
    names: dict[str, object] = {}
    exec(block.text, names)  # noqa: S102
    path, body, key = "/v1/completions", b'{"prompt": "hi", "generated_token_ids": [1]}', "a text of sixteen letters"
    (header, proof), _ = names["proof"](key, path, body).items()
    checker = ProofChecker(key_of_text(key), time.time)
    assert header == checker.header
    assert checker.why_not("POST", path, body, proof) is None


@pytest.mark.parametrize(
    ("shape", "dtype", "number_bytes"), [("qwen3-8b", torch.bfloat16, 2), ("llama3-8b", torch.float32, 4)]
)
def test_the_formula_of_the_page_about_sizing_is_what_a_pool_takes(
    shape: str, dtype: torch.dtype, number_bytes: int
) -> None:
    (block,) = [one for one in blocks("python") if one.page == "docs/sizing.md"]
    names: dict[str, Any] = {}
    exec(block.text, names)  # noqa: S102
    fields: dict[str, Any] = dict(shape_fields(shape))
    count, heads, dim = fields["num_hidden_layers"], fields["num_key_value_heads"], fields["head_dim"]
    layers = [LayerSpec(heads, dim, dim, 1.0) for _ in range(count)]
    told = names["kv_bytes_per_token"](count, heads, dim, number_bytes)
    assert kv_bytes_per_block(layers, 1, dtype) == told
    assert (names["qwen3_8b"], names["answers"]) == (147_456, 113)
