"""A model with the weights of a GGUF file: those that the kernels can multiply as they are stay so, others become floats.

`transformers` knows which tensor is which weight and which rows llama.cpp has permuted. A row has whole blocks, so permuting
a quantised weight is permuting its rows; how, is found by permuting their numbers.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    Gemma2TensorProcessor,
    LlamaTensorProcessor,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from baton.executor.cpu.native_kernels import NativeKernels, PackedWeights, WeightFormat
from baton.executor.cpu.packed_modules import FastHead, KeptEmbedding, PackedLinear, can_pack
from baton.executor.gguf_conversion import check_whole, take_floats
from baton.executor.gguf_header import GgufTensor, read_gguf_header
from baton.executor.paged_attention import ATTENTION_NAME

log = logging.getLogger(__name__)

KEEPING = (TensorProcessor, LlamaTensorProcessor, Gemma2TensorProcessor)
"""Those that permute rows of matrices and do nothing else to them."""
FLOAT_KINDS = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)


def read_gguf_model(
    gguf: Path, config: PretrainedConfig, dtype: torch.dtype, kernels: NativeKernels | None
) -> PreTrainedModel:
    """Without kernels, or for an architecture whose tensors are rearranged, all weights become floats of `dtype`."""
    header = read_gguf_header(gguf)
    make = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)
    processor: TensorProcessor = make(config=config.to_dict())  # type: ignore[no-untyped-call]
    with _parameters_on_meta():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation=ATTENTION_NAME
        )
    if kernels is None or type(processor) not in KEEPING:
        why = "there are no kernels for them" if kernels is None else f"of {header.architecture} no other way is known"
        log.info("weights: all of %s as %s: %s", gguf.name, str(dtype).removeprefix("torch."), why)
        take_floats(gguf, model, dtype)
        return model
    names = get_gguf_hf_weights_map(model, processor)
    tensors = _Tensors(np.memmap(gguf, dtype=np.uint8, mode="r"), processor, names)
    needed = [tensor for tensor in header.tensors if tensor.name in names]
    kept = [tensor for tensor in needed if _can_keep(model, names[tensor.name], tensor)]
    floats = [tensor for tensor in needed if tensor not in kept]
    model.load_state_dict({names[t.name]: tensors.floats(t, dtype) for t in floats}, strict=False, assign=True)
    model.tie_weights()
    for tensor in kept:
        _keep(model, names[tensor.name], tensors.packed(tensor, kernels), kernels)
    check_whole(gguf, model)
    _log_kinds(kept, floats, dtype)
    return model


@dataclass(frozen=True, slots=True)
class _Tensors:
    """The bytes of a file."""

    data: np.ndarray
    processor: TensorProcessor
    names: dict[str, str]

    def floats(self, tensor: GgufTensor, dtype: torch.dtype) -> torch.Tensor:
        values = dequantize(self._rows(tensor), GGMLQuantizationType(tensor.kind)).reshape(tensor.shape)
        return torch.from_numpy(np.array(self._placed(tensor, values), dtype=np.float32)).to(dtype)

    def packed(self, tensor: GgufTensor, kernels: NativeKernels) -> PackedWeights:
        outputs, dim = tensor.shape
        order = self._placed(tensor, np.arange(outputs).reshape(outputs, 1))
        return kernels.pack(_format_of(tensor), self._rows(tensor), order.reshape(outputs), dim)

    def _rows(self, tensor: GgufTensor) -> np.ndarray:
        bytes_ = self.data[tensor.offset : tensor.offset + tensor.bytes]
        return bytes_.reshape(int(np.prod(tensor.shape[:-1])), -1)

    def _placed(self, tensor: GgufTensor, values: np.ndarray) -> np.ndarray:
        """In the order that the model wants."""
        placed = self.processor.process(  # type: ignore[no-untyped-call]
            weights=values, name=tensor.name, tensor_key_mapping=self.names, parsed_parameters={}
        )
        return np.asarray(placed.weights)


def _format_of(tensor: GgufTensor) -> WeightFormat:
    return WeightFormat[GGMLQuantizationType(tensor.kind).name]


def _can_keep(model: PreTrainedModel, name: str, tensor: GgufTensor) -> bool:
    path, _, leaf = name.rpartition(".")
    if leaf != "weight" or GGMLQuantizationType(tensor.kind).name not in WeightFormat.__members__:
        return False
    module = model.get_submodule(path)
    if type(module) is torch.nn.Embedding:
        return True
    head: object = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return type(module) is torch.nn.Linear and (can_pack(module) or module is head)


def _keep(model: PreTrainedModel, name: str, weights: PackedWeights, kernels: NativeKernels) -> None:
    """Replace the module whose weight has this name, and the map to the vocabulary if it is tied to it."""
    path = name.rpartition(".")[0]
    module, head = model.get_submodule(path), model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if isinstance(module, torch.nn.Embedding):
        if isinstance(head, torch.nn.Linear) and head.weight is module.weight:
            model.set_output_embeddings(FastHead(weights, kernels))  # type: ignore[no-untyped-call]
        model.set_submodule(path, KeptEmbedding(weights, kernels))
    elif module is head:
        model.set_output_embeddings(FastHead(weights, kernels))  # type: ignore[no-untyped-call]
    elif isinstance(module, torch.nn.Linear):
        bias = None if module.bias is None else module.bias.detach().float()
        model.set_submodule(path, PackedLinear(weights, bias, kernels))


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules made inside have parameters without memory; their buffers are real."""

    def on_meta(_module: torch.nn.Module, _name: str, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        return torch.nn.Parameter(parameter.to("meta"), requires_grad=False)

    register = torch.nn.modules.module.register_module_parameter_registration_hook
    handle = register(on_meta)  # type: ignore[arg-type]  # its annotation knows no hook that answers
    try:
        yield
    finally:
        handle.remove()


def _log_kinds(kept: list[GgufTensor], floats: list[GgufTensor], dtype: torch.dtype) -> None:
    """What is kept, and how many matrices of formats that could have been smaller are not."""
    told = [f"{count} {kind}" for kind, count in sorted(_kinds(kept).items())]
    log.info("weights: as in the file: %s", ", ".join(told) or "none")
    widened = _kinds([t for t in floats if GGMLQuantizationType(t.kind) not in FLOAT_KINDS])
    if widened:
        told = [f"{count} {kind}" for kind, count in sorted(widened.items())]
        log.info("weights: as %s, for want of kernels: %s", str(dtype).removeprefix("torch."), ", ".join(told))


def _kinds(tensors: list[GgufTensor]) -> Counter[str]:
    return Counter(GGMLQuantizationType(tensor.kind).name for tensor in tensors)
