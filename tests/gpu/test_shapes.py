"""A shape is one model, wherever its weights are drawn."""

from __future__ import annotations

import pytest
import torch

from baton.executor.model_loading import load_shape
from baton.executor.model_shapes import SHAPES

pytestmark = pytest.mark.cuda

TINY = [name for name in SHAPES if name.startswith("tiny-")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", TINY)
def test_weights_drawn_on_the_device_are_those_drawn_on_the_host(name: str, dtype: str) -> None:
    there, here = load_shape(name, dtype, "cuda", seed=3), load_shape(name, dtype, "cpu", seed=3)
    assert there.layers == here.layers
    assert (there.mark, there.vocabulary) == (here.mark, here.vocabulary)
    weights = here.model.state_dict()
    for key, tensor in there.model.state_dict().items():
        assert tensor.device.type == "cuda"
        assert torch.equal(tensor.cpu(), weights[key]), key
