"""The chunks of a step as arrays: laid out by the host, and filled up to the sizes that steps are captured for.

    chunks        A A A A A | B B B | . . . .     rows of nobody behind them, up to the tokens of the size
    sequences     A   B   -   -   -   nobody      there is always one sequence more than chunks may be: it has those rows
    tiles         A   B   nobody  -   -   -       and the tiles that are left over begin behind its last row
    logit rows    B   -   -   -   -               those that are left over are drawn for the spare slot

A filled-up step computes what the plain one does: a row of nobody is written nowhere and attends to nothing, and no row
sees another of another sequence. Pure: knows plans' tokens and blocks, nothing of a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from baton.core.engine.plan import Int32s
from baton.executor.packing import FeedRange
from baton.executor.slot_table import NO_BLOCK, SlotTable

CHUNK_TOKENS = (64, 128, 256, 512)
"""Of captured steps. Longer ones, filled up, would take the device about as long as the host takes to launch them."""
CHUNKS_MOST = 16
"""Of a captured step."""
FEW_DECODES = (16, 64)
ALIGNMENT = 16
"""Every array begins where the widest loads of a kernel may begin."""


class ChunkArrays(NamedTuple):
    """All int32; the first six are those of `batch.ChunkPart`."""

    slots: Int32s
    contexts: Int32s
    first_positions: Int32s
    query_starts: Int32s
    tile_sequences: Int32s
    tile_starts: Int32s
    ids: Int32s
    positions: Int32s
    row_slots: Int32s
    write_blocks: Int32s
    write_offsets: Int32s
    logit_rows: Int32s
    """The rows that are drawn from."""
    drawn_slots: Int32s
    drawn_positions: Int32s
    """Where the tokens to be drawn will stand."""


class MixedSize(NamedTuple):
    """Of a step with chunks: rows of chunks, and sequences that decode behind them."""

    tokens: int
    sequences: int


def mixed_sizes(step_tokens: int, slots: int) -> list[MixedSize]:
    """Few, since each is captured when an executor starts. Rows cost next to nothing while weights are what a step reads
    most of, and their share of the step beyond: so there are few sizes for few decodes, and quarters of all slots."""
    few = (size for size in FEW_DECODES if size < slots // 4)
    quarters = (size for size in (slots // 4, slots // 2, slots * 3 // 4) if size >= FEW_DECODES[0])
    decodes = {0, *few, *quarters, slots}
    return [MixedSize(tokens, size) for tokens in CHUNK_TOKENS if tokens <= step_tokens for size in sorted(decodes)]


def smallest_size(sizes: list[MixedSize], tokens: int, decodes: int) -> MixedSize | None:
    """The one with the fewest rows of chunks that holds them, and of those the one with the fewest decodes."""
    return min((size for size in sizes if size.tokens >= tokens and size.sequences >= decodes), default=None)


def tile_chunks(lengths: list[int], queries: int) -> tuple[list[int], list[int]]:
    """(sequence, first row within it) of each tile of so many queries."""
    tiles = [(sequence, start) for sequence, length in enumerate(lengths) for start in range(0, length, queries)]
    return [sequence for sequence, _ in tiles], [start for _, start in tiles]


def lay_out_chunks(feeds: list[FeedRange], table: SlotTable, tile_queries: int) -> ChunkArrays:
    """One chunk after the other, nothing between them."""
    size = table.shape.block_size
    lengths = [feed.end - feed.begin for feed in feeds]
    slots = _int32s([feed.slot for feed in feeds])
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    positions = np.concatenate([np.arange(feed.begin, feed.end) for feed in feeds]).astype(np.int32)
    row_slots = np.repeat(slots, lengths)
    samples = np.array([feed.samples for feed in feeds], dtype=np.bool_)
    contexts = _int32s([feed.end for feed in feeds])
    tile_sequences, tile_starts = tile_chunks(lengths, tile_queries)
    return ChunkArrays(
        slots=slots,
        contexts=contexts,
        first_positions=_int32s([feed.begin for feed in feeds]),
        query_starts=starts,
        tile_sequences=_int32s(tile_sequences),
        tile_starts=_int32s(tile_starts),
        ids=table.tokens[row_slots, positions],
        positions=positions,
        row_slots=row_slots,
        write_blocks=table.table[row_slots, positions // size],
        write_offsets=(positions % size).astype(np.int32),
        logit_rows=(starts[1:][samples] - 1).astype(np.int32),
        drawn_slots=slots[samples],
        drawn_positions=contexts[samples],
    )


class ChunkFrame:
    """Chunks filled up to so many rows, as one array in which everything has its place."""

    def __init__(self, tokens: int, chunks_most: int, tile_queries: int, spare: int) -> None:
        """`spare` is the slot of nobody."""
        self.tokens = tokens
        self.chunks_most = chunks_most
        self._tile_queries = tile_queries
        sequences, tiles = chunks_most + 1, tokens // tile_queries + chunks_most + 1
        fields = [
            *((sequences, spare), (sequences, 0), (sequences, 0)),
            (sequences + 1, tokens),
            *((tiles, chunks_most), (tiles, tokens)),
            *((tokens, 0), (tokens, 0), (tokens, spare), (tokens, NO_BLOCK), (tokens, 0)),
            *((chunks_most, 0), (chunks_most, spare), (chunks_most, 0)),
        ]
        self._rests = [rest for _, rest in fields]
        """What fills each of `ChunkArrays` up."""
        begins = np.cumsum([0, *(length + -length % ALIGNMENT for length, _ in fields)]).tolist()
        self.places = [slice(begin, begin + length) for begin, (length, _) in zip(begins[:-1], fields, strict=True)]
        """Of each of `ChunkArrays`."""
        self.length: int = begins[-1]

    def fill(self, chunks: ChunkArrays) -> Int32s:
        """No more chunks, and no more rows of them, than it has room for."""
        filled = np.zeros(self.length, dtype=np.int32)
        for array, place, rest in zip(self._with_nobody(chunks), self.places, self._rests, strict=True):
            there = filled[place]
            there[: len(array)] = array
            there[len(array) :] = rest
        return filled

    def _with_nobody(self, chunks: ChunkArrays) -> ChunkArrays:
        """The rows behind the last chunk are a sequence too: attention leaves noughts there, not whatever was in memory."""
        used = len(chunks.positions)
        starts = range(0, self.tokens - used, self._tile_queries)
        between = [used] * (self.chunks_most - len(chunks.slots))
        return chunks._replace(
            query_starts=np.concatenate([chunks.query_starts, _int32s(between)]),
            tile_sequences=np.concatenate([chunks.tile_sequences, _int32s([self.chunks_most] * len(starts))]),
            tile_starts=np.concatenate([chunks.tile_starts, _int32s(starts)]),
        )


def _int32s(values: Sequence[int]) -> Int32s:
    return np.array(values, dtype=np.int32)


NO_CHUNKS = ChunkArrays(*(_int32s([0] if name == "query_starts" else []) for name in ChunkArrays._fields))
