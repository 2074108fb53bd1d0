"""Measures this GPU's memory read and matrix rates, on which all floors of the run are based.

The best of several ways to read counts, and the best product: a floor must not be high because a library was slow.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from baton.bench.gpu_floor import GpuRates
from baton.bench.gpu_report import middle

READ_BYTES = 4 << 30
"""Much larger than any cache."""
SQUARE = 8192
WARM_UPS, RUNS = 3, 15


def measure_rates(device: torch.device) -> GpuRates:
    return GpuRates(_read_bytes_per_s(device), _matrix_flop_per_s(device))


def _read_bytes_per_s(device: torch.device) -> float:
    count = READ_BYTES // 4
    numbers = torch.rand(count, device=device, dtype=torch.float32)
    halves = numbers[: count // 2], numbers[count // 2 :]
    ways: list[Callable[[], torch.Tensor]] = [
        numbers.sum,
        lambda: numbers.view(torch.int32).max(),
        lambda: torch.dot(*halves),
        lambda: numbers.view(1 << 10, -1).amax(1),
    ]
    return max(READ_BYTES / time_s(way) for way in ways)


def _matrix_flop_per_s(device: torch.device) -> float:
    left = torch.randn(SQUARE, SQUARE, device=device, dtype=torch.bfloat16)
    right = torch.randn(SQUARE, SQUARE, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(left)
    ways: list[Callable[[], torch.Tensor]] = [
        lambda: torch.mm(left, right, out=out),
        lambda: torch.mm(left, right.t(), out=out),  # as weights lie
    ]
    return max(2.0 * SQUARE**3 / time_s(way) for way in ways)


def time_s(work: Callable[[], object], runs: int = RUNS) -> float:
    """Median of several runs, timed with device events."""
    for _ in range(WARM_UPS):
        work()
    marks = [(_mark(), _mark()) for _ in range(runs)]
    for begin, end in marks:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return middle([begin.elapsed_time(end) for begin, end in marks]) / 1000


def _mark() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
