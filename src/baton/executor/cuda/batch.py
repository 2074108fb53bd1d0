"""The inputs of one forward as tensors on the device: chunks first, then decodes; see `executor.packing` for a drawing.

The host reads nothing back. The decodes' part is filled on the device from the slots, by `prepare_decodes`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from baton.executor.cuda.kernels_decode import ITEM_WORDS


@dataclass(frozen=True, slots=True)
class ChunkPart:
    tokens: int
    slots: torch.Tensor
    """[sequences] int32"""
    contexts: torch.Tensor
    """[sequences] int32: tokens that the last row of each attends to"""
    first_positions: torch.Tensor
    """[sequences] int32: position of the first row of each"""
    query_starts: torch.Tensor
    """[sequences + 1] int32"""
    tile_sequences: torch.Tensor
    """[tiles] int32"""
    tile_starts: torch.Tensor
    """[tiles] int32: the first row of the tile within its chunk"""


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """How decoding attention is divided into items; see `kernels_decode`."""

    items: int
    first_items: torch.Tensor
    item_counts: torch.Tensor
    piece_tokens: torch.Tensor
    records: torch.Tensor
    """[items, ITEM_WORDS]"""
    partials: torch.Tensor
    partial_sums: torch.Tensor
    arrived: torch.Tensor

    def sized(self, items: int) -> DecodeWork:
        """A view of the same memory for fewer items."""
        return replace(self, items=items)


@dataclass(frozen=True, slots=True)
class DecodePart:
    sequences: int
    queries: int
    """Rows that a sequence feeds: one, plus its drafts."""
    slots: torch.Tensor
    contexts: torch.Tensor
    first_positions: torch.Tensor
    work: DecodeWork
    as_chunks: ChunkPart
    """The same rows as chunks of one tile each."""
    share_slots: bool = False
    """Several sequences may be rows of one slot, which attend to each other's keys."""

    @property
    def tokens(self) -> int:
        return self.sequences * self.queries


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    tables: torch.Tensor
    """[slots + 1, blocks of a slot] int32"""
    write_blocks: torch.Tensor
    """[tokens] int32; negative writes nowhere"""
    write_offsets: torch.Tensor
    chunks: ChunkPart | None
    decodes: DecodePart | None

    @property
    def chunk_tokens(self) -> int:
        return 0 if self.chunks is None else self.chunks.tokens


def target_items(sequences: int) -> int:
    """Pieces to aim for beyond one per sequence: enough to fill the device, few enough not to idle."""
    if sequences <= 16:
        return 32
    return 16 if sequences < 64 else sequences // 2


def make_work(sizes: list[int], rows_an_item: int, kv_heads_most: int, dim_most: int, device: torch.device) -> DecodeWork:
    """Buffers for batches of any of these sizes. `rows_an_item` counts all KV heads of the layer that has most."""
    sequences, items = max(sizes), max(size + target_items(size) for size in sizes)
    rows = items * rows_an_item

    def zeros(size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, device=device)

    return DecodeWork(
        items=items,
        first_items=zeros(sequences),
        item_counts=zeros(sequences),
        piece_tokens=zeros(1),
        records=zeros(items * ITEM_WORDS),
        partials=torch.empty(rows * dim_most, dtype=torch.float32, device=device),
        partial_sums=torch.empty(rows * 2, dtype=torch.float32, device=device),
        arrived=zeros(sequences * kv_heads_most),
    )
