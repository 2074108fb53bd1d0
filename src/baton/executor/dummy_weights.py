"""Weights that stand in for trained ones: numbers from a hash, the same on every device.

Owns how they are drawn. A matrix gets independent numbers of the spread 1/√(inputs), so that what goes through a layer
neither grows nor fades however many there are; norms and biases stay as the architecture begins them. A number depends on
the seed, the tensor's name and its place in it alone: in another number format it is the same number, rounded, and a model
made on a CPU is the one made on a GPU.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch

from baton.executor.gumbel_noise import RowKeys, hashes, noise_stream, row_keys

CHUNK = 1 << 26
"""So many numbers are drawn at once: what is needed beside the weights is some of these."""
_HALF = float(1 << 23)
"""Of the numbers that 24 bits can tell apart. A float32 holds them exactly, also less the middle of them."""


@torch.no_grad()
def draw_weights(model: torch.nn.Module, seed: int) -> None:
    """Replace, in place, what the architecture draws at random. Tied weights are drawn once."""
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            _draw(parameter, _keys(name, seed, parameter.device), 1.0 / math.sqrt(parameter.shape[-1]))


def _keys(name: str, seed: int, device: torch.device) -> RowKeys:
    tensor = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    stream = np.array([noise_stream(seed, tensor)], dtype=np.uint64)
    return row_keys(stream, np.zeros(1, dtype=np.int64), device)


def _draw(tensor: torch.Tensor, keys: RowKeys, spread: float) -> None:
    flat = tensor.view(-1)
    scale = math.sqrt(3.0) * spread / _HALF  # evenly spread over ±√3 · spread
    for begin in range(0, flat.numel(), CHUNK):
        part = flat[begin : begin + CHUNK]
        places = torch.arange(begin, begin + part.numel(), dtype=torch.int32, device=tensor.device)
        drawn = hashes(places, keys)[0].bitwise_right_shift_(7)
        part.copy_(drawn.to(torch.float32).sub_(_HALF - 0.5).mul_(scale))
