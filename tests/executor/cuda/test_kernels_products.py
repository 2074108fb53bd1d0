"""Products, norms and gates by the kernels are those of torch, whatever is done on the way."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.attending import NOTHING, normed

pytest.importorskip("triton", reason="kernels need Triton, which is not installed here")

from baton.executor.cuda.kernels_layer import add_and_norm_rows, gate_rows, norm_rows
from baton.executor.cuda.kernels_products import few_rows, one_row

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array"),  # by the interpreter
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # a GPU says nothing then
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a device the executor's tests run the same kernels"),
]

TILE = 16
SILU, GELU = 0, 1
EPSILON = 1e-6


def randoms(*size: int, seed: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def gated(x: torch.Tensor, kind: int) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    through = torch.nn.functional.silu(gate) if kind == SILU else torch.nn.functional.gelu(gate, approximate="tanh")
    return through * up


def differ(given: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((given - wanted).abs().max())


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    gate: int | None,
    depth: int = 1,
) -> torch.Tensor:
    rows, width = x.shape
    columns = len(weight) // (1 if gate is None else 2)
    out = torch.full((rows, columns), float("nan"))
    grid = (-(-columns // TILE), depth, -(-rows // TILE))
    arrived = torch.zeros(grid[0] * grid[2], dtype=torch.int32)
    parts = torch.full((grid[0] * grid[1] * grid[2] * TILE * TILE * 2,), float("nan"))
    few_rows[grid](
        x, weight, NOTHING if bias is None else bias, NOTHING if residual is None else residual, out, parts, arrived, rows,
        columns, width, x.stride(0), out.stride(0), ROWS=TILE, COLUMNS=TILE, WIDTH=32, DEPTH=depth, GATED=gate is not None,
        KIND=gate or SILU, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, PRECISION="ieee", STAGES=2,
    )  # fmt: skip
    assert not arrived.any(), "the next product would wait for parts that are not there"
    return out


@settings(max_examples=15, deadline=None)
@given(
    rows=st.sampled_from([1, 2, 16, 17]),
    columns=st.sampled_from([16, 24, 40]),
    depth=st.sampled_from([1, 2]),
    gate=st.sampled_from([None, SILU, GELU]),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
)
def test_a_product_of_few_rows_is_a_product(
    rows: int, columns: int, depth: int, gate: int | None, has_bias: bool, has_residual: bool
) -> None:
    outputs = columns * (1 if gate is None else 2)
    x, weight = randoms(rows, 64, seed=1), randoms(outputs, 64, seed=2)
    bias = randoms(outputs, seed=3) if has_bias else None
    residual = randoms(rows, columns, seed=4) if has_residual else None
    wanted = torch.nn.functional.linear(x, weight, bias)
    wanted = wanted if gate is None else gated(wanted, gate)
    wanted = wanted if residual is None else wanted + residual
    assert differ(product(x, weight, bias, residual, gate, depth), wanted) < 1e-3


def test_a_row_of_a_product_does_not_depend_on_the_rows_beside_it() -> None:
    x, weight = randoms(20, 64, seed=1), randoms(40, 64, seed=2)
    together = product(x, weight, None, None, None)
    for row in (0, 7, 19):
        assert torch.equal(product(x[row : row + 1], weight, None, None, None)[0], together[row])


def test_a_residual_may_be_where_the_result_goes() -> None:
    x, weight, residual = randoms(3, 32, seed=1), randoms(16, 32, seed=2), randoms(3, 16, seed=3)
    wanted = x @ weight.T + residual
    few_rows[(1, 1, 1)](
        x, weight, NOTHING, residual, residual, torch.empty(1), NOTHING.clone(), 3, 16, 32, 32, 16, ROWS=TILE, COLUMNS=TILE,
        WIDTH=32, DEPTH=1, GATED=False, KIND=SILU, HAS_BIAS=False, HAS_RESIDUAL=True, PRECISION="ieee", STAGES=2,
    )  # fmt: skip
    assert differ(residual, wanted) < 1e-4


@pytest.mark.parametrize("gate", [None, SILU, GELU])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("has_more", [False, True], ids=["alone", "with bias and residual"])
def test_a_product_of_one_row_norms_gates_and_adds_on_the_way(gate: int | None, has_norm: bool, has_more: bool) -> None:
    columns, width = 22, 64
    outputs = columns * (1 if gate is None else 2)
    x, weight, norm = randoms(1, width, seed=1), randoms(outputs, width, seed=2), randoms(width, seed=3).abs()
    bias, residual = randoms(outputs, seed=4), randoms(1, columns, seed=5)
    out = torch.full((1, columns), float("nan"))
    one_row[(-(-columns // 4),)](
        x, weight, norm if has_norm else NOTHING, bias if has_more else NOTHING, residual if has_more else NOTHING, out,
        columns, width, EPSILON, COLUMNS=4, WIDTH=32, GATED=gate is not None, KIND=gate or SILU, HAS_NORM=has_norm,
        HAS_BIAS=has_more, HAS_RESIDUAL=has_more,
    )  # fmt: skip
    wanted = torch.nn.functional.linear(normed(x, norm, EPSILON) if has_norm else x, weight, bias if has_more else None)
    wanted = wanted if gate is None else gated(wanted, gate)
    assert differ(out, wanted + residual if has_more else wanted) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_taken_in_float32_of_rows_that_need_not_lie_side_by_side(dtype: torch.dtype) -> None:
    x, weight = randoms(3, 80, seed=1).to(dtype)[:, :48], randoms(48, seed=2)
    out = torch.empty(3, 48, dtype=dtype)
    norm_rows[(3,)](x, weight, out, 48, EPSILON, x.stride(0), WIDTH=64)
    assert differ(out.float(), normed(x.float(), weight, EPSILON)) < (1e-5 if dtype == torch.float32 else 3e-2)


def test_parts_of_a_product_and_what_they_come_onto_are_added_up_and_normed() -> None:
    parts, residual, weight = randoms(2, 3, 48, seed=1), randoms(3, 48, seed=2), randoms(48, seed=3)
    out, normal = torch.empty(3, 48), torch.empty(3, 48)
    add_and_norm_rows[(3,)](parts, residual, weight, out, normal, 3, 48, EPSILON, PARTS=2, WIDTH=64, EARLY=False)
    assert differ(out, residual + parts.sum(0)) < 1e-5
    assert differ(normal, normed(out, weight, EPSILON)) < 1e-5


@pytest.mark.parametrize("kind", [SILU, GELU])
def test_the_first_half_of_a_row_gates_the_second(kind: int) -> None:
    x, out = randoms(3, 80, seed=1), torch.full((3, 40), float("nan"))
    gate_rows[(3, 3)](x, out, 40, KIND=kind, WIDTH=16, EARLY=False)
    assert differ(out, gated(x, kind)) < 1e-5
