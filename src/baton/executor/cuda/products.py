"""Linear maps on a CUDA device: which kernel multiplies, by how many rows there are, and what it does on the way.

    rows        1            2 … FEW_ROWS_MAX        more
    kernel      one_row      few_rows                the library's
    norm        inside       before                  before
    gate        inside       inside                  after
    residual    inside       inside                  inside

    on Hopper   1 … ROWS_MAX                         … SPLIT_ROWS_MAX
    kernel      stream_rows                          the library's, in two halves of K
    norm        half inside, half in the product     in one with adding up the halves
                before; or else before
    residual    inside                               the same

Few rows are bound by reading the weights.

With `invariant`, one kernel of one tile size serves every number of rows: a row's result does not depend on its neighbours.
"""

from __future__ import annotations

import importlib
import logging
import math
from dataclasses import dataclass

import torch
import triton
from triton.errors import TritonError

from baton.executor.cuda.kernels_layer import add_and_norm_rows, gate_rows, norm_rows
from baton.executor.cuda.kernels_products import few_rows, one_row
from baton.executor.cuda.streaming import TILE_COLUMNS, WorkSplit, split_work, streaming_limits, tiles_of

log = logging.getLogger(__name__)

FEW_ROWS_MAX = 64
SPLIT_ROWS_MAX = 256
TILES_MAX = 1 << 16
PARTS_ELEMENTS = 1 << 23
REFUSALS = (TritonError, ImportError, AttributeError, TypeError, ValueError, RuntimeError, AssertionError)
"""What a compiler that does not understand may raise."""
GATES = {"silu": 0, "gelu_tanh": 1}


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """Weights of a root-mean-square norm in float32."""

    weight: torch.Tensor
    epsilon: float


@dataclass(frozen=True, slots=True)
class NormedRows:
    """Rows that a norm comes after, with what the product that made them did for it."""

    plain: torch.Tensor
    """[rows, width]"""
    norm: RmsNorm | None = None
    normal: torch.Tensor | None = None
    """[rows, width], normed by `norm`; where there are squares, only times its weights"""
    squares: torch.Tensor | None = None
    """[parts, rows] float32: they add up to the sum of squares of each row"""

    def ready_for(self, norm: RmsNorm | None) -> tuple[torch.Tensor, RmsNorm | None]:
        """Rows, and the norm that is still due."""
        if self.normal is None or self.squares is not None or self.norm is not norm:
            return self.plain, norm
        return self.normal, None


