"""Kernels that no interpreter runs are given what they take: every argument by name or place, once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="the executor for CUDA needs Triton, which is not installed here")

from baton.executor.cuda import kernels_decode_early, kernels_stream
from baton.executor.cuda.attention import CudaAttention, RotaryForm
from baton.executor.cuda.batch import ChunkPart, DecodePart, DeviceBatch, make_work
from baton.executor.cuda.products import DeviceLinear, NormedRows, ProductScratch, RmsNorm
from baton.executor.cuda.streaming import StreamingLimits
from baton.executor.kv_pool import LayerKv, LayerSpec

CPU = torch.device("cpu")
OPTIONS = {"num_warps", "launch_pdl"}


class Launches:
    """Stands where a kernel stood, and holds what it is given against the names that the kernel has."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self.seen: list[tuple[tuple[int, ...], dict[str, object]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*given: object, **named: object) -> None:
            placed = dict(zip(self._names, given, strict=False))
            assert len(placed) == len(given)
            assert not placed.keys() & named.keys()
            together = {**placed, **named}
            assert set(self._names) <= together.keys() <= {*self._names, *OPTIONS}
            self.seen.append((grid, together))

        return launch


def watched(monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> Launches:
    launches = Launches(list(vars(module)[name].arg_names))
    monkeypatch.setattr(module, name, launches)
    return launches


@pytest.fixture
def bench() -> ProductScratch:
    made = ProductScratch(CPU, invariant=False)
    made.streams = StreamingLimits(processors=132)
    return made


def ones(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.ones(*size, dtype=dtype)


@pytest.mark.parametrize("rows", [1, 24, 64])
def test_streamed_products(bench: ProductScratch, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = watched(monkeypatch, kernels_stream, "stream_rows")
    norm = RmsNorm(torch.ones(512), 1e-6)
    wide, narrow = DeviceLinear(ones(2048, 512), ones(2048), bench, gate=0), DeviceLinear(ones(512, 1024), None, bench)
    made = narrow.onto(ones(rows, 512), ones(rows, 1024), norm)
    assert made.squares is not None
    assert made.squares.shape == (8, rows)
    wide(made, norm=norm)
    wide(NormedRows(ones(rows, 512)))
    grids, given = zip(*launches.seen, strict=True)
    assert [each["HAS_NEXT"] for each in given] == [True, False, False]
    assert [each["SQUARES"] for each in given] == [0, 8, 0]
    assert all(grid[0] <= 132 for grid in grids)


def test_a_norm_of_float16_rows_is_taken_whole(bench: ProductScratch, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = watched(monkeypatch, kernels_stream, "stream_rows")
    half = torch.float16
    made = DeviceLinear(ones(512, 1024, dtype=half), None, bench).onto(
        ones(4, 512, dtype=half), ones(4, 1024, dtype=half), RmsNorm(torch.ones(512), 1e-6)
    )
    assert made.normal is None
    assert launches.seen[0][1]["HAS_NEXT"] is False


def decodes_of(sequences: int, kv_heads: int) -> DecodePart:
    some = torch.zeros(sequences, dtype=torch.int32)
    work = make_work([sequences], 4 * kv_heads, kv_heads, 128, CPU)
    return DecodePart(sequences, 1, some, some, some, work, ChunkPart(sequences, some, some, some, some, some, some))


@pytest.mark.parametrize(("sequences", "tile"), [(1, (64, 1)), (16, (64, 3)), (33, (64, 3)), (34, (32, 4)), (64, (32, 2))])
def test_attention_that_begins_early(
    bench: ProductScratch, sequences: int, tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = watched(monkeypatch, kernels_decode_early, "attend_early")
    decodes, some = decodes_of(sequences, 8), torch.zeros(sequences, dtype=torch.int32)
    batch = DeviceBatch(torch.zeros(sequences + 1, 4, dtype=torch.int32), some, some, None, decodes)
    kv = LayerKv(ones(4, 8, 16, 128), ones(4, 8, 16, 128))
    rotation = RotaryForm(ones(sequences, 128), ones(sequences, 128), torch.ones(2, 128), 1e-6)
    spec = LayerSpec(8, 128, 128, 0.1, None, None)
    CudaAttention(batch, [kv], bench).attend_fused(0, spec, 32, ones(sequences, 48 * 128), rotation)
    ((grid, given),) = launches.seen
    assert grid == (8, decodes.work.items)
    assert (given["TOKENS"], given["STAGES"]) == tile


@pytest.mark.parametrize("spec", [LayerSpec(8, 64, 64, 0.1, None, None), LayerSpec(8, 128, 128, 0.1, None, 30.0)])
def test_other_heads_and_caps_are_left_to_the_other_kernel(
    bench: ProductScratch, spec: LayerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    from baton.executor.cuda import attention

    early = watched(monkeypatch, kernels_decode_early, "attend_early")
    usual = watched(monkeypatch, attention, "attend_decode")
    some = torch.zeros(2, dtype=torch.int32)
    batch = DeviceBatch(torch.zeros(3, 4, dtype=torch.int32), some, some, None, decodes_of(2, 8))
    kv = LayerKv(ones(4, 8, 16, spec.key_dim), ones(4, 8, 16, spec.key_dim))
    rotation = RotaryForm(ones(2, spec.key_dim), ones(2, spec.key_dim), None, 0.0)
    CudaAttention(batch, [kv], bench).attend_fused(0, spec, 32, ones(2, 48 * spec.key_dim), rotation)
    assert not early.seen
    assert usual.seen[0][1]["LETS_BEGIN"] is True
