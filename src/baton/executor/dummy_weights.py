"""Random weights in place of trained ones: numbers from a hash, the same on every device.

A matrix gets independent numbers with standard deviation 1/√(inputs), so that activations neither grow nor vanish over many
layers; norms and biases keep the architecture's initial values. A number depends only on the seed, the tensor's name and its
position: another number format has the same number, rounded, and a CPU makes the same model as a GPU.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch

from baton.executor.gumbel_noise import RowKeys, hashes, noise_stream, row_keys

CHUNK = 1 << 26
"""Numbers drawn at once, which bounds the memory needed beside the weights."""
_HALF = float(1 << 23)
"""Half of the 2²⁴ values of 24 bits. A float32 holds each of them exactly, also minus their middle."""


@torch.no_grad()
def draw_weights(model: torch.nn.Module, seed: int) -> None:
    """Replace, in place, all matrices of the model. Tied weights are drawn once."""
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            _draw(parameter, _keys(name, seed, parameter.device), 1.0 / math.sqrt(parameter.shape[-1]))


def _keys(name: str, seed: int, device: torch.device) -> RowKeys:
    tensor = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    stream = np.array([noise_stream(seed, tensor)], dtype=np.uint64)
    return row_keys(stream, np.zeros(1, dtype=np.int64), device)


def _draw(tensor: torch.Tensor, keys: RowKeys, spread: float) -> None:
    flat = tensor.view(-1)
    scale = math.sqrt(3.0) * spread / _HALF  # uniform over ±√3 · spread
    for begin in range(0, flat.numel(), CHUNK):
        part = flat[begin : begin + CHUNK]
        places = torch.arange(begin, begin + part.numel(), dtype=torch.int32, device=tensor.device)
        drawn = hashes(places, keys)[0].bitwise_right_shift_(7)
        part.copy_(drawn.to(torch.float32).sub_(_HALF - 0.5).mul_(scale))
