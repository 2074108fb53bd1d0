"""Runs the model over a step's rows: buffers that are allocated once at full size, and decodes as captured graphs.

A graph replays the same kernels on the same memory, so whatever a step reads or writes lies in buffers of this object, or in
the slots. Graphs are captured for some numbers of sequences (`buckets`); a step takes the next larger one and fills it up
with the spare slot. Steps with chunks run kernel by kernel: they are long enough for the host to keep ahead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton

from baton.executor.contract import ExecutorShape
from baton.executor.cuda.attention import CudaAttention
from baton.executor.cuda.batch import ChunkPart, DecodePart, DecodeWork, DeviceBatch, make_work, target_items
from baton.executor.cuda.drafting import Propose
from baton.executor.cuda.kernels_steps import RUNS, name_items, prepare_decodes
from baton.executor.cuda.pool import CudaPool
from baton.executor.cuda.products import Workbench
from baton.executor.cuda.slots import DeviceSlots
from baton.executor.kv import LayerSpec
from baton.executor.loading import LoadedModel, forward
from baton.executor.support import text_config

log = logging.getLogger(__name__)

PIECE_STEP = 64
PIECE_LEAST = 64
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024)


@dataclass(frozen=True, slots=True)
class Chunks:
    """Of a step, as they were sent to the device."""

    part: ChunkPart
    ids: torch.Tensor
    positions: torch.Tensor
    row_slots: torch.Tensor
    write_blocks: torch.Tensor
    write_offsets: torch.Tensor
    logit_rows: torch.Tensor
    """The rows that are drawn from."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """The rows of logits of a step, and whose they are: those of chunks, then those of decodes."""

    logits: torch.Tensor
    slots: torch.Tensor
    """[rows] int32"""
    positions: torch.Tensor
    """[rows] int32: where the token to be drawn will stand"""


def buckets_upto(slots: int) -> list[int]:
    return [*(size for size in BUCKETS if size < slots), slots]


class Runner:
    def __init__(
        self,
        loaded: LoadedModel,
        shape: ExecutorShape,
        slots: DeviceSlots,
        pool: CudaPool,
        bench: Workbench,
        step_tokens: int,
        propose: Propose | None = None,
    ) -> None:
        self._model, self._layers = loaded.model, loaded.layers
        self._shape, self._slots, self._pool, self._bench = shape, slots, pool, bench
        self._propose = propose
        self.queries = shape.burst
        rows = step_tokens + shape.slots * shape.burst
        device = slots.known.device

        def ints(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self._ids, self._positions = ints(rows), ints(rows)
        self.row_slots = ints(rows)
        self._write_blocks, self._write_offsets = ints(rows), ints(rows)
        self.decode_slots = ints(shape.slots)
        self._contexts, self._first_positions = ints(shape.slots), ints(shape.slots)
        self.codes, self.fed = ints(shape.slots), ints(shape.slots)
        self.drafts, self.draft_counts = ints(shape.slots * max(1, shape.burst - 1)), ints(shape.slots)
        heads = int(text_config(loaded.model.config).num_attention_heads)
        self._work = _work_for(self._layers, heads, shape, device)
        self._each = torch.arange(shape.slots, dtype=torch.int32, device=device)
        self._starts = torch.arange(shape.slots + 1, dtype=torch.int32, device=device) * shape.burst
        self._zeros = ints(shape.slots)
        self.running = torch.full_like(self._zeros, RUNS)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Drawn]] = {}

    @property
    def has_graphs(self) -> bool:
        return bool(self._graphs)

    def bucket(self, sequences: int) -> int:
        """How many sequences the next larger graph has; the number itself where there is none."""
        return next((size for size in sorted(self._graphs) if size >= sequences), sequences)

    def decode(self, sequences: int) -> Drawn:
        """All rows decode; `sequences` is a bucket where there are graphs."""
        if sequences not in self._graphs:
            return self._decode(sequences)
        graph, drawn = self._graphs[sequences]
        graph.replay()
        return drawn

    def mixed(self, chunks: Chunks, sequences: int, written: Callable[[int], None] | None) -> Drawn:
        """Chunks, and decodes beside them."""
        first = chunks.part.tokens
        for buffer, values in (
            (self._ids, chunks.ids),
            (self._positions, chunks.positions),
            (self.row_slots, chunks.row_slots),
            (self._write_blocks, chunks.write_blocks),
            (self._write_offsets, chunks.write_offsets),
        ):
            buffer[:first].copy_(values)
        rows = chunks.logit_rows
        if sequences:
            self._prepare(sequences, first)
            own = torch.arange(first, first + sequences * self.queries, dtype=torch.int32, device=rows.device)
            rows = torch.cat([rows, own])
        batch = self._batch(chunks.part, sequences)
        logits = self._forward(batch, first + sequences * self.queries, rows.long(), written)
        return Drawn(logits, self.row_slots[rows], self._positions[rows] + 1)

    def capture(self, sizes: list[int]) -> None:
        """All graphs share one pool of memory: one runs at a time. A model that asks the host in the middle has none."""
        memory = None
        for size in sorted(sizes, reverse=True):
            self.decode_slots.fill_(self._slots.spare)
            self._decode(size)  # compiles what this size needs
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=memory):
                    drawn = self._decode(size)
            except RuntimeError as reason:
                log.warning("decode steps run kernel by kernel: they cannot be captured (%s)", str(reason).split("\n")[0])
                self._graphs.clear()
                return
            memory = graph.pool()
            self._graphs[size] = graph, drawn
        torch.cuda.synchronize()
        log.info("decode steps captured for %d batch sizes up to %d", len(sizes), max(sizes))

    def _decode(self, sequences: int) -> Drawn:
        self._prepare(sequences, 0)
        rows = sequences * self.queries
        logits = self._forward(self._batch(None, sequences), rows, None, None)
        return Drawn(logits, self.row_slots[:rows], self._positions[:rows] + 1)

    def _prepare(self, sequences: int, first: int) -> None:
        if self._propose is not None:
            self._propose(self.decode_slots[:sequences], self.drafts, self.draft_counts)
        slots, work = self._slots, self._work
        target = target_items(sequences)
        items = sequences + target
        prepare_decodes[(1,)](
            self.decode_slots, slots.tokens, slots.known, slots.limits, slots.tables, self.drafts, self.draft_counts,
            self._ids[first:], self._positions[first:], self.row_slots[first:], self._write_blocks[first:],
            self._write_offsets[first:], self._contexts, self._first_positions, self.codes, self.fed, work.first_items,
            work.item_counts, work.piece_tokens, work.records, sequences, slots.spare, items, target, PIECE_LEAST,
            slots.tokens.stride(0), slots.tables.stride(0), BLOCK_SIZE=self._shape.block_size,
            SEQUENCES=max(16, triton.next_power_of_2(sequences)), QUERIES=self.queries,
            QUERIES_PADDED=triton.next_power_of_2(self.queries), ITEMS=1024, STEP=PIECE_STEP, num_warps=8,
        )  # fmt: skip
        name_items[(sequences,)](
            self.decode_slots, self._contexts, self._first_positions, work.first_items, work.item_counts, work.piece_tokens,
            work.records, ITEMS=64, num_warps=1,
        )  # fmt: skip

    def _batch(self, chunks: ChunkPart | None, sequences: int) -> DeviceBatch:
        return DeviceBatch(
            tables=self._slots.tables,
            write_blocks=self._write_blocks,
            write_offsets=self._write_offsets,
            chunks=chunks,
            decodes=self._decodes(sequences) if sequences else None,
        )

    def _decodes(self, sequences: int) -> DecodePart:
        slots, contexts, first = self.decode_slots[:sequences], self._contexts, self._first_positions
        each = self._each[:sequences]
        work = self._work.sized(sequences + target_items(sequences))
        as_chunks = ChunkPart(
            sequences * self.queries, slots, contexts, first, self._starts[: sequences + 1], each, self._zeros[:sequences]
        )
        return DecodePart(sequences, self.queries, slots, contexts, first, work, as_chunks)

    def _forward(
        self, batch: DeviceBatch, tokens: int, rows: torch.Tensor | None, written: Callable[[int], None] | None
    ) -> torch.Tensor:
        attention = CudaAttention(batch, self._pool.layers, self._bench, written)
        ids, positions = self._ids[:tokens].unsqueeze(0), self._positions[:tokens].unsqueeze(0)
        return forward(self._model, ids, positions, 0 if rows is None else rows, attention)


def _work_for(layers: list[LayerSpec], heads: int, shape: ExecutorShape, device: torch.device) -> DecodeWork:
    rows = max(layer.kv_heads * triton.next_power_of_2(-(-heads // layer.kv_heads) * shape.burst) for layer in layers)
    dim = max(16, triton.next_power_of_2(max(layer.value_dim for layer in layers)))
    sizes = list(range(1, shape.slots + 1))
    return make_work(sizes, rows, max(layer.kv_heads for layer in layers), dim, device)


def tile_chunks(lengths: list[int], queries: int) -> tuple[list[int], list[int]]:
    """(sequence, first row within it) of each tile of so many queries."""
    tiles = [(sequence, start) for sequence, length in enumerate(lengths) for start in range(0, length, queries)]
    return [sequence for sequence, _ in tiles], [start for _, start in tiles]
