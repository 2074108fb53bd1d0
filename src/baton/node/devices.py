"""The device an engine computes on, and the settings that a device cannot serve.

Owns the answer to `--device auto` and every refusal that follows from a device. Refusals that follow from the settings alone
come before anything slow (`check_device`); the others once the engine has looked for devices (`choose_device`).
"""

from __future__ import annotations

import importlib.util
import logging
import os
from dataclasses import dataclass

from baton.core.config import BadConfig
from baton.executor.torch_build import TorchBuild, cannot_import, has_nvidia_gpu, need_torch, remark_on
from baton.node.settings import Attention, DeviceChoice, Dtype, EngineSettings, Quantization, SpeculateMethod

log = logging.getLogger("baton.engine")

ATTENTIONS = {DeviceChoice.CPU: ("auto", "native", "gather"), DeviceChoice.CUDA: ("auto", "triton")}
DTYPES = {
    DeviceChoice.CPU: ("float32", "bfloat16", "float16", "float64"),
    DeviceChoice.CUDA: ("float32", "bfloat16", "float16"),
}
QUANTISED_DTYPES = (Dtype.BFLOAT16, Dtype.FLOAT32)
"""Of what is not quantised in a model whose weights are, on a CPU."""
CUDA_DRAFTS_MAX = 15
"""With at most 16 tokens per sequence, one decode is one tile of attention."""
CUDA_NGRAM_MAX = 31
"""With at most 31, the kernel can rank matches by length and position in one number."""
NAMES = {DeviceChoice.CPU: "CPU", DeviceChoice.CUDA: "CUDA"}


@dataclass(frozen=True, slots=True)
class HostDevices:
    """The devices available to this process."""

    sees_cuda: bool
    """Whether torch can compute on a CUDA device."""
    has_triton: bool


def find_devices(asked: DeviceChoice = DeviceChoice.CPU) -> HostDevices:
    """Raises TorchUnusable where there is no torch to ask. With `auto`, logs where torch is not the machine's build."""
    build = _installed_build()
    if asked is DeviceChoice.AUTO:
        _log_other_build(build)
    return HostDevices(build.sees_cuda, importlib.util.find_spec("triton") is not None)


def _log_other_build(build: TorchBuild) -> None:
    """Log that torch is of the other kind than the machine."""
    remark = remark_on(build, has_nvidia_gpu(), "CUDA_VISIBLE_DEVICES" in os.environ)
    if remark is not None:
        log.log(remark.level, "%s", remark.text)


def _installed_build() -> TorchBuild:
    need_torch()
    try:
        # Imported here because torch takes seconds, which a check of settings must not cost.
        import torch
    except (ImportError, OSError) as error:
        raise cannot_import(error) from None
    return TorchBuild(torch.__version__, torch.version.cuda, torch.cuda.is_available())


def check_device(settings: EngineSettings) -> None:
    """Raise BadConfig for settings that are wrong on every machine."""
    if settings.device is not DeviceChoice.AUTO:
        _check_fits(settings, settings.device)


def choose_device(settings: EngineSettings, machine: HostDevices) -> DeviceChoice:
    """CPU or CUDA. Raises BadConfig where the chosen device is missing or does not support the settings."""
    check_device(settings)
    device = settings.device
    if device is DeviceChoice.AUTO:
        device = DeviceChoice.CUDA if machine.sees_cuda else DeviceChoice.CPU
        _check_fits(settings, device)
    if device is DeviceChoice.CUDA and not machine.sees_cuda:
        raise BadConfig("--device cuda: torch sees no CUDA device here, or is a build without CUDA; --device cpu needs none")
    if device is DeviceChoice.CUDA and not machine.has_triton:
        raise BadConfig("computing on CUDA needs triton: pip install 'baton-serve[cuda]', or stay with --device cpu")
    return device


def _check_fits(settings: EngineSettings, device: DeviceChoice) -> None:
    name, found = NAMES[device], "" if settings.device is device else f" (--device auto found {NAMES[device]})"
    if settings.attention not in ATTENTIONS[device]:
        choices = ", ".join(ATTENTIONS[device])
        raise BadConfig(f"--attention {settings.attention} is not for {name}, which has {choices}{found}")
    if settings.dtype not in DTYPES[device]:
        raise BadConfig(f"--dtype {settings.dtype} is not for {name}, which has {', '.join(DTYPES[device])}{found}")
    _check_quantization(settings, device, found)
    if device is DeviceChoice.CUDA:
        _check_drafts(settings, found)
    elif settings.batch_invariant:
        _check_exact(settings, found)


def _check_quantization(settings: EngineSettings, device: DeviceChoice, found: str) -> None:
    if settings.quantization not in (Quantization.INT8, Quantization.INT4):
        return
    if device is DeviceChoice.CUDA:
        raise BadConfig(f"--quantization {settings.quantization} is for a CPU{found}")
    if settings.dtype not in QUANTISED_DTYPES:
        raise BadConfig(
            f"--quantization {settings.quantization} needs --dtype bfloat16 or float32 for what is not quantised{found}"
        )


def wants_safetensors(settings: EngineSettings) -> bool:
    """Whether a GGUF file must be converted: where it is asked for, and where no kernels multiply its weights as they are.
    With `--device auto` the machine's GPU decides, since asking torch takes seconds."""
    on_gpu = settings.device is DeviceChoice.CUDA or (settings.device is DeviceChoice.AUTO and has_nvidia_gpu())
    return on_gpu or settings.quantization is Quantization.NONE or settings.dtype not in QUANTISED_DTYPES


def _check_exact(settings: EngineSettings, found: str) -> None:
    """On a CPU the native kernels are batch-invariant, and float64 gives equal tokens. The model is judged when loaded."""
    if settings.dtype == Dtype.FLOAT64:
        return
    if settings.attention == Attention.GATHER or settings.dtype == Dtype.FLOAT16:
        raise BadConfig(
            "--batch-invariant on a CPU needs the native kernels: --dtype bfloat16 or float32 without --attention gather, "
            f"or --dtype float64{found}"
        )


def _check_drafts(settings: EngineSettings, found: str) -> None:
    if settings.burst > 1 + CUDA_DRAFTS_MAX:
        raise BadConfig(
            f"--draft-tokens {settings.draft_tokens} is more than the {CUDA_DRAFTS_MAX} that CUDA can check{found}"
        )
    if settings.speculate is SpeculateMethod.NGRAM and settings.ngram_max > CUDA_NGRAM_MAX:
        raise BadConfig(f"--ngram-max {settings.ngram_max} is more than the {CUDA_NGRAM_MAX} looked for on CUDA{found}")