class ProductScratch:
    """What all products of an executor share: room for sums in parts, and a tensor to name where nothing is meant.

    One stream at a time uses it.
    """

    def __init__(self, device: torch.device, invariant: bool) -> None:
        self.invariant = invariant
        self.streams = None if invariant else streaming_limits(device)
        self.parts = torch.empty(PARTS_ELEMENTS, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(TILES_MAX, dtype=torch.int32, device=device)
        if self.streams is not None:
            self._try_streams(device)

    @property
    def early(self) -> dict[str, bool]:
        """For the launch of a kernel that waits for its inputs itself."""
        return {} if self.streams is None else {"launch_pdl": True}

    def _try_streams(self, device: torch.device) -> None:
        """Gluon is young and changes: where this release speaks another one, the other kernels do."""
        weight = torch.ones(TILE_COLUMNS, TILE_COLUMNS, dtype=torch.bfloat16, device=device)
        torch.cuda.synchronize(device)  # weights are read before the kernel before has ended
        try:
            importlib.import_module("baton.executor.cuda.kernels_decode_early")
            right = bool((DeviceLinear(weight, None, self)(weight) == TILE_COLUMNS).all())
        except torch.OutOfMemoryError:
            raise
        except REFUSALS as reason:
            log.warning("decodes are slower than they could be: %s", str(reason).split("\n")[0])
            self.streams = None
            return
        if not right:
            log.warning("decodes are slower than they could be: streamed products are wrong on this device")
            self.streams = None
            return
        log.info("few rows are streamed: weights and KV come before what they meet is there")


def normed(x: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
    """[rows, width]"""
    rows, width = x.shape
    out = torch.empty_like(x)
    norm_rows[(rows,)](
        x, norm.weight, out, width, norm.epsilon, x.stride(0),
        WIDTH=triton.next_power_of_2(width), num_warps=8,
    )  # fmt: skip
    return out


@dataclass(frozen=True, slots=True)
class _Tile:
    """How `few_rows` cuts a product up."""

    rows: int
    columns: int
    width: int
    depth: int
    stages: int
    warps: int


class DeviceLinear:
    """x · weightᵀ + bias; with a gate, the first half of the outputs gates the second."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, scratch: ProductScratch, gate: int | None = None
    ) -> None:
        self.weight = weight
        self._bias = bias
        self._scratch = scratch
        self._gate = gate
        self.columns = weight.shape[0] if gate is None else weight.shape[0] // 2
        self.width = weight.shape[1]
        self._tiled: dict[int, object] = {}
        self._streams = scratch.streams is not None and weight.dtype.itemsize == 2
        self._one_width = math.gcd(self.width, 512 if gate is not None or self.columns > self.width else 1024)
        self._few_width = math.gcd(self.width, 128)

    def __call__(
        self,
        x: torch.Tensor | NormedRows,
        *,
        norm: RmsNorm | None = None,
        residual: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """[rows, columns]. A residual may be overwritten by the result."""
        if isinstance(x, NormedRows):
            cut = self._cut(len(x.plain))
            if cut is not None and x.normal is not None and x.squares is not None and x.norm is norm and residual is None:
                return self._stream(x.normal, cut, dtype=dtype, scale=x).plain
            x, norm = x.ready_for(norm)
        rows = x.shape[0]
        if rows == 0:  # no chunk of the step draws a token
            return x.new_empty(0, self.columns, dtype=dtype or x.dtype)
        if self._scratch.invariant and self._few_width >= 32:
            return self._few(self._normed(x, norm), residual, dtype, self._invariant_tile())
        if (cut := self._cut(rows)) is not None:
            return self._stream(self._normed(x, norm), cut, residual=residual, dtype=dtype).plain
        if rows == 1 and self._one_width >= 128:
            return self._one(x, norm, residual, dtype)
        if rows <= FEW_ROWS_MAX and self._few_width >= 32 and dtype is None:
            return self._few(self._normed(x, norm), residual, dtype, self._few_tile(rows))
        return self._library(self._normed(x, norm), residual, dtype)

    def onto(self, residual: torch.Tensor, x: torch.Tensor, then: RmsNorm | None) -> NormedRows:
        """residual + x · weightᵀ, which the norm `then` comes after."""
        cut = self._cut(x.shape[0])
        if cut is not None:
            # Before it is scaled down, a row times the norm's weights may be more than float16 can say.
            return self._stream(x, cut, residual=residual, then=then if x.dtype is torch.bfloat16 else None)
        splits = self._streams and self._bias is None and self.width % 2 == 0
        if then is not None and splits and FEW_ROWS_MAX < x.shape[0] <= SPLIT_ROWS_MAX:
            return self._in_halves(residual, x, then)
        return NormedRows(self(x, residual=residual))

    def _in_halves(self, residual: torch.Tensor, x: torch.Tensor, then: RmsNorm) -> NormedRows:
        """The library would divide K itself, and add up in a kernel of its own."""
        rows, width = x.shape
        halves = torch.bmm(
            x.view(rows, 2, width // 2).transpose(0, 1),
            self.weight.view(self.columns, 2, width // 2).permute(1, 2, 0),
            out_dtype=torch.float32,
        )
        out, normal = torch.empty_like(residual), torch.empty_like(residual)
        add_and_norm_rows[(rows,)](
            halves, residual, then.weight, out, normal, rows, self.columns, then.epsilon, PARTS=2,
            WIDTH=triton.next_power_of_2(self.columns), EARLY=True, num_warps=8, launch_pdl=True,
        )  # fmt: skip
        return NormedRows(out, then, normal)

    def _cut(self, rows: int) -> WorkSplit | None:
        if not self._streams or self._scratch.streams is None or not rows:
            return None
        return split_work(rows, self.columns, self.width, self._gate is not None, self._scratch.streams.processors)

    def _stream(
        self,
        x: torch.Tensor,
        cut: WorkSplit,
        *,
        residual: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        scale: NormedRows | None = None,
        then: RmsNorm | None = None,
    ) -> NormedRows:
        """With `scale`, x is weighed for a norm whose other half is done here."""
        from baton.executor.cuda.kernels_stream import stream_rows  # only where there is Gluon

        rows, gated = x.shape[0], self._gate is not None
        out = x.new_empty(rows, self.columns, dtype=dtype or x.dtype)
        norm, squares = (None, None) if scale is None else (scale.norm, scale.squares)
        normal = None if then is None else torch.empty_like(out)
        tiles = tiles_of(self.columns, gated)
        next_squares = None if then is None else torch.empty(tiles, rows, dtype=torch.float32, device=x.device)
        nothing = self._scratch.parts
        parts = 0 if squares is None else len(squares)
        stream_rows[(cut.programs,)](
            _described(x, [cut.rows, cut.width]), self._tiles(cut.width), nothing if self._bias is None else self._bias,
            out if residual is None else residual, out, self._scratch.parts, self._scratch.arrived,
            nothing if squares is None else squares, nothing if then is None else then.weight,
            out if normal is None else normal, nothing if next_squares is None else next_squares, rows, self.columns,
            self.width, 0.0 if norm is None else norm.epsilon, ROWS=cut.rows, COLUMNS=TILE_COLUMNS, WIDTH=cut.width,
            DEPTH=cut.depth, GATED=gated, KIND=self._gate or 0, HAS_BIAS=self._bias is not None,
            HAS_RESIDUAL=residual is not None, SQUARES=parts, SQUARES_PADDED=triton.next_power_of_2(max(parts, 1)),
            HAS_NEXT=then is not None, STAGES=cut.stages, num_warps=4, launch_pdl=True,
        )  # fmt: skip
        return NormedRows(out, then, normal, next_squares)

    def _tiles(self, width: int) -> object:
        """The weight, in tiles of that width."""
        if width not in self._tiled:
            halves = self.weight if self._gate is None else self.weight.view(2, self.columns, self.width)
            block = [TILE_COLUMNS] if self._gate is None else [2, TILE_COLUMNS // 2]
            self._tiled[width] = _described(halves, [*block, width])
        return self._tiled[width]

    def _normed(self, x: torch.Tensor, norm: RmsNorm | None) -> torch.Tensor:
        return x if norm is None else normed(x, norm)

    def _library(self, x: torch.Tensor, residual: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor:
        if dtype is not None and dtype != x.dtype:
            out = torch.mm(x, self.weight.t(), out_dtype=dtype)
            return out if self._bias is None else out + self._bias
        if residual is not None and self._bias is None and self._gate is None:
            return residual.addmm_(x, self.weight.t())
        out = torch.nn.functional.linear(x, self.weight, self._bias)
        if self._gate is not None:
            out = self._gated(out)
        return out if residual is None else residual.add_(out)

    def _gated(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        out = x.new_empty(rows, self.columns)
        gate_rows[(rows, triton.cdiv(self.columns, 1024))](
            x, out, self.columns, KIND=self._gate, WIDTH=1024, EARLY=self._scratch.streams is not None, num_warps=4,
            **self._scratch.early,
        )  # fmt: skip
        return out

    def _one(
        self,
        x: torch.Tensor,
        norm: RmsNorm | None,
        residual: torch.Tensor | None,
        dtype: torch.dtype | None,
    ) -> torch.Tensor:
        out = x.new_empty(1, self.columns, dtype=dtype or x.dtype)
        columns = 4096 // self._one_width
        one_row[(triton.cdiv(self.columns, columns),)](
            x, self.weight, x if norm is None else norm.weight, x if self._bias is None else self._bias,
            x if residual is None else residual, out, self.columns, self.width,
            0.0 if norm is None else norm.epsilon, COLUMNS=columns, WIDTH=self._one_width, GATED=self._gate is not None,
            KIND=self._gate or 0, HAS_NORM=norm is not None, HAS_BIAS=self._bias is not None,
            HAS_RESIDUAL=residual is not None, num_warps=2,
        )  # fmt: skip
        return out

    def _few_tile(self, rows: int) -> _Tile:
        columns, stages = (64, 4) if self._gate is None else (32, 3)
        tiles = triton.cdiv(self.columns, columns)
        depth = 2 if tiles <= 64 and self.width % (2 * self._few_width) == 0 else 1
        return _Tile(max(16, triton.next_power_of_2(rows)), columns, self._few_width, depth, stages, 4)

    def _invariant_tile(self) -> _Tile:
        columns = 128 if self._gate is None else 64
        return _Tile(128, columns, min(64, self._few_width), 1, 4, 8)

    def _few(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        dtype: torch.dtype | None,
        tile: _Tile,
    ) -> torch.Tensor:
        rows = x.shape[0]
        out = x.new_empty(rows, self.columns, dtype=dtype or x.dtype)
        grid = (triton.cdiv(self.columns, tile.columns), tile.depth, triton.cdiv(rows, tile.rows))
        few_rows[grid](
            x, self.weight, x if self._bias is None else self._bias, x if residual is None else residual, out,
            self._scratch.parts, self._scratch.arrived, rows, self.columns, self.width, x.stride(0), out.stride(0),
            ROWS=tile.rows, COLUMNS=tile.columns, WIDTH=tile.width, DEPTH=tile.depth, GATED=self._gate is not None,
            KIND=self._gate or 0, HAS_BIAS=self._bias is not None, HAS_RESIDUAL=residual is not None,
            PRECISION="ieee", STAGES=tile.stages, num_warps=tile.warps,
        )  # fmt: skip
        return out


def _described(x: torch.Tensor, block: list[int]) -> object:
    """For the copy engine: a tensor, and the block of it that one copy takes."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor.from_tensor(x, block, NVMMASharedLayout(128, 16, x.dim()))
