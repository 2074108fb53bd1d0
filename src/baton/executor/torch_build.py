"""Which torch is installed, and what to tell where it is missing, too old, or of the other kind than the machine.

torch is no dependency of the package: on Linux x86-64 its default build is the CUDA build, several gigabytes that a machine
without an NVIDIA GPU has no use for, and an extra cannot choose between builds. The operator installs one; what needs torch
calls `need_torch` first. Nothing here imports torch, which takes seconds.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from baton.core.errors import SetupError

TORCH_LEAST = (2, 11)
"""The same as the lower bound of the extra `cuda` in pyproject.toml."""
SELECTOR = 'the install selector on PyTorch\'s website ("Get Started")'
HOW_TO_INSTALL = f"""\
  to serve on the CPU:     the pip command that {SELECTOR} shows for the CPU
  on an NVIDIA GPU:        pip install 'baton-serve[cuda]'    (several gigabytes)"""
DEVICES, WSL_DRIVER = Path("/dev"), Path("/usr/lib/wsl/lib/libcuda.so.1")
_GPU_NODE = re.compile(r"nvidia\d+")


class TorchUnusable(SetupError):
    """torch is missing, too old, or cannot be imported; the message has the commands that help."""


@dataclass(frozen=True, slots=True)
class TorchBuild:
    version: str
    cuda: str | None
    """The version of CUDA that it is built for; None for a build without CUDA."""
    sees_cuda: bool
    """Whether it can compute on a CUDA device now."""


@dataclass(frozen=True, slots=True)
class BuildRemark:
    """What an operator should know about torch and this machine."""

    level: int
    """As in `logging`."""
    text: str


def need_torch() -> None:
    """Raise TorchUnusable unless a torch that is new enough is installed."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:  # a folder that an uninstallation left has no origin
        raise TorchUnusable(f"torch is not installed, and Baton installs no build of it unasked:\n{HOW_TO_INSTALL}")
    try:
        found = version("torch")
    except PackageNotFoundError:
        return  # built in place; its version is known once it is imported
    if _is_older(found):
        raise TorchUnusable(f"torch {found} is older than {_dotted(TORCH_LEAST)}, the least that works:\n{HOW_TO_INSTALL}")


def cannot_import(error: Exception) -> TorchUnusable:
    """For a torch that is installed and does not load, such as one whose libraries are missing."""
    reason = str(error).strip().splitlines()
    return TorchUnusable(
        f"torch is installed but cannot be imported: {reason[0] if reason else type(error).__name__}\n{HOW_TO_INSTALL}"
    )


def has_nvidia_gpu(devices: Path = DEVICES, wsl_driver: Path = WSL_DRIVER) -> bool:
    """Whether this process may reach an NVIDIA GPU; torch is not asked. Inside WSL it has no device node of its own."""
    if (devices / "dxg").exists() and wsl_driver.exists():
        return True
    return devices.is_dir() and any(_GPU_NODE.fullmatch(node.name) for node in devices.iterdir())


def remark_on(build: TorchBuild, has_gpu: bool, hidden: bool) -> BuildRemark | None:
    """What to say when the CPU was chosen automatically. `hidden`: the environment says which CUDA devices are seen."""
    if build.sees_cuda:
        return None
    if build.cuda is None and has_gpu:
        return BuildRemark(
            logging.WARNING,
            f"this machine has an NVIDIA GPU, but torch {build.version} is a build without CUDA: serving on the CPU. "
            "For the GPU: pip uninstall torch, then pip install 'baton-serve[cuda]'; --device cpu is for the CPU without "
            "this warning",
        )
    if build.cuda is not None and has_gpu and not hidden:
        return BuildRemark(
            logging.WARNING,
            f"this machine has an NVIDIA GPU, but torch {build.version} cannot use it: serving on the CPU. Often the driver "
            f"is older than CUDA {build.cuda} needs (see nvidia-smi)",
        )
    if build.cuda is not None and not has_gpu:
        return BuildRemark(
            logging.INFO,
            f"torch {build.version} is the CUDA build, and this machine has no NVIDIA GPU: it serves on the CPU; the CPU "
            f"build is several gigabytes smaller ({SELECTOR} has its command)",
        )
    return None


def _is_older(found: str) -> bool:
    numbers = re.match(r"(\d+)\.(\d+)", found)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) < TORCH_LEAST


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
