"""Loads the kernels of this folder and calls them through ctypes.

A wheel for x86-64 has them built in variants, of which this CPU's best is taken if the wheel's sources are still those it
was built of. Else they are compiled for this machine at first use. That library is cached under a hash of sources, flags,
compiler and CPU, so a change of any compiles a new one. It is made in a temporary folder and renamed, so two processes may
compile at once. Where another user may have written to the cache, or the cache cannot be written, it is compiled into a
private folder at every start. Without either there are no kernels, and callers use torch instead.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.core.start_stage import OnStage, no_stages
from baton.executor.cache_folder import KERNELS, MAKING, private_cache
from baton.executor.cpu import kernel_build
from baton.executor.private_files import UnsafeFile, check_file
from baton.executor.scratch_folder import scratch_folder

log = logging.getLogger(__name__)

X86_64 = ("x86_64", "AMD64")
OPENMP = "libgomp"
LANES = 16
TILE_KEYS = 128
PANEL = 32
SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "f32"}

_Pointer = ctypes.c_void_p
_Stride = ctypes.c_int64
_Int = ctypes.c_int32
_Float = ctypes.c_float


class AttentionArguments(ctypes.Structure):
    """The same fields as in kernels.cpp."""

    _fields_ = [
        ("query", _Pointer),
        ("query_token_stride", _Stride),
        ("query_head_stride", _Stride),
        ("out", _Pointer),
        ("keys", _Pointer),
        ("values", _Pointer),
        ("block_stride", _Stride),
        ("key_head_stride", _Stride),
        ("value_head_stride", _Stride),
        ("query_starts", _Pointer),
        ("contexts", _Pointer),
        ("tables", _Pointer),
        ("table_stride", _Stride),
        ("sinks", _Pointer),
        ("sequences", _Int),
        ("heads", _Int),
        ("kv_heads", _Int),
        ("key_dim", _Int),
        ("value_dim", _Int),
        ("block_size", _Int),
        ("window", _Int),
        ("scaling", _Float),
        ("softcap", _Float),
        ("threads", _Int),
    ]


class WriteArguments(ctypes.Structure):
    _fields_ = [
        ("key", _Pointer),
        ("value", _Pointer),
        ("key_token_stride", _Stride),
        ("key_head_stride", _Stride),
        ("value_token_stride", _Stride),
        ("value_head_stride", _Stride),
        ("keys", _Pointer),
        ("values", _Pointer),
        ("block_stride", _Stride),
        ("key_pool_head_stride", _Stride),
        ("value_pool_head_stride", _Stride),
        ("blocks", _Pointer),
        ("offsets", _Pointer),
        ("tokens", _Int),
        ("kv_heads", _Int),
        ("key_dim", _Int),
        ("value_dim", _Int),
        ("block_size", _Int),
        ("threads", _Int),
    ]


class LinearArguments(ctypes.Structure):
    _fields_ = [
        ("x", _Pointer),
        ("panels", _Pointer),
        ("bias", _Pointer),
        ("residual", _Pointer),
        ("out", _Pointer),
        ("rows", _Int),
        ("dim", _Int),
        ("outputs", _Int),
        ("threads", _Int),
    ]


class RotateArguments(ctypes.Structure):
    _fields_ = [
        ("qkv", _Pointer),
        ("token_stride", _Stride),
        ("cosines", _Pointer),
        ("sines", _Pointer),
        ("query_norm", _Pointer),
        ("key_norm", _Pointer),
        ("epsilon", _Float),
        ("tokens", _Int),
        ("heads", _Int),
        ("kv_heads", _Int),
        ("dim", _Int),
        ("threads", _Int),
    ]


class LinearMap(ctypes.Structure):
    _fields_ = [("panels", _Pointer), ("bias", _Pointer), ("dim", _Int), ("outputs", _Int)]


class LayerArguments(ctypes.Structure):
    """What of a decoder layer is the same in every step."""

    _fields_ = [
        ("first_norm", _Pointer),
        ("second_norm", _Pointer),
        ("query_norm", _Pointer),
        ("key_norm", _Pointer),
        ("qkv", LinearMap),
        ("o", LinearMap),
        ("gate_up", LinearMap),
        ("down", LinearMap),
        ("keys", _Pointer),
        ("values", _Pointer),
        ("block_stride", _Stride),
        ("key_head_stride", _Stride),
        ("value_head_stride", _Stride),
        ("first_epsilon", _Float),
        ("second_epsilon", _Float),
        ("qk_epsilon", _Float),
        ("scaling", _Float),
        ("softcap", _Float),
        ("window", _Int),
        ("heads", _Int),
        ("kv_heads", _Int),
        ("dim", _Int),
        ("block_size", _Int),
        ("gate_kind", _Int),
    ]

    @property
    def scratch_width(self) -> int:
        """Numbers of working memory for each token: as `layer_team` divides it."""
        return int(2 * self.qkv.dim + self.qkv.outputs + self.heads * self.dim + 3 * self.down.dim)


class StepArguments(ctypes.Structure):
    """What of a step is the same in every layer."""

    _fields_ = [
        ("cosines", _Pointer),
        ("sines", _Pointer),
        ("write_blocks", _Pointer),
        ("write_offsets", _Pointer),
        ("query_starts", _Pointer),
        ("contexts", _Pointer),
        ("tables", _Pointer),
        ("table_stride", _Stride),
        ("scratch", _Pointer),
        ("tokens", _Int),
        ("sequences", _Int),
        ("threads", _Int),
    ]


class NativeKernels:
    """The compiled functions for one number format. Tensors must stay alive and have the layout each method names."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        suffix = SUFFIXES[dtype]
        self.dtype = dtype
        self.attend = library[f"baton_attend_{suffix}"]
        self.write = library[f"baton_write_{suffix}"]
        self.rotate = library[f"baton_rotate_{suffix}"]
        self._linear = library[f"baton_linear_{suffix}"]
        self._layer = library[f"baton_layer_{suffix}"]
        self._norm = library[f"baton_norm_{suffix}"]
        self._gate = library[f"baton_gate_{suffix}"]
        self._head = library[f"baton_head_{suffix}"]
        for function in (self.attend, self.write, self.rotate, self._linear):
            function.restype = None
            function.argtypes = [_Pointer]
        self._norm.restype = self._gate.restype = self._head.restype = self._layer.restype = None
        self._layer.argtypes = [_Pointer, _Pointer, _Pointer, _Pointer]
        self._head.argtypes = [_Pointer, _Pointer, _Pointer, _Int, _Int, _Int, _Int]
        self._norm.argtypes = [_Pointer, _Pointer, _Pointer, _Stride, _Int, _Float, _Int]
        self._gate.argtypes = [_Pointer, _Pointer, _Stride, _Int, _Int, _Int]

    def linear(
        self, x: torch.Tensor, weights: PackedWeights, bias: torch.Tensor | None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x · W + bias + residual of contiguous rows, rounded once; `bias` is float32."""
        rows, dim = x.shape
        out = x.new_empty(rows, weights.outputs)
        arguments = LinearArguments(
            x=x.data_ptr(),
            panels=weights.panels.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            residual=None if residual is None else residual.data_ptr(),
            out=out.data_ptr(),
            rows=rows,
            dim=dim,
            outputs=weights.outputs,
            threads=torch.get_num_threads(),
        )
        self._linear(ctypes.addressof(arguments))
        return out

    def layer(self, layer: LayerArguments, step: StepArguments, x: torch.Tensor) -> torch.Tensor:
        """A whole decoder layer over contiguous rows; writes the KV of the step into the pool."""
        out = torch.empty_like(x)
        self._layer(ctypes.addressof(layer), ctypes.addressof(step), x.data_ptr(), out.data_ptr())
        return out

    def norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Root-mean-square norm of the rows of a contiguous x; `weight` is float32."""
        out = torch.empty_like(x)
        dim = x.shape[-1]
        threads = torch.get_num_threads()
        self._norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // dim, dim, epsilon, threads)
        return out

    def gate(self, x: torch.Tensor, kind: int) -> torch.Tensor:
        """activation(gate) × up of contiguous rows [gate, up]; kind 0 is silu, 1 gelu (tanh)."""
        rows, width = x.shape
        out = x.new_empty(rows, width // 2)
        self._gate(x.data_ptr(), out.data_ptr(), rows, width // 2, kind, torch.get_num_threads())
        return out

    def head(self, x: torch.Tensor, weights: PackedWeights) -> torch.Tensor:
        """The products of contiguous rows in float32."""
        rows, dim = x.shape
        count = len(weights.panels)
        out = torch.empty(rows, count * PANEL, dtype=torch.float32)
        threads = torch.get_num_threads()
        self._head(x.data_ptr(), weights.panels.data_ptr(), out.data_ptr(), rows, dim, count, threads)
        return out[:, : weights.outputs]


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Weights of a linear map in the order in which the kernels read them."""

    panels: torch.Tensor
    """[panels, dim / pair, PANEL, pair]; zeros fill the last panel"""
    outputs: int


def packed(weight: torch.Tensor) -> PackedWeights:
    """Of [outputs, dim] weights; `dim` is even."""
    pair = 2 if weight.dtype is torch.bfloat16 else 1
    missing = -len(weight) % PANEL
    padded = torch.cat([weight, weight.new_zeros(missing, weight.shape[1])]) if missing else weight
    panels = padded.view(-1, PANEL, weight.shape[1] // pair, pair).transpose(1, 2).contiguous()
    return PackedWeights(panels, len(weight))


def load_kernels(dtype: torch.dtype, on_stage: OnStage = no_stages) -> NativeKernels | None:
    """The kernels for a number format, compiled if necessary; None, with the reason logged, where impossible."""
    if dtype not in SUFFIXES:
        log.info("no native kernels for %s", dtype)
        return None
    library = _prebuilt_library() or _compiled_library(on_stage)
    return None if library is None else NativeKernels(library, dtype)


def _prebuilt_library() -> ctypes.CDLL | None:
    """The variant for this CPU, where the package came with kernels built of its sources."""
    folder = kernel_build.HERE / kernel_build.PREBUILT
    digest = folder / kernel_build.DIGEST_NAME
    if platform.machine() not in X86_64 or not digest.exists():
        return None
    if digest.read_text(encoding="utf-8").strip() != kernel_build.source_digest():
        log.info("the kernels that are built in %s are of other sources", folder)
        return None
    variant = kernel_build.best_variant(kernel_build.cpu_features(_cpuinfo()))
    try:
        library = _opened(folder / f"{variant.name}.so")
    except OSError as reason:
        log.warning("the kernels that are built in %s cannot be loaded: %s", folder, reason)
        return None
    log.info("native kernels: built for %s", variant.name)
    return library


def _compiled_library(on_stage: OnStage) -> ctypes.CDLL | None:
    """Compiled for this machine, now or before; None, with the reason logged, where that cannot be."""
    compiler = shutil.which("g++")
    if compiler is None:
        log.warning(
            "no native kernels: there is no g++ in PATH. torch does their work, which takes about three times the CPU time; "
            "install g++ (Debian: apt install g++) and start again"
        )
        return None
    try:
        return _library(compiler, on_stage)
    except (OSError, subprocess.TimeoutExpired) as reason:
        log.warning("no native kernels: %s", reason)
    except kernel_build.CompilerFailed as reason:
        log.warning("no native kernels: the compiler failed: %s", reason)
    return None


def _library(compiler: str, on_stage: OnStage) -> ctypes.CDLL:
    try:
        folder = private_cache(KERNELS)
        target = folder / f"{_key(compiler)}.so"
        if os.path.lexists(target):
            check_file(target)
            return _opened(target)
        on_stage("compiling the CPU kernels (once for this machine, some tens of seconds)")
        with scratch_folder(MAKING, folder) as scratch:
            return _opened(_compiled(compiler, scratch.path).replace(target))
    except UnsafeFile as danger:
        log.warning("native kernels are not kept, but compiled at every start: %s", danger)
    except OSError as reason:
        log.warning("native kernels are not kept, but compiled at every start: %s", reason)
    with scratch_folder("baton-kernels-") as scratch:
        return _opened(_compiled(compiler, scratch.path))


def _opened(path: Path) -> ctypes.CDLL:
    """The kernels take their OpenMP functions from the library that torch has loaded: both share one pool of threads."""
    ctypes.CDLL(_openmp(), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path))


def _openmp() -> str:
    """Of this process; wheels of torch bring one, whose name may have a hash in it."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        maps = []
    paths = [line.split(maxsplit=5)[-1] for line in maps if OPENMP in line]
    return paths[0] if paths else f"{OPENMP}.so.1"


def _compiled(compiler: str, folder: Path) -> Path:
    """The library for this machine, in a folder that nobody else writes."""
    made = folder / "kernels.so"
    began = time.monotonic()
    kernel_build.build(compiler, kernel_build.NATIVE, made)
    made.chmod(0o700)
    log.info("compiled native kernels in %.1f s", time.monotonic() - began)
    return made


def _key(compiler: str) -> str:
    version = subprocess.run([compiler, "-dumpfullversion"], capture_output=True, text=True, timeout=10, check=False).stdout
    digest = hashlib.blake2b(digest_size=12)
    for part in (kernel_build.source_digest(), " ".join(kernel_build.NATIVE), version, _cpu()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def _cpu() -> str:
    """The CPU's name and features, which `-march=native` depends on."""
    lines = _cpuinfo().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
