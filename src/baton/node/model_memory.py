"""Whether weights and KV fit into the memory of a machine or its GPU: refused before they are read, not ended halfway."""

from __future__ import annotations

import logging
from pathlib import Path

from baton.core.errors import BatonError, SetupError
from baton.node.available_memory import whole_bytes
from baton.node.model_folder import ModelFolder, check_folder
from baton.node.settings import CPU_KV_BYTES, Dtype, EngineSettings

log = logging.getLogger(__name__)

BYTES = {Dtype.FLOAT64: 8, Dtype.FLOAT32: 4, Dtype.BFLOAT16: 2, Dtype.FLOAT16: 2}
GIB = 1 << 30


class TooLittleMemory(SetupError):
    """The machine, or its GPU, has less memory in all than the model needs."""


class OutOfMemory(BatonError):
    """Memory ran out at the start, which others may have taken."""


def check_memory(settings: EngineSettings, folder: Path, whole: int | None = None) -> None:
    """For a model on CPU. Raises TooLittleMemory; warns where the KV pool fits only while it is not full. `whole`: bytes of
    memory in all; None: as the kernel says."""
    whole = whole_bytes() if whole is None else whole
    if whole is None:
        return
    weights = _fitting_weights(settings, folder, whole, "here", "machine")
    kv = CPU_KV_BYTES if settings.kv_memory_bytes is None else settings.kv_memory_bytes
    if settings.blocks is not None or weights + kv <= whole:
        return
    fits = f"at most {whole - weights} fit beside the weights ({_shown(weights)} of {_shown(whole)})"
    if settings.kv_memory_bytes is not None:
        raise TooLittleMemory(f"--kv-memory {kv} is more than there is; {fits}")
    log.warning("a full KV pool of %s would not fit into memory: give --kv-memory; %s", _shown(kv), fits)


def check_gpu_memory(settings: EngineSettings, folder: Path, whole: int) -> None:
    """For a model on CUDA. Raises TooLittleMemory where its weights are larger than the whole GPU; what a step and KV take
    beside them is known when it is loaded."""
    _fitting_weights(settings, folder, whole, "on this GPU", "GPU")


def _fitting_weights(settings: EngineSettings, folder: Path, whole: int, where: str, has_more: str) -> int:
    model = check_folder(folder, own_template=False)
    weights, form = _weights_bytes(model, settings.dtype), "" if model.gguf is not None else f" as {settings.dtype}"
    if weights > whole:
        raise TooLittleMemory(
            f"the weights in {folder} take {_shown(weights)}{form}, and there are {_shown(whole)} of memory "
            f"{where} in all; use a smaller model{_smaller_dtype(settings.dtype)}, or a {has_more} with more"
        )
    return weights


def _weights_bytes(folder: ModelFolder, dtype: str) -> int:
    if folder.gguf is not None:
        return folder.gguf.stat().st_size
    return folder.elements * BYTES[Dtype(dtype)]


def _smaller_dtype(dtype: str) -> str:
    return ", or --dtype bfloat16" if BYTES[Dtype(dtype)] > BYTES[Dtype.BFLOAT16] else ""


def _shown(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
