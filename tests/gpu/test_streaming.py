"""Products by streaming are those of torch, whatever is done on the way, and one after the other."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

from baton.executor.cuda.products import DeviceLinear, NormedRows, ProductScratch, RmsNorm
from baton.executor.cuda.streaming import streaming_limits

pytestmark = [pytest.mark.cuda]

DEVICE = "cuda"
SILU, GELU = 0, 1


@pytest.fixture(scope="module")
def bench() -> ProductScratch:
    device = torch.device(DEVICE)
    if streaming_limits(device) is None:
        pytest.skip("this device has no copy engine")
    return ProductScratch(device, invariant=False)


def randoms(*size: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*size, generator=generator, device=DEVICE).to(dtype)


def differ(given: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((given.float() - wanted).abs().max() / wanted.abs().max())


def normed(x: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + norm.epsilon) * norm.weight


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 16, 24, 32, 33, 64])
@pytest.mark.parametrize(
    ("columns", "width"), [(6144, 4096), (4096, 4096), (4096, 12288), (1000, 192), (72, 64), (2048, 1024)]
)
def test_a_streamed_product_is_a_product(bench: ProductScratch, rows: int, columns: int, width: int) -> None:
    x, weight, bias = randoms(rows, width, seed=1), randoms(columns, width, seed=2), randoms(columns, seed=3)
    residual = randoms(rows, columns, seed=4)
    wanted = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    assert differ(DeviceLinear(weight, bias, bench)(x), wanted) < 8e-3
    assert differ(DeviceLinear(weight, bias, bench)(x, residual=residual.clone()), wanted + residual.float()) < 8e-3
    assert differ(DeviceLinear(weight, None, bench)(x, dtype=torch.float32), wanted - bias.float()) < 1e-4
    assert not bench.arrived.any()


@pytest.mark.parametrize("kind", [SILU, GELU])
@pytest.mark.parametrize("rows", [1, 5, 32, 64])
@pytest.mark.parametrize("columns", [12288, 96, 1000])
def test_a_streamed_product_gates(bench: ProductScratch, rows: int, columns: int, kind: int) -> None:
    x, weight, bias = randoms(rows, 512, seed=1), randoms(2 * columns, 512, seed=2), randoms(2 * columns, seed=3)
    gate, up = torch.nn.functional.linear(x.float(), weight.float(), bias.float()).chunk(2, -1)
    through = torch.nn.functional.silu(gate) if kind == SILU else torch.nn.functional.gelu(gate, approximate="tanh")
    assert differ(DeviceLinear(weight, bias, bench, gate=kind)(x), through * up) < 8e-3


@pytest.mark.parametrize("rows", [1, 3, 32, 64])
@pytest.mark.parametrize("hidden", [4096, 2560, 128])
def test_a_norm_in_two_halves_is_a_norm(bench: ProductScratch, rows: int, hidden: int) -> None:
    norm = RmsNorm(randoms(hidden, seed=5, dtype=torch.float32), 1e-6)
    down, up = (
        DeviceLinear(randoms(hidden, 1024, seed=1), None, bench),
        DeviceLinear(randoms(768, hidden, seed=2), None, bench),
    )
    rows_before, residual = randoms(rows, 1024, seed=3), randoms(rows, hidden, seed=4)
    made = down.onto(residual.clone(), rows_before, norm)
    assert made.squares is not None
    plain = made.plain.float()
    assert differ(plain, residual.float() + rows_before.float() @ down.weight.float().t()) < 8e-3
    assert differ(made.squares.sum(0), plain.pow(2).sum(1)) < 1e-5
    wanted = normed(made.plain, norm) @ up.weight.float().t()
    assert differ(up(made, norm=norm), wanted) < 1e-2
    another = RmsNorm(norm.weight * 2, norm.epsilon)
    assert differ(up(made, norm=another), wanted * 2) < 1e-2, "weighed for another norm, it is normed anew"
    assert differ(up(NormedRows(made.plain), norm=norm), wanted) < 1e-2


@pytest.mark.parametrize("rows", [65, 128, 200, 256])
def test_a_product_in_halves_is_added_up_and_normed(bench: ProductScratch, rows: int) -> None:
    norm = RmsNorm(randoms(2560, seed=5, dtype=torch.float32), 1e-6)
    down, up = DeviceLinear(randoms(2560, 1024, seed=1), None, bench), DeviceLinear(randoms(768, 2560, seed=2), None, bench)
    x, residual = randoms(rows, 1024, seed=3), randoms(rows, 2560, seed=4)
    made = down.onto(residual, x, norm)
    assert made.normal is not None
    assert made.squares is None
    assert differ(made.plain, residual.float() + x.float() @ down.weight.float().t()) < 8e-3
    assert differ(made.normal, normed(made.plain, norm)) < 8e-3
    assert torch.equal(up(made, norm=norm), up(made.normal))


def test_a_chain_of_products_gives_the_same_bits_each_time(bench: ProductScratch) -> None:
    """Each begins before the one before it has ended."""
    norm = RmsNorm(torch.ones(1024, device=DEVICE), 1e-6)
    up = [DeviceLinear(randoms(2 * 2048, 1024, seed=seed) * 0.03, None, bench, gate=SILU) for seed in range(8)]
    down = [DeviceLinear(randoms(1024, 2048, seed=100 + seed) * 0.03, None, bench) for seed in range(8)]
    x = randoms(24, 1024, seed=0)

    def chain() -> torch.Tensor:
        rows = NormedRows(x)
        for wide, narrow in zip(up, down, strict=True):
            rows = narrow.onto(rows.plain, wide(rows, norm=norm), norm)
        return rows.plain

    first = chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(50):
        graph.replay()
        assert torch.equal(captured, first)
    assert not bench.arrived.any()
    want = x
    for wide, narrow in zip(up, down, strict=True):
        gate, through = (normed(want, norm) @ wide.weight.float().t()).chunk(2, -1)
        want = (want.float() + (torch.nn.functional.silu(gate) * through) @ narrow.weight.float().t()).to(x.dtype)
    assert differ(first, want.float()) < 3e-2
