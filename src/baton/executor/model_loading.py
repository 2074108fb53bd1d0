"""Loads a model folder and discovers the parameters of its attention layers. Only safetensors; never a model hub.

A folder that stands for a shape has no weights: they are drawn at random, straight into the device's memory.

Unsupported models are rejected by their configuration, then by their class, both before weights are read, and last by a
forward of a few tokens, which shows the arguments that layers really pass.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypedDict, cast

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from baton.core.errors import BatonError
from baton.core.setting import BadConfig
from baton.executor.cpu.native_kernels import NativeKernels
from baton.executor.dummy_weights import draw_weights
from baton.executor.fingerprint import model_mark
from baton.executor.gguf_folder import gguf_in
from baton.executor.kv_pool import LayerSpec
from baton.executor.light_transformers import without_compiler
from baton.executor.model_shapes import ModelShape, shape_fields, shape_in, shape_mark
from baton.executor.model_support import UnsupportedModel, check_config, optional_attribute, text_config
from baton.executor.paged_attention import ATTENTION_NAME, AttentionContext, LayerDiscovery, register_attention
from baton.executor.safetensors_header import FETCH_AGAIN, BadWeights

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

DRY_TOKENS = 3
REASON_CHARS_MAX = 300
"""Of what a library says about a model."""
PASSING = frozenset((errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.EIO))
"""Errors of the system that another start may not meet."""


class _LoadingInfo(TypedDict):
    """What `transformers` tells of loading weights: names of tensors, and shapes found and wanted."""

    missing_keys: set[str]
    mismatched_keys: set[tuple[str, tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: PreTrainedModel
    layers: list[LayerSpec]
    dtype: torch.dtype
    vocabulary: int
    context_tokens: int
    """Most positions the model supports."""
    mark: bytes
    """The part of the fingerprint that identifies the model; see `fingerprint`."""


def load_model(
    path: Path,
    dtype: str,
    device: str = "cpu",
    context_tokens: int | None = None,
    kernels: NativeKernels | None = None,
) -> LoadedModel:
    """`context_tokens`: the context that is asked for, which is refused before weights are read if the model has less.
    `kernels` multiply the weights of a GGUF file as they are; without them they become floats."""
    shape = shape_in(path)
    if shape is not None:
        check_positions(path, shape_config(shape.name), context_tokens)
        return load_shape(shape.name, dtype, device, shape.seed)
    number_format = _number_format(str(path), dtype)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # what it warns of is refused here
    register_attention()
    with _named(path):
        config = _read_config(path)
        check_config(config)
        check_positions(path, config, context_tokens)
        gguf = gguf_in(path)
        read = partial(_read_weights, path) if gguf is None else partial(_read_gguf, gguf, kernels=kernels)
        model = without_compiler(partial(read, config=config, dtype=number_format))
    # What fails from here on is the device's, and may pass: it says nothing of the files.
    model.to(device)  # type: ignore[arg-type]  # it takes what any module takes
    return _describe(model, config, number_format, model_mark(path))


def _read_config(path: Path) -> PretrainedConfig:
    known = json.loads((path / "config.json").read_text(encoding="utf-8")).get("model_type")
    if known not in CONFIG_MAPPING:
        raise UnsupportedModel(str(path), f"the architecture {known!r} (model_type in config.json)")
    config: PretrainedConfig = AutoConfig.from_pretrained(path, local_files_only=True)
    return config


def _read_weights(path: Path, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model with its weights. Raises BadWeights where one is missing or has another shape: the library would draw it at
    random."""
    loaded: object = AutoModelForCausalLM.from_pretrained(
        path,
        config=config,
        dtype=dtype,
        attn_implementation=ATTENTION_NAME,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        **_experts(config, dtype),
    )
    model, told = cast("tuple[PreTrainedModel, _LoadingInfo]", loaded)  # its annotation knows one of its two answers
    if missing := sorted(told["missing_keys"]):
        raise BadWeights(f"the weights in {path} lack the tensor {_some(missing)}; {FETCH_AGAIN}")
    if others := sorted((name, list(has), list(wants)) for name, has, wants in told["mismatched_keys"]):
        name, has, wants = others[0]
        raise BadWeights(
            f"the tensor {name} in {path} has the shape {has}, and config.json wants {wants}: weights and config.json are "
            "of two models; download both again"
        )
    return model


