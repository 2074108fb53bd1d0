"""Child process of `baton bench gpu`: measures the GPU's rates, then runs parts and writes notes."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from baton.bench.gpu_part_processes import note, note_done
from baton.bench.gpu_parts import PARTS, GpuBench, Scale, measured_rates

LIBRARIES = ("torch", "triton", "transformers", "numpy", "flashinfer-python", "flash-attn")


def work(parts: Sequence[str], notes: Path, scale: Scale, device: str = "cuda") -> None:
    note(notes, "machine", describe_gpu())
    bench = GpuBench(scale, device, said=_say)
    bench.rates = measured_rates(device)
    for name in parts:
        note(notes, "begin", name)
        _say(name)
        began_s = time.perf_counter()
        result = PARTS[name](bench)
        result.rates, result.took_s = bench.rates, time.perf_counter() - began_s
        note_done(notes, result)
    bench.close()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def describe_gpu() -> dict[str, str]:
    machine = {"python": platform.python_version(), "system": platform.platform(), "cores": str(os.cpu_count())}
    for library in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            machine[library] = importlib.metadata.version(library)
    if torch.cuda.is_available():
        known = torch.cuda.get_device_properties(0)
        machine |= {"gpu": known.name, "memory": f"{known.total_memory / 2**30:.0f} GiB", "driver": f"driver {_driver()}"}
    return machine


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return said.splitlines()[0].strip() if said else "unknown"
