"""Faster decoder layers that replace those of the common kind where they compute the same.

The common kind: a norm, grouped-query attention (with or without norms on queries and keys), a residual, a norm, a gated
MLP, a residual. A layer qualifies by the names and types of its parts, and only if on a probe, with the model's own input,
the replacement's output equals the original's. Other layers stay as `transformers` wrote them, slower; their large products
are still native.

The gain: one product for Q, K and V, one for gate and up, and native norms, rotations and gates instead of half a dozen
passes each. The kernels give a row the same bits in every batch, which the matrix libraries of torch do not: a model whose
layers, norms and products are all replaced is batch-invariant (see `layer_probe`).
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.activations import GELUTanh, SiLUActivation

from baton.executor.cpu.native_attention import NativeAttention
from baton.executor.cpu.native_kernels import LANES, LayerArguments, NativeKernels, RotateArguments, packed
from baton.executor.cpu.packed_modules import AnyLinear, FastHead, PackedLinear, can_pack, packed_linear
from baton.executor.kv_pool import LayerSpec
from baton.executor.model_support import optional_attribute
from baton.executor.paged_attention import AttentionCall, AttentionContext

log = logging.getLogger(__name__)

TOLERANCE = {torch.bfloat16: 3e-2, torch.float32: 1e-4}
"""Largest difference on the probe, relative to the largest value: rounding, not another formula."""

LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
CARRIED_NAMES = ("attention_type", "layer_type", "layer_idx")
"""Attributes of a layer that models read, which the replacement must have."""


@dataclass(frozen=True, slots=True)
class NormWeights:
    """Weights of a root-mean-square norm in float32, with the family's offset added."""

    weight: torch.Tensor
    epsilon: float


