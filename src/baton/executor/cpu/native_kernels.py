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
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
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
PARTS_MAX = 4
"""Parts of a linear map, each in a format of its own."""
GROUP = 32
GROUP_BYTES = 48
"""Of a quantised group of activations."""
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


class MapPart(ctypes.Structure):
    """Neighbouring outputs of a linear map in one format."""

    _fields_ = [("panels", _Pointer), ("format", _Int), ("outputs", _Int)]


class LinearMap(ctypes.Structure):
    _fields_ = [("parts", MapPart * PARTS_MAX), ("bias", _Pointer), ("count", _Int), ("dim", _Int), ("outputs", _Int)]


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
        widest = max(
            self.qkv.dim, self.heads * self.dim, self.down.dim
        )  # of what is quantised; a group takes less than that
        return int(2 * self.qkv.dim + self.qkv.outputs + self.heads * self.dim + 3 * self.down.dim + widest)


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
        self._lookup = library[f"baton_lookup_{suffix}"]
        self._encode = library[f"baton_encode_{suffix}"]
        self._pack = library["baton_pack"]
        self._panel_bytes = library["baton_panel_bytes"]
        for function in (self.attend, self.write, self.rotate):
            function.restype = None
            function.argtypes = [_Pointer]
        for function in (self._norm, self._gate, self._head, self._layer, self._linear, self._lookup):
            function.restype = None
        self._pack.restype = self._encode.restype = None
        self._panel_bytes.restype = _Stride
        self._panel_bytes.argtypes = [_Int, _Int]
        self._layer.argtypes = [_Pointer, _Pointer, _Pointer, _Pointer]
        self._linear.argtypes = [_Pointer, _Pointer, _Pointer, _Pointer, _Pointer, _Int, _Int]
        self._head.argtypes = [_Pointer, _Pointer, _Pointer, _Pointer, _Int, _Int]
        self._lookup.argtypes = [_Pointer, _Int, _Pointer, _Int, _Int, _Pointer, _Int]
        self._encode.argtypes = [_Int, _Pointer, _Int, _Int, _Pointer, _Int]
        self._pack.argtypes = [_Int, _Pointer, _Pointer, _Int, _Int, _Pointer, _Int]
        self._norm.argtypes = [_Pointer, _Pointer, _Pointer, _Stride, _Int, _Float, _Int]
        self._gate.argtypes = [_Pointer, _Pointer, _Stride, _Int, _Int, _Int]

    def linear(
        self, x: torch.Tensor, weights: PackedWeights, bias: torch.Tensor | None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x · W + bias + residual of contiguous rows, rounded once; `bias` is float32."""
        rows = len(x)
        out = x.new_empty(rows, weights.outputs)
        arguments, groups = weights.linear_map(bias), _room_for_groups(x)
        self._linear(
            ctypes.addressof(arguments),
            x.data_ptr(),
            groups.data_ptr(),
            None if residual is None else residual.data_ptr(),
            out.data_ptr(),
            rows,
            torch.get_num_threads(),
        )
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
        """The products of contiguous rows in float32; the weights have one part."""
        rows, (part,) = len(x), weights.parts
        out = torch.empty(rows, -(-part.outputs // PANEL) * PANEL, dtype=torch.float32)
        arguments, groups = weights.linear_map(None), _room_for_groups(x)
        threads = torch.get_num_threads()
        self._head(ctypes.addressof(arguments), x.data_ptr(), groups.data_ptr(), out.data_ptr(), rows, threads)
        return out[:, : weights.outputs]

    def lookup(self, weights: PackedWeights, ids: torch.Tensor) -> torch.Tensor:
        """The weights of these outputs, one row each; the weights have one part, which is quantised."""
        (part,) = weights.parts
        ids = ids.contiguous()
        out = torch.empty(*ids.shape, weights.dim, dtype=self.dtype)
        threads = torch.get_num_threads()
        self._lookup(part.panels.data_ptr(), part.format, ids.data_ptr(), ids.numel(), weights.dim, out.data_ptr(), threads)
        return out

    def pack(self, form: WeightFormat, rows: np.ndarray, order: np.ndarray, dim: int) -> PackedWeights:
        """Panels of quantised rows as a GGUF file has them; `order` names the row of each output."""
        outputs = len(order)
        panels = self._room_for_panels(form, outputs, dim)
        order = np.ascontiguousarray(order, dtype=np.int64)
        rows = np.ascontiguousarray(rows)
        self._pack(form, rows.ctypes.data, order.ctypes.data, outputs, dim, panels.data_ptr(), torch.get_num_threads())
        return PackedWeights((PackedPart(panels, outputs, form),), dim)

    def encode(self, form: WeightFormat, weight: torch.Tensor) -> PackedWeights:
        """Panels of contiguous [outputs, dim] floats quantised as Q8_0 or Q4_1; `dim` is a multiple of a group."""
        if form not in (WeightFormat.Q8_0, WeightFormat.Q4_1):
            raise ValueError(f"floats are not quantised as {form.name} here")
        outputs, dim = weight.shape
        panels = self._room_for_panels(form, outputs, dim)
        self._encode(form, weight.data_ptr(), outputs, dim, panels.data_ptr(), torch.get_num_threads())
        return PackedWeights((PackedPart(panels, outputs, form),), dim)

    def _room_for_panels(self, form: WeightFormat, outputs: int, dim: int) -> torch.Tensor:
        return torch.empty(-(-outputs // LANES) * self._panel_bytes(form, dim), dtype=torch.uint8)


def _room_for_groups(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(-(-x.numel() // GROUP) * GROUP_BYTES, dtype=torch.uint8)


class WeightFormat(IntEnum):
    """How weights are stored: the numbers are those of quantised.h, the names those of GGUF."""

    FLOATS = 0
    """In the number format of the kernels."""
    Q8_0 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 4
    Q5_1 = 5
    Q4_K = 6
    Q5_K = 7
    Q6_K = 8


@dataclass(frozen=True, slots=True)
class PackedPart:
    """Neighbouring outputs of a linear map in the order in which the kernels read their weights."""

    panels: torch.Tensor
    """Floats: [panels, dim / pair, PANEL, pair]; zeros fill the last panel. Others: bytes as quantised.h has them."""
    outputs: int
    format: WeightFormat


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Weights of a linear map."""

    parts: tuple[PackedPart, ...]
    dim: int

    @property
    def outputs(self) -> int:
        return sum(part.outputs for part in self.parts)

    @property
    def bytes(self) -> int:
        return sum(part.panels.nbytes for part in self.parts)

    def linear_map(self, bias: torch.Tensor | None) -> LinearMap:
        """What the kernels take; it does not keep the memory alive."""
        pointers = [MapPart(part.panels.data_ptr(), part.format, part.outputs) for part in self.parts]
        parts = (MapPart * PARTS_MAX)(*pointers)
        return LinearMap(parts, None if bias is None else bias.data_ptr(), len(pointers), self.dim, self.outputs)


def packed(weight: torch.Tensor) -> PackedWeights:
    """Of [outputs, dim] weights; `dim` is even."""
    pair = 2 if weight.dtype is torch.bfloat16 else 1
    missing = -len(weight) % PANEL
    padded = torch.cat([weight, weight.new_zeros(missing, weight.shape[1])]) if missing else weight
    panels = padded.view(-1, PANEL, weight.shape[1] // pair, pair).transpose(1, 2).contiguous()
    return PackedWeights((PackedPart(panels, len(weight), WeightFormat.FLOATS),), weight.shape[1])


def joined(weights: Sequence[PackedWeights]) -> PackedWeights:
    """One map of several with the same inputs."""
    return PackedWeights(tuple(part for each in weights for part in each.parts), weights[0].dim)


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
