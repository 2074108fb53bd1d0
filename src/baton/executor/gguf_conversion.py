"""Writes the folder of a GGUF file: configuration, tokeniser and chat template, and if asked bfloat16 safetensors.

`transformers` reads the file: it knows names, shapes and permutations of weights. Its reader is called directly rather than
`from_pretrained(gguf_file=…)`, which would need another package only to place weights on devices. How many tensors it has
read it tells a progress bar of its own only, for which ours stands in while it reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers import modeling_gguf_pytorch_utils as gguf_reading
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.utils import logging as transformers_logging

from baton.core.errors import BatonError
from baton.executor.gguf_header import TAKE_ANOTHER, UnreadableGguf
from baton.executor.model_support import UnsupportedModel

REASON_CHARS_MAX = 300
LIBRARY_BAR = "tqdm"
"""What the library's reader calls its progress bar."""

Converted = Callable[[int, int], None]
"""Called with how many tensors are converted, and of how many."""
Part = TypeVar("Part")


def untold(_done: int, _total: int) -> None:
    """For callers that need not know."""


def convert_gguf(gguf: Path, target: Path, with_weights: bool, converted: Converted = untold) -> None:
    """Raises UnsupportedModel or UnreadableGguf, in one line, where the file cannot be converted."""
    try:
        _convert(gguf, target, with_weights, converted)
    except BatonError:
        raise
    except Exception as error:
        # What a library raises over a strange file is as many-fold as the strangeness; none of it concerns anything else.
        reason = str(error).strip().partition("\n")[0][:REASON_CHARS_MAX]
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise UnreadableGguf(f"{gguf.name} cannot be converted: {kind}{reason.rstrip('.')}; {TAKE_ANOTHER}") from error


def _convert(gguf: Path, target: Path, with_weights: bool, converted: Converted) -> None:
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    config: PretrainedConfig = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    ends = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=_end_ids(config, tokenizer.eos_token_id),
        pad_token_id=tokenizer.pad_token_id,
    )
    if with_weights:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
        take_floats(gguf, model, torch.bfloat16, converted)
        model.generation_config = ends
        model.save_pretrained(target)
    else:
        config.save_pretrained(target)
        ends.save_pretrained(target)
    tokenizer.save_pretrained(target)


def take_floats(gguf: Path, model: PreTrainedModel, dtype: torch.dtype, converted: Converted = untold) -> None:
    """Give a model on the meta device the weights of the file, as floats."""
    with _counted(converted):
        parts = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model, torch_dtype=dtype)  # type: ignore[no-untyped-call]
    model.load_state_dict(parts["tensors"], strict=False, assign=True)
    model.tie_weights()
    check_whole(gguf, model)


def check_whole(gguf: Path, model: PreTrainedModel) -> None:
    absent = [name for name, weight in model.named_parameters() if weight.is_meta]
    if absent:
        raise UnsupportedModel(gguf.name, f"weights that the file does not hold ({', '.join(absent[:3])})")


@contextlib.contextmanager
def _counted(converted: Converted) -> Iterator[None]:
    """Tell of the tensors that the library reads inside this block. One that has no such bar any more tells nothing."""
    library = vars(gguf_reading)
    bar = library.get(LIBRARY_BAR)

    def told(parts: Iterable[Part], **_: object) -> Iterator[Part]:
        every = list(parts)
        for done, part in enumerate(every):
            converted(done, len(every))
            yield part
        converted(len(every), len(every))

    library[LIBRARY_BAR] = told
    try:
        yield
    finally:
        library[LIBRARY_BAR] = bar


def _end_ids(config: PretrainedConfig, tokenizer_end: int | None) -> list[int]:
    """The end-of-text ids of configuration and tokeniser, each once."""
    configured = config.eos_token_id
    ids = [] if configured is None else configured if isinstance(configured, list) else [configured]
    return sorted({*ids, *([] if tokenizer_end is None else [tokenizer_end])})
