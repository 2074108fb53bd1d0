"""Decoder layers of the common kind, fused for a CUDA device; `executor.cpu.fused_layers` describes the common kind.

Kernels of a layer, in a decode:  [norm ·] QKV · attention with rotation and KV write · output + residual · [norm ·] gate and
up with the gate · down + residual. A layer qualifies by the names and types of its parts, and only if its output on a probe
equals the original's. A layer with another kind of MLP (a mixture of experts) keeps that part as it is.
"""

from __future__ import annotations

import torch

from baton.executor.cpu.fused_layers import (
    ATTENTION_PARTS,
    CARRIED_NAMES,
    LAYER_PARTS,
    MLP_PARTS,
    gate_kind,
    linear_of,
    norm_parts,
)
from baton.executor.cpu.packed_modules import joined_bias
from baton.executor.cuda.attention import CudaAttention, RotaryForm
from baton.executor.cuda.products import DeviceLinear, NormedRows, ProductScratch, RmsNorm, normed
from baton.executor.kv_pool import LayerSpec
from baton.executor.model_support import optional_attribute


def has_common_parts(layer: torch.nn.Module, spec: LayerSpec) -> bool:
    """Whether the parts have the names of the common kind; types and the probe check the rest."""
    if {name for name, _ in layer.named_children()} != LAYER_PARTS:
        return False
    attention = set(dict(layer.get_submodule("self_attn").named_children()))
    dim = spec.key_dim
    return (
        attention in (ATTENTION_PARTS, ATTENTION_PARTS | {"q_norm", "k_norm"})
        and dim == spec.value_dim
        and dim & (dim - 1) == 0
        and dim >= 16
        and not spec.has_sinks
    )


class FusedLayer(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module, spec: LayerSpec, index: int, scratch: ProductScratch, offset: float) -> None:
        """`offset` is added to the weights of norms: some families store their difference from one."""
        super().__init__()
        attention = layer.get_submodule("self_attn")
        self._spec, self._index = spec, index
        self.then: RmsNorm | None = None
        """The norm that follows this layer, if known."""
        self.first = _norm(layer.get_submodule("input_layernorm"), offset)
        self._second = _norm(layer.get_submodule("post_attention_layernorm"), offset)
        self._heads = linear_of(attention, "q_proj").out_features // spec.key_dim
        self._qkv = _joined(attention, ("q_proj", "k_proj", "v_proj"), scratch)
        self._o = _joined(attention, ("o_proj",), scratch)
        self._head_norms, self._head_epsilon = _head_norms(attention, offset)
        self._mlp = _mlp(layer.get_submodule("mlp"), scratch)
        for name in CARRIED_NAMES:
            if (value := optional_attribute(layer, name, None)) is not None:
                setattr(self, name, value)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        paged: CudaAttention,
        **_: object,
    ) -> torch.Tensor:
        rows = paged.handed(hidden_states[0])
        cosines, sines = (table[0] for table in position_embeddings)
        rotation = RotaryForm(cosines, sines, self._head_norms, self._head_epsilon)
        qkv = self._qkv(rows, norm=self.first)
        attended = paged.attend_fused(self._index, self._spec, self._heads, qkv, rotation)
        rows = self._o.onto(rows.plain, attended, self._second)
        made: NormedRows = self._mlp(rows, self._second, self.then)
        paged.hand_on(made)
        return made.plain.unsqueeze(0)


class GatedMlp(torch.nn.Module):
    def __init__(self, mlp: torch.nn.Module, scratch: ProductScratch) -> None:
        super().__init__()
        weight, bias = _joined_weights(mlp, ("gate_proj", "up_proj"))
        self._gate_up = DeviceLinear(weight, bias, scratch, gate=gate_kind(mlp))
        self._down = _joined(mlp, ("down_proj",), scratch)

    def forward(self, rows: NormedRows, norm: RmsNorm, then: RmsNorm | None) -> NormedRows:
        """rows + MLP(norm(rows))."""
        gated = self._gate_up(rows, norm=norm)
        return self._down.onto(rows.plain, gated, then)