def _read_gguf(gguf: Path, config: PretrainedConfig, dtype: torch.dtype, kernels: NativeKernels | None) -> PreTrainedModel:
    # Imported here because it imports gguf, which few models need.
    from baton.executor.gguf_weights import read_gguf_model

    return read_gguf_model(gguf, config, dtype, kernels)


def _may_pass(error: Exception) -> bool:
    """Whether it is a matter of this machine now (its memory, disk, device, descriptors), and not of the files."""
    if isinstance(error, OSError):
        return error.errno in PASSING
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in ("CUDA error", "can't allocate memory"))


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """What a library raises over a model's files becomes one line with the folder's name."""
    try:
        yield
    except (BatonError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if _may_pass(error):
            raise
        # As many-fold as what can be wrong with a file; a fault of ours in reading one has its traceback in the debug log.
        reason = str(error).strip().partition("\n")[0][:REASON_CHARS_MAX]
        raise BadWeights(f"the model in {path} cannot be loaded: {type(error).__name__}: {reason}") from error


def check_positions(path: Path, config: PretrainedConfig, context_tokens: int | None) -> None:
    """Raises BadConfig where a longer context is asked for than the model has positions."""
    most = int(text_config(config).max_position_embeddings)
    if context_tokens is not None and context_tokens > most:
        raise BadConfig(
            f"--max-model-len {context_tokens} is more than the {most} positions of the model in {path}; "
            f"give at most {most}, or leave it out"
        )


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def load_shape(name: str, dtype: str, device: str = "cpu", seed: int = 0) -> LoadedModel:
    """A model of that shape with weights drawn from the seed; see `model_shapes`."""
    number_format = _number_format(name, dtype)
    config = shape_config(name)
    check_config(config)
    register_attention()
    with torch.device(device):  # tensors are created on their device, so no large one is copied
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=number_format, attn_implementation=ATTENTION_NAME, **_experts(config, number_format)
        )
    draw_weights(model, seed)
    return _describe(model, config, number_format, shape_mark(ModelShape(name, seed)))


def shape_config(name: str) -> PretrainedConfig:
    fields = dict(shape_fields(name))
    return AutoConfig.for_model(str(fields.pop("model_type")), **fields)


def _experts(config: PretrainedConfig, dtype: torch.dtype) -> dict[str, str]:
    """Keywords that make experts work in float64, which the default implementation does not support."""
    has_experts = optional_attribute(text_config(config), "num_experts", None) is not None
    return {"experts_implementation": "eager"} if has_experts and dtype is torch.float64 else {}


def _number_format(model: str, dtype: str) -> torch.dtype:
    if dtype not in DTYPES:
        raise UnsupportedModel(model, f"the number format {dtype!r} (known: {', '.join(DTYPES)})")
    return DTYPES[dtype]


def _describe(model: PreTrainedModel, config: PretrainedConfig, dtype: torch.dtype, mark: bytes) -> LoadedModel:
    model.requires_grad_(False)
    model.train(False)
    decoder = text_config(config)
    return LoadedModel(
        model=model,
        layers=discover_layers(model, int(decoder.num_hidden_layers)),
        dtype=dtype,
        vocabulary=int(decoder.vocab_size),
        context_tokens=int(decoder.max_position_embeddings),
        mark=mark,
    )


def discover_layers(model: PreTrainedModel, expected: int) -> list[LayerSpec]:
    """Run a few tokens through the model and record the arguments of each attention layer."""
    name = str(model.config.model_type)
    discovery = LayerDiscovery(name)
    row = torch.arange(DRY_TOKENS, device=model.device)[None]
    with torch.inference_mode():
        model(
            input_ids=torch.zeros_like(row),
            position_ids=row,
            attention_mask=torch.ones_like(row),
            use_cache=False,
            paged=discovery,
        )
    if sorted(discovery.layers) != list(range(expected)):
        raise UnsupportedModel(name, f"layers without attention ({len(discovery.layers)} of {expected} have it)")
    return [discovery.layers[index] for index in range(expected)]


def forward(
    model: PreTrainedModel,
    ids: torch.Tensor,
    positions: torch.Tensor,
    logit_rows: torch.Tensor | int,
    context: AttentionContext,
) -> torch.Tensor:
    """Logits of `logit_rows`, [rows, vocabulary]; of all rows if it is 0."""
    output = model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=logit_rows, paged=context)
    logits: torch.Tensor = output.logits[0]
    return logits
