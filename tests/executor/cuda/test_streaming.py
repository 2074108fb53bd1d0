"""How a streamed product is cut up: all of it, evenly, within a processor's memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the executor for CUDA needs Triton, which is not installed here")

from baton.executor.cuda.streaming import ROWS_MAX, SHARED_BYTES, TILE_COLUMNS, split_work, streaming_limits, tiles_of


@given(
    rows=st.integers(1, ROWS_MAX),
    columns=st.integers(1, 200_000),
    width=st.integers(1, 300).map(lambda many: many * 64),
    gated=st.booleans(),
    processors=st.integers(1, 200),
)
def test_every_processor_has_its_share_and_room_for_it(
    rows: int, columns: int, width: int, gated: bool, processors: int
) -> None:
    cut = split_work(rows, columns, width, gated, processors)
    assert cut is not None
    assert cut.rows >= rows
    assert width % (cut.depth * cut.width) == 0
    assert cut.depth == 1 or not gated
    assert cut.stages >= 1
    assert cut.stages * (TILE_COLUMNS + cut.rows) * cut.width * 2 + TILE_COLUMNS * cut.rows * 4 < SHARED_BYTES
    units = tiles_of(columns, gated) * cut.depth
    assert cut.programs <= processors
    shares = [len(range(program, units, cut.programs)) for program in range(cut.programs)]
    assert sum(shares) == units
    assert max(shares) - min(shares) <= 1
    assert max(shares) == -(-units // processors)


@pytest.mark.parametrize(("rows", "width"), [(ROWS_MAX + 1, 4096), (8, 96), (8, 32)])
def test_what_does_not_suit_is_left_to_other_kernels(rows: int, width: int) -> None:
    assert split_work(rows, 4096, width, False, 132) is None


def test_a_cpu_streams_nothing() -> None:
    assert streaming_limits(torch.device("cpu")) is None
