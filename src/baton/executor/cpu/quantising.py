"""Quantises the weights of a model of floats when it is loaded: large products, the embedding and the map to the vocabulary.

Groups of 32 weights have a scale each, as in GGUF files: int8 is Q8_0; int4 is Q4_1, with embedding and vocabulary in Q8_0,
where an error costs most. Norms, biases and small maps stay floats.
"""

from __future__ import annotations

import logging

import torch
from transformers import PreTrainedModel

from baton.executor.cpu.native_kernels import GROUP, NativeKernels, PackedWeights, WeightFormat
from baton.executor.cpu.packed_modules import FastHead, KeptEmbedding, PackedLinear, can_pack

log = logging.getLogger(__name__)

FORMATS = {"int8": WeightFormat.Q8_0, "int4": WeightFormat.Q4_1}
LARGE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@torch.inference_mode()
def quantise_model(model: PreTrainedModel, quantization: str, kernels: NativeKernels) -> None:
    """In place. `quantization` is a key of FORMATS."""
    form, count = FORMATS[quantization], 0
    for name, module in list(model.named_modules()):
        if type(module) is torch.nn.Linear and name.rpartition(".")[2] in LARGE and _has_groups(module):
            bias = None if module.bias is None else module.bias.detach().float()
            model.set_submodule(name, PackedLinear(_encoded(module.weight, form, kernels), bias, kernels))
            count += 1
    _quantise_vocabulary(model, kernels)
    log.info("weights: %d products quantised as %s, the vocabulary as %s", count, form.name, WeightFormat.Q8_0.name)


def _has_groups(linear: torch.nn.Linear) -> bool:
    return can_pack(linear) and linear.in_features % GROUP == 0


def _encoded(weight: torch.Tensor, form: WeightFormat, kernels: NativeKernels) -> PackedWeights:
    return kernels.encode(form, weight.detach().contiguous())


def _quantise_vocabulary(model: PreTrainedModel, kernels: NativeKernels) -> None:
    embedding: torch.nn.Module = model.get_input_embeddings()
    head: object = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(head, torch.nn.Linear) or head.in_features % GROUP:
        return
    if [name for name, _ in head.named_parameters()] != ["weight"]:
        return
    weights = _encoded(head.weight, WeightFormat.Q8_0, kernels)
    is_tied = isinstance(embedding, torch.nn.Embedding) and embedding.weight is head.weight
    if type(embedding) is torch.nn.Embedding:
        own = weights if is_tied else _encoded(embedding.get_parameter("weight"), WeightFormat.Q8_0, kernels)
        model.set_input_embeddings(KeptEmbedding(own, kernels))
    model.set_output_embeddings(FastHead(weights, kernels))  # type: ignore[no-untyped-call]
