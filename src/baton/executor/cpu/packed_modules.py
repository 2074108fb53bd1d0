"""Modules whose weights are packed for the kernels: linear maps, the map to the vocabulary, embeddings.

A map of floats takes the place of `torch.nn.Linear`. A quantised one is there from the loading of the model on, so that its
weights never exist as floats.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.executor.cpu.native_kernels import (
    LANES,
    PARTS_MAX,
    LinearMap,
    NativeKernels,
    PackedWeights,
    WeightFormat,
    joined,
    packed,
)


class PackedLinear(torch.nn.Module):
    """One linear map, perhaps made of several."""

    def __init__(self, weights: PackedWeights, bias: torch.Tensor | None, kernels: NativeKernels) -> None:
        """`bias` is float32."""
        super().__init__()
        self._kernels = kernels
        self.weights = weights
        self.bias = bias
        self.in_features, self.out_features = weights.dim, weights.outputs

    @property
    def linear_map(self) -> LinearMap:
        return self.weights.linear_map(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self._kernels.linear(rows, self.weights, self.bias).view(*x.shape[:-1], self.out_features)

    def added(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + map(x), rounded once. Both have contiguous rows."""
        return self._kernels.linear(x, self.weights, self.bias, residual)


AnyLinear = torch.nn.Linear | PackedLinear


def packed_linear(linears: Sequence[AnyLinear], kernels: NativeKernels) -> PackedLinear:
    """One map of several with the same inputs. Floats are copied, quantised weights shared."""
    if len(linears) == 1 and isinstance(linears[0], PackedLinear):
        return linears[0]
    floats = [linear for linear in linears if isinstance(linear, torch.nn.Linear)]
    if len(floats) == len(linears):
        weights = packed(torch.cat([linear.weight.detach() for linear in floats]))
    else:
        weights = joined([_weights_of(linear) for linear in linears])
    if len(weights.parts) > PARTS_MAX:
        raise TypeError(f"a map of {len(weights.parts)} parts")
    return PackedLinear(weights, joined_bias(linears), kernels)


def _weights_of(linear: AnyLinear) -> PackedWeights:
    return linear.weights if isinstance(linear, PackedLinear) else packed(linear.weight.detach())


def joined_bias(linears: Sequence[AnyLinear]) -> torch.Tensor | None:
    """In float32; None if no map has one."""
    found = [linear.bias.detach() for linear in linears if linear.bias is not None]
    if not found:
        return None
    biases = [found[0].new_zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears]
    return torch.cat([bias.detach() for bias in biases]).float()


class FastHead(torch.nn.Module):
    """The map to the vocabulary, in float32 from the sums on: rounded to bfloat16, near-equal logits would become ties."""

    def __init__(self, weights: PackedWeights, kernels: NativeKernels) -> None:
        super().__init__()
        self._kernels = kernels
        self.weights = weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self._kernels.head(x.reshape(-1, x.shape[-1]).contiguous(), self.weights)
        return logits.view(*x.shape[:-1], logits.shape[-1]) if logits.is_contiguous() else logits.unsqueeze(0)


class KeptEmbedding(torch.nn.Module):
    """Embeddings whose rows are dequantised when they are looked up. The memory may be that of the map to the vocabulary."""

    def __init__(self, weights: PackedWeights, kernels: NativeKernels) -> None:
        super().__init__()
        self._kernels = kernels
        self.weights = weights

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self._kernels.lookup(self.weights, ids)


def can_pack(linear: AnyLinear) -> bool:
    """Whether the kernels can take this map: sizes must be multiples of a vector."""
    return linear.in_features % LANES == 0 and linear.out_features % LANES == 0


def weight_bytes(model: torch.nn.Module) -> int:
    """Of all weights in memory, shared ones counted once."""
    tensors = [parameter.detach() for parameter in model.parameters()]
    for module in model.modules():
        if isinstance(module, PackedLinear | FastHead | KeptEmbedding):
            tensors += [part.panels for part in module.weights.parts]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def weight_formats(model: torch.nn.Module) -> list[tuple[str, str]]:
    """The formats of the quantised weights by the names of their modules."""
    return [
        (name, part.format.name)
        for name, module in model.named_modules()
        if isinstance(module, PackedLinear | FastHead | KeptEmbedding)
        for part in module.weights.parts
        if part.format is not WeightFormat.FLOATS
    ]
