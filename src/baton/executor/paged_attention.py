"""The attention function that `transformers` calls by our name, and the contexts that serve it.

The model is called with `paged=<context>`; its layers pass that keyword to `paged_attention`, which passes the layer's call
to the context. There is no global state. At load, `LayerDiscovery` records the arguments of each layer and rejects those
that are not implemented; in each step, `GatherAttention` or `NativeAttention` writes the new KV into blocks and attends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from baton.executor.cpu.gather_attention import attend_gathered, write_gathered
from baton.executor.kv_pool import LayerKv, LayerSpec
from baton.executor.model_support import UnsupportedModel, optional_attribute
from baton.executor.packing import PackedBatch

ATTENTION_NAME = "baton_paged"

IGNORED_ARGUMENTS = (
    "position_ids",
    "cache_position",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
)
"""Arguments that carry no meaning for attention over blocks: positions are already rotated in, nothing else is returned."""

LayerWritten = Callable[[int], None]
"""Told of each layer, as soon as the step's KV of that layer is in its blocks."""
MaskFunction = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's call, [heads, tokens, dim] each, the batch of one row taken off."""

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    scaling: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


class AttentionContext(Protocol):
    def attend(self, call: AttentionCall) -> torch.Tensor:
        """[tokens, heads, value_dim]"""


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    paged: AttentionContext | None = None,
    **unknown: object,
) -> tuple[torch.Tensor, None]:
    name = type(module).__name__
    if paged is None:
        raise UnsupportedModel(name, "attention layers that do not receive the caller's keyword arguments")
    if is_causal is False or optional_attribute(module, "is_causal", True) is False:
        raise UnsupportedModel(name, "bidirectional attention (is_causal=False)")
    if dropout:
        raise UnsupportedModel(name, "dropout at inference")
    for argument, given in unknown.items():
        if given is not None and argument not in IGNORED_ARGUMENTS:
            raise UnsupportedModel(name, f"the attention argument {argument!r}")
    call = AttentionCall(
        layer=_layer_index(module),
        query=query[0],
        key=key[0],
        value=value[0],
        mask=attention_mask,
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return paged.attend(call).unsqueeze(0), None


def _layer_index(module: torch.nn.Module) -> int:
    index = optional_attribute(module, "layer_idx", None)
    if not isinstance(index, int):
        raise UnsupportedModel(type(module).__name__, "attention layers without a layer index")
    return index


@dataclass(slots=True)
class LayerDiscovery:
    """Learns each layer's shape from one tiny forward, and compares the mask a model wants with the one we compute.

    Masks arrive as a table over probe positions (see `probe_mask`), far beyond the few tokens of the dry forward, so that a
    window or chunk larger than those tokens is noticed too.
    """

    model: str
    layers: dict[int, LayerSpec] = field(default_factory=dict)
    keys: list[torch.Tensor] = field(default_factory=list)
    """Kept alive, so that equal addresses mean equal tensors and not reused memory."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if call.layer in self.layers:
            raise UnsupportedModel(self.model, "more than one attention call a layer")
        if any(key.data_ptr() == call.key.data_ptr() for key in self.keys):
            raise UnsupportedModel(self.model, "layers that share another layer's KV")
        self.keys.append(call.key)
        self._check_mask(call)
        kv_heads, _, key_dim = call.key.shape
        self.layers[call.layer] = LayerSpec(
            kv_heads=kv_heads,
            key_dim=key_dim,
            value_dim=call.value.shape[2],
            scaling=call.scaling,
            window=call.window,
            softcap=call.softcap,
            has_sinks=call.sinks is not None,
        )
        heads, tokens, _ = call.query.shape
        return call.value.new_zeros(tokens, heads, call.value.shape[2])

    def _check_mask(self, call: AttentionCall) -> None:
        positions = probe_positions()
        distance = positions[:, None] - positions[None, :]
        ours = distance >= 0
        if call.window is not None:
            ours &= distance < call.window
        wanted = call.mask
        if wanted is not None and (wanted.shape[-2:] != ours.shape or not torch.equal(wanted[0, 0], ours)):
            raise UnsupportedModel(self.model, "an attention mask that is neither causal nor a sliding window")


def probe_positions() -> torch.Tensor:
    """Positions whose pairwise distances tell masks apart: around every power of two up to a million, and some odd ones."""
    near_powers = [(1 << power) + shift for power in range(3, 21) for shift in (-1, 0, 1)]
    return torch.tensor(sorted({*range(7), 11, 100, 3000, 7777, 50_000, *near_powers}))


def probe_mask(*, mask_function: MaskFunction, attention_mask: torch.Tensor | None, **_: object) -> torch.Tensor | None:
    """What `transformers` asks for a mask under our name.

    Steps give no attention mask and get none back. The dry forward gives one of ones, and gets the answers of the model's
    mask function at the probe positions, which `LayerDiscovery` compares with ours.
    """
    if attention_mask is None:
        return None
    positions = probe_positions()
    try:
        seen = mask_function(0, 0, positions[:, None], positions[None, :])
    except (IndexError, RuntimeError, ValueError) as reason:  # a mask tied to the tokens of this very batch
        raise UnsupportedModel(str(mask_function), "an attention mask that depends on the batch") from reason
    return torch.as_tensor(seen).expand(len(positions), len(positions))[None, None]


def register_attention() -> None:
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, probe_mask)


@dataclass(frozen=True, slots=True)
class GatherAttention:
    """The reference: copies each sequence's blocks together, then attends with torch."""

    batch: PackedBatch
    kv: list[LayerKv]
    written: LayerWritten | None = None

    def attend(self, call: AttentionCall) -> torch.Tensor:
        kv = self.kv[call.layer]
        write_gathered(kv, self.batch, call.key, call.value)
        if self.written is not None:
            self.written(call.layer)
        spec = LayerSpec(call.key.shape[0], call.key.shape[2], call.value.shape[2], call.scaling, call.window, call.softcap)
        return attend_gathered(spec, kv, self.batch, call.query, call.sinks)
