"""Products by streaming (`kernels_stream`): which devices and shapes can, and how a product is cut up."""

from __future__ import annotations

import importlib.util
import logging
import math
from dataclasses import dataclass

import torch
import triton

log = logging.getLogger(__name__)

ROWS_MAX = 64
TILE_COLUMNS = 64
"""What one matrix instruction takes."""
SHARED_BYTES = 225_000
"""Of a processor's shared memory, nearly all: one program has it to itself."""
HOPPER = 9


@dataclass(frozen=True, slots=True)
class WorkSplit:
    """How a product is shared out."""

    rows: int
    """Filled up to what an instruction takes."""
    width: int
    """Of K, in a tile."""
    depth: int
    """Shares of K."""
    stages: int
    programs: int


@dataclass(frozen=True, slots=True)
class StreamingLimits:
    """What streaming needs to know of a device."""

    processors: int


def streaming_limits(device: torch.device) -> StreamingLimits | None:
    """None where the device has no copy engine, or Triton no Gluon."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != HOPPER:
        return None
    if importlib.util.find_spec("triton.experimental.gluon") is None:
        log.warning("products are slower than they could be: this Triton (%s) has no Gluon", triton.__version__)
        return None
    return StreamingLimits(torch.cuda.get_device_properties(device).multi_processor_count)


def tiles_of(columns: int, gated: bool) -> int:
    return -(-columns // (TILE_COLUMNS // 2 if gated else TILE_COLUMNS))


def split_work(rows: int, columns: int, width: int, gated: bool, processors: int) -> WorkSplit | None:
    """None where the shape does not suit. Every processor gets the same number of units, or one less."""
    rows_filled = max(8, 1 << (rows - 1).bit_length())
    tile_width = math.gcd(width, 256 if rows <= 16 else 128)
    if rows > ROWS_MAX or tile_width < 64:
        return None
    tiles = tiles_of(columns, gated)
    depth = 1
    while not gated and tiles * depth * 2 <= processors and width % (depth * 2 * tile_width) == 0:
        depth *= 2
    units = tiles * depth
    turns = -(-units // processors)
    tile_bytes = (TILE_COLUMNS + rows_filled) * tile_width * 2
    kept_bytes = TILE_COLUMNS * rows_filled * 4 + 2048  # sums, and barriers
    stages = min((SHARED_BYTES - kept_bytes) // tile_bytes, -(-width // depth // tile_width) * turns)
    return WorkSplit(rows_filled, tile_width, depth, stages, -(-units // turns))
