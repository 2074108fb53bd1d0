"""Writes a GGUF file as a folder of bfloat16 safetensors, configuration, tokeniser and chat template.

`transformers` reads the file: it knows names, shapes and permutations of weights. Its reader is called directly rather than
`from_pretrained(gguf_file=…)`, which would need another package only to place weights on devices.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.utils import logging as transformers_logging

from baton.core.errors import BatonError
from baton.executor.gguf_header import TAKE_ANOTHER, UnreadableGguf
from baton.executor.model_support import UnsupportedModel

REASON_CHARS_MAX = 300


def convert_gguf(gguf: Path, target: Path) -> None:
    """Raises UnsupportedModel or UnreadableGguf, in one line, where the file cannot be converted."""
    try:
        _convert(gguf, target)
    except BatonError:
        raise
    except Exception as error:
        # What a library raises over a strange file is as many-fold as the strangeness; none of it concerns anything else.
        reason = str(error).strip().partition("\n")[0][:REASON_CHARS_MAX]
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise UnreadableGguf(f"{gguf.name} cannot be converted: {kind}{reason.rstrip('.')}; {TAKE_ANOTHER}") from error


def _convert(gguf: Path, target: Path) -> None:
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    model = _read_model(gguf)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=_end_ids(model, tokenizer.eos_token_id),
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _read_model(gguf: Path) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    parts = load_gguf_checkpoint(  # type: ignore[no-untyped-call]
        str(gguf), return_tensors=True, model_to_load=model, torch_dtype=torch.bfloat16
    )
    model.load_state_dict(parts["tensors"], strict=False, assign=True)
    model.tie_weights()
    absent = [name for name, weight in model.named_parameters() if weight.is_meta]
    if absent:
        raise UnsupportedModel(gguf.name, f"weights that the file does not hold ({', '.join(absent[:3])})")
    return model


def _end_ids(model: PreTrainedModel, tokenizer_end: int | None) -> list[int]:
    """The end-of-text ids of configuration and tokeniser, each once."""
    configured = model.config.eos_token_id
    ids = [] if configured is None else configured if isinstance(configured, list) else [configured]
    return sorted({*ids, *([] if tokenizer_end is None else [tokenizer_end])})
