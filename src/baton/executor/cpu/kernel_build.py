"""How the kernels of this folder are compiled: for the machine that this is, or in variants for a wheel.

Imports nothing but the standard library, so that tools that build a wheel need nothing else. Libraries are not linked to
OpenMP: they take its functions from the one that torch has loaded, whatever its file is called, so that both share one pool
of threads and one library fits every torch.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PREBUILT = "prebuilt"
"""Folder beside the sources in a wheel: a library for each variant, and the digest of the sources that they are made of."""
DIGEST_NAME = "sources.digest"
COMPILE_FLAGS = ("-c", "-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-strict-aliasing")
LINK_FLAGS = ("-shared", "-s")
NATIVE = ("-march=native",)
COMPILE_S_MAX = 300

_V3 = ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """What a wheel has kernels for."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]
    """What /proc/cpuinfo must list."""


def _variant(name: str, flags: Sequence[str], needs: Sequence[str]) -> KernelVariant:
    return KernelVariant(name, tuple(flags), frozenset(needs))


VARIANTS = (
    _variant(
        "x86-64-v4-vnni-bf16",
        ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"),
        (*_V4, "avx512_vnni", "avx512_bf16"),
    ),
    _variant("x86-64-v4-vnni", ("-march=x86-64-v4", "-mavx512vnni"), (*_V4, "avx512_vnni")),
    _variant("x86-64-v4", ("-march=x86-64-v4",), _V4),
    _variant("x86-64-v3-vnni", ("-march=x86-64-v3", "-mavxvnni"), (*_V3, "avx_vnni")),
    _variant("x86-64-v3", ("-march=x86-64-v3",), _V3),
    _variant("x86-64", ("-march=x86-64",), ()),
)
"""For x86-64, the best first; every such machine runs the last."""


class CompilerFailed(Exception):
    """The compiler's own words."""


def sources() -> list[Path]:
    return sorted(HERE.glob("*.cpp"))


def source_digest() -> str:
    """Of the sources, the headers beside them and the flags for all variants."""
    digest = hashlib.blake2b(digest_size=16)
    for path in (*sources(), *sorted(HERE.glob("*.h"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr((COMPILE_FLAGS, LINK_FLAGS, [(one.name, one.flags) for one in VARIANTS])).encode())
    return digest.hexdigest()


def build(compiler: str, flags: Sequence[str], made: Path) -> None:
    """Compile all sources into one library. Raises CompilerFailed, OSError or subprocess.TimeoutExpired."""
    objects = [made.with_name(f"{made.stem}.{source.stem}.o") for source in sources()]
    for source, compiled in zip(sources(), objects, strict=True):
        _run([compiler, *COMPILE_FLAGS, *flags, "-o", str(compiled), str(source)])
    _run([compiler, *LINK_FLAGS, "-o", str(made), *map(str, objects)])
    for compiled in objects:
        compiled.unlink()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S_MAX, check=False)
    if done.returncode != 0:
        raise CompilerFailed(done.stderr.strip()[-800:])


def best_variant(features: frozenset[str]) -> KernelVariant:
    """The variant for an x86-64 CPU with these features."""
    return next(variant for variant in VARIANTS if variant.needs <= features)


def cpu_features(cpuinfo: str) -> frozenset[str]:
    """What this CPU has and may use, from the text of /proc/cpuinfo."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
