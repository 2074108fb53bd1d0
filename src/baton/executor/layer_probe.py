"""One small forward that records the inputs and the output of every module of a model.

Replacements of modules are checked against it (see `fuse_model`): the same input must give the same output.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel

from baton.core.engine.plan import Start
from baton.core.engine.request import Sampling, frozen_tokens
from baton.executor.contract import ExecutorShape
from baton.executor.cpu.fused_layers import (
    TOLERANCE,
    FastLayer,
    FastNorm,
    has_common_parts,
    pack_head,
)
from baton.executor.cpu.native_kernels import LANES, NativeKernels
from baton.executor.cpu.packed_modules import can_pack, packed_linear
from baton.executor.kv_pool import KvPool, LayerSpec
from baton.executor.model_loading import forward
from baton.executor.packing import FeedRange, PackedBatch, pack
from baton.executor.paged_attention import GatherAttention
from baton.executor.slot_table import SlotTable

log = logging.getLogger(__name__)

PROBE_TOKENS = 5
NORM_OFFSETS = (0.0, 1.0)
"""Norms multiply by their weights, or by one plus their weights."""
PACKED_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of one module."""

    arguments: tuple[object, ...]
    keywords: dict[str, object]
    output: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerProbe:
    batch: PackedBatch
    pool: KvPool
    seen: dict[str, ModuleCall]

    def agrees(self, name: str, candidate: torch.nn.Module, tolerance: float) -> bool:
        """Whether the candidate's output equals that of the module of this name, within the tolerance."""
        call = self.seen[name]
        keywords = dict(call.keywords)
        if "paged" in keywords:
            keywords["paged"] = GatherAttention(self.batch, self.pool.layers)
        given, wanted = candidate(*call.arguments, **keywords).float(), call.output.float()
        return given.shape == wanted.shape and bool((given - wanted).abs().max() <= tolerance * wanted.abs().max())


def fuse_model(model: PreTrainedModel, layers: list[LayerSpec], kernels: NativeKernels) -> bool:
    """Replace, in place, the modules whose replacements agree with them, and log how many. Whether all that adds up was
    replaced, so that a row has the same bits in every batch."""
    with torch.inference_mode():
        probe = take_probe(model, layers, kernels.dtype)
        fast = _replace_layers(model, layers, kernels, probe)
        norms = _replace_norms(model, kernels, probe)
        packed = _pack_products(model, kernels, probe)
        head = pack_head(model, kernels)
    log.info("%d of %d layers fused; beside them %d norms and %d products", fast, len(layers), norms, packed)
    return fast == len(layers) and norms == 1 and head  # one norm stands behind the layers


def take_probe(model: PreTrainedModel, layers: list[LayerSpec], dtype: torch.dtype) -> LayerProbe:
    batch = _probe_batch()
    pool = KvPool(layers, 1, LANES, dtype)
    seen: dict[str, ModuleCall] = {}
    hooks = [
        module.register_forward_hook(recorder(name, seen), with_kwargs=True)
        for name, module in model.named_modules()
        if name
    ]
    forward(model, batch.ids, batch.positions, batch.logit_rows, GatherAttention(batch, pool.layers))
    for hook in hooks:
        hook.remove()
    return LayerProbe(batch, pool, seen)


Hook = Callable[[torch.nn.Module, tuple[object, ...], dict[str, object], object], None]


def recorder(name: str, seen: dict[str, ModuleCall]) -> Hook:
    def record(_: torch.nn.Module, arguments: tuple[object, ...], keywords: dict[str, object], output: object) -> None:
        if isinstance(output, torch.Tensor):
            seen[name] = ModuleCall(arguments, keywords, output)

    return record


def _probe_batch() -> PackedBatch:
    slots = SlotTable(ExecutorShape(slots=1, blocks=1, block_size=LANES, context_tokens=LANES))
    tokens = frozen_tokens(range(PROBE_TOKENS))
    first_block = np.zeros(1, dtype=np.int32)
    slots.start(Start(0, 0, tokens, PROBE_TOKENS, 0, LANES, Sampling(seed=0), first_block))
    return pack(slots, [FeedRange(0, 0, PROBE_TOKENS, samples=True)], np.empty(0, dtype=np.int32))


def _replace_layers(model: PreTrainedModel, layers: list[LayerSpec], kernels: NativeKernels, probe: LayerProbe) -> int:
    replaced = 0
    stack = next(
        (
            (name, part)
            for name, part in model.named_modules()
            if isinstance(part, torch.nn.ModuleList) and len(part) == len(layers)
        ),
        None,
    )
    if stack is None:
        return 0
    name, parts = stack
    for index, spec in enumerate(layers):
        layer = parts[index]
        if f"{name}.{index}" not in probe.seen or not has_common_parts(layer, spec):
            continue
        fast = _first_agreeing(
            partial(FastLayer, layer, spec, index, kernels),
            f"{name}.{index}",
            probe,
            TOLERANCE[kernels.dtype],
        )
        if fast is not None:
            parts[index] = fast
            replaced += 1
    return replaced


def _first_agreeing(
    make: Callable[[float], torch.nn.Module], name: str, probe: LayerProbe, tolerance: float
) -> torch.nn.Module | None:
    for offset in NORM_OFFSETS:
        try:
            candidate = make(offset)
        except TypeError:  # a part is not of the expected type
            return None
        if probe.agrees(name, candidate, tolerance):
            return candidate
    return None


def _replace_norms(model: PreTrainedModel, kernels: NativeKernels, probe: LayerProbe) -> int:
    replaced = 0
    for name, module in list(model.named_modules()):
        parameters = dict(module.named_parameters())
        is_norm = "Norm" in type(module).__name__ and set(parameters) == {"weight"} and name in probe.seen
        if not is_norm or parameters["weight"].numel() % LANES:
            continue
        fast = _first_agreeing(partial(FastNorm, module, kernels), name, probe, TOLERANCE[kernels.dtype])
        if fast is not None:
            model.set_submodule(name, fast)
            replaced += 1
    return replaced


def _pack_products(model: PreTrainedModel, kernels: NativeKernels, probe: LayerProbe) -> int:
    """Pack the large products of layers that are not replaced."""
    packed = 0
    for name, module in list(model.named_modules()):
        is_large = type(module) is torch.nn.Linear and name in probe.seen and name.rpartition(".")[2] in PACKED_NAMES
        if is_large and can_pack(module):
            model.set_submodule(name, packed_linear([module], kernels))
            packed += 1
    return packed