class FastLayer(torch.nn.Module):
    """One decoder layer of the common kind. Takes what `transformers` passes to a layer and returns the hidden states."""

    def __init__(self, layer: torch.nn.Module, spec: LayerSpec, index: int, kernels: NativeKernels, offset: float) -> None:
        super().__init__()
        attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
        self._kernels = kernels
        self._spec = spec
        self._index = index
        self._first = _norm(layer.get_submodule("input_layernorm"), offset)
        self._second = _norm(layer.get_submodule("post_attention_layernorm"), offset)
        self._qkv = packed_linear([_map_of(attention, name) for name in ("q_proj", "k_proj", "v_proj")], kernels)
        self._o = packed_linear([_map_of(attention, "o_proj")], kernels)
        self._gate_up = packed_linear([_map_of(mlp, name) for name in ("gate_proj", "up_proj")], kernels)
        self._down = packed_linear([_map_of(mlp, "down_proj")], kernels)
        self._gate_kind = gate_kind(mlp)
        self._heads = _map_of(attention, "q_proj").out_features // spec.key_dim
        self._qk_norms = _qk_norms(attention, offset)
        self._arguments = self._layer_arguments()
        for name in CARRIED_NAMES:
            if (value := optional_attribute(layer, name, None)) is not None:
                setattr(self, name, value)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        paged: AttentionContext,
        **_: object,
    ) -> torch.Tensor:
        x = hidden_states[0]
        if isinstance(paged, NativeAttention) and paged.takes_whole_layers:
            return paged.whole_layer(self._index, self._arguments, x, *position_embeddings).unsqueeze(0)
        x = self._o.added(self._attend(x, position_embeddings, paged), x)
        normed = self._kernels.norm(x, self._second.weight, self._second.epsilon)
        gated = self._kernels.gate(self._gate_up(normed), self._gate_kind)
        return self._down.added(gated, x).unsqueeze(0)

    def _layer_arguments(self) -> LayerArguments:
        spec, (query_norm, key_norm) = self._spec, self._qk_norms
        return LayerArguments(
            first_norm=self._first.weight.data_ptr(),
            second_norm=self._second.weight.data_ptr(),
            query_norm=None if query_norm is None else query_norm.weight.data_ptr(),
            key_norm=None if key_norm is None else key_norm.weight.data_ptr(),
            qkv=self._qkv.linear_map,
            o=self._o.linear_map,
            gate_up=self._gate_up.linear_map,
            down=self._down.linear_map,
            first_epsilon=self._first.epsilon,
            second_epsilon=self._second.epsilon,
            qk_epsilon=0.0 if query_norm is None else query_norm.epsilon,
            scaling=spec.scaling,
            softcap=spec.softcap or 0.0,
            window=spec.window or 0,
            heads=self._heads,
            kv_heads=spec.kv_heads,
            dim=spec.key_dim,
            gate_kind=self._gate_kind,
        )

    def _attend(
        self, x: torch.Tensor, embeddings: tuple[torch.Tensor, torch.Tensor], paged: AttentionContext
    ) -> torch.Tensor:
        spec = self._spec
        qkv = self._qkv(self._kernels.norm(x, self._first.weight, self._first.epsilon))
        self._rotate(qkv, *embeddings)
        by_head = qkv.view(len(x), -1, spec.key_dim).transpose(0, 1)
        call = AttentionCall(
            layer=self._index,
            query=by_head[: self._heads],
            key=by_head[self._heads : self._heads + spec.kv_heads],
            value=by_head[self._heads + spec.kv_heads :],
            mask=None,
            scaling=spec.scaling,
            window=spec.window,
            softcap=spec.softcap,
            sinks=None,
        )
        return paged.attend(call).view(len(x), -1)

    def _rotate(self, qkv: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
        query_norm, key_norm = self._qk_norms
        arguments = RotateArguments(
            qkv=qkv.data_ptr(),
            token_stride=qkv.stride(0),
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            query_norm=None if query_norm is None else query_norm.weight.data_ptr(),
            key_norm=None if key_norm is None else key_norm.weight.data_ptr(),
            epsilon=0.0 if query_norm is None else query_norm.epsilon,
            tokens=len(qkv),
            heads=self._heads,
            kv_heads=self._spec.kv_heads,
            dim=self._spec.key_dim,
            threads=torch.get_num_threads(),
        )
        self._kernels.rotate(ctypes.addressof(arguments))


class FastNorm(torch.nn.Module):
    def __init__(self, norm: torch.nn.Module, kernels: NativeKernels, offset: float) -> None:
        super().__init__()
        self._norm = _norm(norm, offset)
        self._kernels = kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernels.norm(x.contiguous(), self._norm.weight, self._norm.epsilon)


def linear_of(module: torch.nn.Module, name: str) -> torch.nn.Linear:
    """A map of floats."""
    part = module.get_submodule(name)
    if not isinstance(part, torch.nn.Linear):
        raise TypeError(f"{name} is not a linear map")
    return part


def _map_of(module: torch.nn.Module, name: str) -> AnyLinear:
    part = module.get_submodule(name)
    return part if isinstance(part, PackedLinear) else linear_of(module, name)


def norm_parts(module: torch.nn.Module, offset: float) -> tuple[torch.Tensor, float]:
    """Weights in float32 and epsilon. `offset` is added to the weights: some families store their difference from one."""
    epsilon = optional_attribute(module, "variance_epsilon", optional_attribute(module, "eps", None))
    weight = module.get_parameter("weight")
    if not isinstance(epsilon, float):
        raise TypeError("not a root-mean-square norm")
    return weight.detach().float() + offset, epsilon


def _norm(module: torch.nn.Module, offset: float) -> NormWeights:
    return NormWeights(*norm_parts(module, offset))


def _qk_norms(attention: torch.nn.Module, offset: float) -> tuple[NormWeights | None, NormWeights | None]:
    if "q_norm" not in dict(attention.named_children()):
        return None, None
    return _norm(attention.get_submodule("q_norm"), offset), _norm(attention.get_submodule("k_norm"), offset)


def gate_kind(mlp: torch.nn.Module) -> int:
    activation = mlp.get_submodule("act_fn")
    if isinstance(activation, torch.nn.SiLU | SiLUActivation):
        return 0
    if isinstance(activation, GELUTanh):
        return 1
    raise TypeError("an activation that the gate kernel does not have")


def has_common_parts(layer: torch.nn.Module, spec: LayerSpec) -> bool:
    """Whether the parts have the names, types and sizes of the common kind; the probe checks the rest."""
    if {name for name, _ in layer.named_children()} != LAYER_PARTS:
        return False
    attention, mlp = (
        dict(layer.get_submodule("self_attn").named_children()),
        dict(layer.get_submodule("mlp").named_children()),
    )
    linears = [attention.get(name) for name in sorted(ATTENTION_PARTS)]
    linears += [mlp.get(name) for name in sorted(MLP_PARTS - {"act_fn"})]
    return (
        set(attention) in (ATTENTION_PARTS, ATTENTION_PARTS | {"q_norm", "k_norm"})
        and set(mlp) == MLP_PARTS
        and all(isinstance(linear, torch.nn.Linear | PackedLinear) and can_pack(linear) for linear in linears)
        and spec.key_dim == spec.value_dim
        and spec.key_dim % (2 * LANES) == 0
        and not spec.has_sinks
    )


def pack_head(model: PreTrainedModel, kernels: NativeKernels) -> bool:
    """Pack the map to the vocabulary if the kernels can take it. The embedding keeps a copy where the two are tied."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if isinstance(head, FastHead):
        return True
    if not isinstance(head, torch.nn.Linear) or head.in_features % LANES:
        return False
    if [name for name, _ in head.named_parameters()] != ["weight"]:
        return False
    model.set_output_embeddings(FastHead(packed(head.weight.detach()), kernels))  # type: ignore[no-untyped-call]
    return True