class KeptMlp(torch.nn.Module):
    """An MLP of another kind, as `transformers` wrote it."""

    def __init__(self, mlp: torch.nn.Module) -> None:
        super().__init__()
        self._inner = mlp

    def forward(self, rows: NormedRows, norm: RmsNorm, _then: RmsNorm | None) -> NormedRows:
        x, due = rows.ready_for(norm)
        out = self._inner((x if due is None else normed(x, due)).unsqueeze(0))
        if not isinstance(out, torch.Tensor):
            raise TypeError("an MLP that answers with more than its output")
        return NormedRows(rows.plain + out[0])


def _mlp(mlp: torch.nn.Module, scratch: ProductScratch) -> GatedMlp | KeptMlp:
    parts = dict(mlp.named_children())
    if set(parts) != MLP_PARTS or not all(isinstance(parts[name], torch.nn.Linear) for name in MLP_PARTS - {"act_fn"}):
        return KeptMlp(mlp)
    return GatedMlp(mlp, scratch)


class FusedNorm(torch.nn.Module):
    def __init__(self, norm: torch.nn.Module, offset: float) -> None:
        super().__init__()
        self._norm = _norm(norm, offset)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return normed(x.reshape(-1, x.shape[-1]).contiguous(), self._norm).view(x.shape)


class TabledRotary(torch.nn.Module):
    """Tables of cosines and sines of every position, computed once by the model's own module."""

    def __init__(self, cosines: torch.Tensor, sines: torch.Tensor) -> None:
        """Both tables are [positions, dim]."""
        super().__init__()
        self._cosines, self._sines = cosines, sines

    @classmethod
    def of(cls, rotary: torch.nn.Module, positions: int, like: torch.Tensor) -> TabledRotary | None:
        """The tables of a rotary module; None if it does not return two such tables."""
        every = torch.arange(positions, device=like.device)[None]
        made = rotary(like, every)
        if isinstance(made, tuple) and [table.shape[:-1] for table in made] == [every.shape] * 2:
            return cls(made[0][0], made[1][0])
        return None

    def forward(self, _x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        look_up = torch.nn.functional.embedding
        return look_up(position_ids, self._cosines), look_up(position_ids, self._sines)


class PlainLinear(torch.nn.Module):
    """A linear map by our products; with a dtype, its output has that dtype."""

    def __init__(self, linear: torch.nn.Linear, scratch: ProductScratch, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        bias = None if linear.bias is None else linear.bias.detach()
        self._linear = DeviceLinear(linear.weight.detach(), bias, scratch)
        self._dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self._linear(rows, dtype=self._dtype).view(*x.shape[:-1], self._linear.columns)


def _norm(module: torch.nn.Module, offset: float) -> RmsNorm:
    return RmsNorm(*norm_parts(module, offset))


def _head_norms(attention: torch.nn.Module, offset: float) -> tuple[torch.Tensor | None, float]:
    if "q_norm" not in dict(attention.named_children()):
        return None, 0.0
    query, key = (_norm(attention.get_submodule(name), offset) for name in ("q_norm", "k_norm"))
    if query.epsilon != key.epsilon:
        raise TypeError("norms of queries and keys that differ in more than their weights")
    return torch.stack([query.weight, key.weight]), query.epsilon


def _joined(module: torch.nn.Module, names: tuple[str, ...], scratch: ProductScratch) -> DeviceLinear:
    return DeviceLinear(*_joined_weights(module, names), scratch)


def _joined_weights(module: torch.nn.Module, names: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The concatenated weights and biases of these parts; a single part's own tensors, without a copy."""
    linears = [linear_of(module, name) for name in names]
    if len(linears) == 1:
        bias = linears[0].bias
        return linears[0].weight.detach(), None if bias is None else bias.detach()
    weight = torch.cat([linear.weight.detach() for linear in linears])
    return weight, joined_bias(linears)
