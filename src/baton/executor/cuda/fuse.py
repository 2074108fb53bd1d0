"""Replaces, in place, what proves itself replaceable on a CUDA device: layers, norms, the map to the vocabulary.

As on a CPU (`executor.probe`), one small forward is taken with everything in view, and a replacement must answer as the
original did. What does not qualify stays as `transformers` wrote it, over our attention all the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import pairwise

import torch
from transformers import PreTrainedModel

from baton.executor.cuda.attention import CudaAttention
from baton.executor.cuda.layers import FusedLayer, FusedNorm, PlainLinear, TabledRotary, has_common_parts
from baton.executor.cuda.pool import CudaPool
from baton.executor.cuda.products import ProductScratch
from baton.executor.cuda.rehearsal import one_chunk
from baton.executor.kv_pool import LayerSpec
from baton.executor.layer_probe import NORM_OFFSETS, PROBE_TOKENS, ModuleCall, recorder
from baton.executor.model_loading import LoadedModel, forward
from baton.executor.model_support import optional_attribute

log = logging.getLogger(__name__)

TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 1e-2, torch.float32: 1e-4}
"""Largest difference on the probe, relative to the largest value: rounding, not another formula."""
BLOCK_SIZE = 16
STEADY_ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Those in which a position's angle does not depend on how long the sequence is."""


@dataclass(frozen=True, slots=True)
class CudaProbe:
    attention: CudaAttention
    seen: dict[str, ModuleCall]
    tolerance: float

    def agrees(self, name: str, candidate: torch.nn.Module) -> bool:
        """Whether the candidate answers as the module of that name did. It may overwrite what it is given."""
        call = self.seen[name]
        arguments = [part.clone() if isinstance(part, torch.Tensor) else part for part in call.arguments]
        keywords = {key: self.attention if key == "paged" else value for key, value in call.keywords.items()}
        given, wanted = candidate(*arguments, **keywords).float(), call.output.float()
        return given.shape == wanted.shape and bool((given - wanted).abs().max() <= self.tolerance * wanted.abs().max())

    def first_agreeing(self, make: Callable[[float], torch.nn.Module], name: str) -> torch.nn.Module | None:
        for offset in NORM_OFFSETS:
            try:
                candidate = make(offset)
                if self.agrees(name, candidate):
                    return candidate
            except TypeError:  # a part is not what its name says
                return None
        return None


def fuse_for_cuda(loaded: LoadedModel, scratch: ProductScratch, positions: int) -> None:
    """`positions`: how many a sequence may have."""
    if loaded.dtype not in TOLERANCE:
        log.info("layers run as transformers wrote them: no fused ones for %s", loaded.dtype)
        return
    with torch.inference_mode():
        probe = take_probe(loaded, scratch)
        layers = _replace_layers(loaded.model, loaded.layers, scratch, probe)
        norms = _replace_norms(loaded.model, probe)
        _replace_head(loaded.model, scratch)
        _replace_rotations(loaded.model, positions)
        if scratch.invariant:
            _replace_linears(loaded.model, scratch)
    log.info("%d of %d layers fused, %d norms beside them", len(layers), len(loaded.layers), norms)


def take_probe(loaded: LoadedModel, scratch: ProductScratch) -> CudaProbe:
    model = loaded.model
    pool = CudaPool(loaded.layers, 1, BLOCK_SIZE, loaded.dtype, model.device)
    attention = one_chunk(pool, scratch, PROBE_TOKENS, BLOCK_SIZE)
    seen: dict[str, ModuleCall] = {}
    hooks = [
        module.register_forward_hook(recorder(name, seen), with_kwargs=True)
        for name, module in model.named_modules()
        if name
    ]
    ids = torch.arange(PROBE_TOKENS, device=model.device)[None]
    forward(model, ids, ids, 0, attention)
    for hook in hooks:
        hook.remove()
    return CudaProbe(attention, seen, TOLERANCE[loaded.dtype])


def _replace_layers(
    model: PreTrainedModel, layers: list[LayerSpec], scratch: ProductScratch, probe: CudaProbe
) -> list[FusedLayer]:
    stacks = (
        (name, part)
        for name, part in model.named_modules()
        if isinstance(part, torch.nn.ModuleList) and len(part) == len(layers)
    )
    name, parts = next(stacks, ("", torch.nn.ModuleList()))
    fused: list[FusedLayer] = []
    for index, layer in enumerate(parts):
        if f"{name}.{index}" not in probe.seen or not has_common_parts(layer, layers[index]):
            continue
        make = partial(FusedLayer, layer, layers[index], index, scratch)
        candidate = probe.first_agreeing(make, f"{name}.{index}")
        if isinstance(candidate, FusedLayer):
            parts[index] = candidate
            fused.append(candidate)
    for layer, following in pairwise(parts):
        if isinstance(layer, FusedLayer) and isinstance(following, FusedLayer):
            layer.then = following.first
    return fused


def _replace_norms(model: PreTrainedModel, probe: CudaProbe) -> int:
    replaced = 0
    for name, module in list(model.named_modules()):
        parameters = dict(module.named_parameters())
        if "Norm" not in type(module).__name__ or set(parameters) != {"weight"} or name not in probe.seen:
            continue
        candidate = probe.first_agreeing(partial(FusedNorm, module), name)
        if candidate is not None:
            model.set_submodule(name, candidate)
            replaced += 1
    return replaced


def _replace_head(model: PreTrainedModel, scratch: ProductScratch) -> None:
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if isinstance(head, torch.nn.Linear):
        # Rounded to bfloat16, near-equal logits would become ties.
        model.set_output_embeddings(PlainLinear(head, scratch, torch.float32))  # type: ignore[no-untyped-call]


def _replace_rotations(model: PreTrainedModel, positions: int) -> None:
    for name, module in list(model.named_modules()):
        steady = optional_attribute(module, "rope_type", None) in STEADY_ROTATIONS
        if steady and list(signature(module.forward).parameters) == ["x", "position_ids"]:
            tabled = TabledRotary.of(module, positions, torch.empty(0, dtype=model.dtype, device=model.device))
            if tabled is not None:
                model.set_submodule(name, tabled)


def _replace_linears(model: PreTrainedModel, scratch: ProductScratch) -> None:
    """In layers that stay as they are: the library's products take another way for another number of rows."""
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear):
            model.set_submodule(name, PlainLinear(module, scratch))
    left = [
        name
        for name, module in model.named_modules()
        if not isinstance(module, torch.nn.Embedding) and any(own.dim() > 1 for own in module.parameters(recurse=False))
    ]
    if left:
        log.warning("not batch-invariant: %d parts multiply in a way of their own, the first is %s", len(left), left[0])
