"""Runs the model over a step's rows, with buffers allocated once at full size and short steps as CUDA graphs.

A graph replays the same kernels on the same memory, so everything that a step reads or writes is in buffers of this object,
or in the slots. Decodes are captured for some numbers of sequences (`buckets_upto`), steps with chunks for some rows and
sequences (`chunks.mixed_sizes`); a step uses the next larger graph and is padded to it with the spare slot.

    rows of a step with chunks     chunks, padded to the tokens of its size | decodes, padded to its sequences

A step with more or longer chunks than any graph is launched kernel by kernel: its kernels are long enough for that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import triton

from baton.executor.contract import ExecutorShape
from baton.executor.cuda.attention import CudaAttention, chunk_queries
from baton.executor.cuda.batch import ChunkPart, DecodePart, DecodeWork, DeviceBatch, make_work, target_items
from baton.executor.cuda.chunks import CHUNKS_MOST, NO_CHUNKS, ChunkFrame, MixedSize, smallest_size
from baton.executor.cuda.drafting import Propose
from baton.executor.cuda.kernels_steps import RUNS, name_items, prepare_decodes
from baton.executor.cuda.pool import CudaPool
from baton.executor.cuda.products import ProductScratch
from baton.executor.cuda.slots import DeviceSlots
from baton.executor.kv_pool import LayerSpec
from baton.executor.model_loading import LoadedModel, forward
from baton.executor.model_support import text_config

log = logging.getLogger(__name__)

PIECE_STEP = 64
PIECE_LEAST = 64
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024)


@dataclass(frozen=True, slots=True)
class DeviceChunks:
    """`chunks.ChunkArrays` of a step, as they were sent to the device."""

    part: ChunkPart
    ids: torch.Tensor
    positions: torch.Tensor
    row_slots: torch.Tensor
    write_blocks: torch.Tensor
    write_offsets: torch.Tensor
    logit_rows: torch.Tensor
    drawn_slots: torch.Tensor
    drawn_positions: torch.Tensor


@dataclass(frozen=True, slots=True)
class LogitRows:
    """The logits of a step and the slots of their rows: chunks first, then decodes."""

    logits: torch.Tensor
    slots: torch.Tensor
    """[rows] int32"""
    positions: torch.Tensor
    """[rows] int32: position of the token to be drawn"""
    chunk_rows: int
    """Number of rows of chunks, padding included."""


@dataclass(frozen=True, slots=True)
class _Framed:
    """The input buffers of steps with chunks that are padded to this size."""

    frame: ChunkFrame
    there: torch.Tensor
    chunks: DeviceChunks
    """Views of the buffer."""


def named_chunks(arrays: list[torch.Tensor]) -> DeviceChunks:
    """DeviceChunks from tensors in the order of `ChunkArrays`."""
    part, rows = arrays[:6], arrays[6:]
    return DeviceChunks(ChunkPart(len(rows[0]), *part), *rows)


def buckets_upto(slots: int) -> list[int]:
    return [*(size for size in BUCKETS if size < slots), slots]


class ModelRunner:
    def __init__(
        self,
        loaded: LoadedModel,
        shape: ExecutorShape,
        slots: DeviceSlots,
        pool: CudaPool,
        scratch: ProductScratch,
        step_tokens: int,
        propose: Propose | None = None,
    ) -> None:
        self._model, self._layers = loaded.model, loaded.layers
        self._shape, self._slots, self._pool, self.scratch = shape, slots, pool, scratch
        self.propose = propose
        self.queries = shape.burst
        """Rows that a sequence feeds."""
        self.width = shape.burst
        """Most tokens of a decode: `drafts` has one less for each."""
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
        self._graphs: dict[int | MixedSize, tuple[torch.cuda.CUDAGraph, LogitRows]] = {}
        self._buckets: list[int] = []
        self._chunks_most = min(CHUNKS_MOST, shape.slots)
        self._mixed_sizes: list[MixedSize] = []
        self._framed: dict[int, _Framed] = {}

    @property
    def has_graphs(self) -> bool:
        return bool(self._graphs)

    def bucket(self, sequences: int) -> int:
        """The number of sequences of the next larger graph; the number itself if there is none."""
        return next((size for size in self._buckets if size >= sequences), sequences)

    def mixed_size(self, chunks: int, tokens: int, decodes: int) -> MixedSize | None:
        """The size to which a step with chunks is padded; None if it runs unpadded."""
        return smallest_size(self._mixed_sizes, tokens, decodes) if chunks <= self._chunks_most else None

    def frame(self, size: MixedSize) -> ChunkFrame:
        return self._framed[size.tokens].frame

    def decode(self, sequences: int) -> LogitRows:
        """Run a step in which all rows decode; `sequences` is a bucket where there are graphs."""
        return self._replayed(sequences) if sequences in self._graphs else self._decode(sequences)

    def mixed(self, chunks: DeviceChunks, sequences: int, written: Callable[[int], None] | None) -> LogitRows:
        """Run a step with chunks, unpadded."""
        first = chunks.part.tokens
        for buffer, values in (
            (self._ids, chunks.ids),
            (self._positions, chunks.positions),
            (self.row_slots, chunks.row_slots),
            (self._write_blocks, chunks.write_blocks),
            (self._write_offsets, chunks.write_offsets),
        ):
            buffer[:first].copy_(values)
        rows, slots, positions = chunks.logit_rows, chunks.drawn_slots, chunks.drawn_positions
        upto = first + sequences * self.queries
        if sequences:
            self._prepare(sequences, first)
            own = torch.arange(first, upto, dtype=torch.int32, device=rows.device)
            rows = torch.cat([rows, own])
            slots = torch.cat([slots, self.row_slots[first:upto]])
            positions = torch.cat([positions, self._positions[first:upto] + 1])
        logits = self._forward(self._batch(chunks.part, sequences), upto, rows.long(), written)
        return LogitRows(logits, slots, positions, len(chunks.logit_rows))

    def mixed_filled(self, size: MixedSize, chunks: torch.Tensor) -> LogitRows:
        """Run a step with chunks that `frame` padded to this size."""
        framed = self._framed[size.tokens]
        framed.there.copy_(chunks)
        return self._replayed(size) if size in self._graphs else self.mixed(framed.chunks, size.sequences, None)

    def capture(self, sizes: list[int]) -> None:
        """Capture the graphs of decodes, which share one memory pool. A model that synchronises with the host has none."""
        self._fill_with_nobody()
        try:
            for size in sorted(sizes, reverse=True):
                self._capture(size, partial(self._captured_decode, size))
        except RuntimeError as reason:
            log.warning("decode steps run kernel by kernel: they cannot be captured (%s)", str(reason).split("\n")[0])
            self._graphs.clear()
            return
        self._buckets = sorted(sizes)
        log.info("decode steps captured for %d batch sizes up to %d", len(sizes), max(sizes))

    def capture_mixed(self, sizes: list[MixedSize]) -> None:
        """Capture steps with chunks, if decodes could be captured."""
        if not self._graphs or not sizes:
            return
        self.fill_up_to(sizes)
        self._fill_with_nobody()
        try:
            self._capture_mixed(sizes)
        except RuntimeError as reason:
            log.warning("steps with chunks run kernel by kernel: they cannot be captured (%s)", str(reason).split("\n")[0])
            for size in sizes:
                self._graphs.pop(size, None)
            self.fill_up_to([])
            return
        log.info("steps with chunks captured for %d sizes up to %d tokens", len(sizes), max(sizes).tokens)

    def fill_up_to(self, sizes: list[MixedSize]) -> None:
        """From now on, pad steps with chunks that fit into one of these sizes."""
        self._mixed_sizes = sizes
        self._framed = {tokens: self._frame_of(tokens) for tokens in sorted({size.tokens for size in sizes})}

    def _frame_of(self, tokens: int) -> _Framed:
        frame = ChunkFrame(tokens, self._chunks_most, chunk_queries(self.scratch.invariant), self._slots.spare)
        there = torch.from_numpy(frame.fill(NO_CHUNKS)).to(self._ids.device)
        return _Framed(frame, there, named_chunks([there[place] for place in frame.places]))

    def _capture_mixed(self, sizes: list[MixedSize]) -> None:
        """Capture one size. All sizes write their logits to the same buffer, so that they need memory only once."""
        logits: torch.Tensor | None = None
        for size in sorted(sizes, key=lambda size: (size.sequences, size.tokens), reverse=True):
            chunks = self._framed[size.tokens].chunks
            if logits is None:
                logits = torch.empty_like(self.mixed(chunks, size.sequences, None).logits)
            self._capture(size, partial(self._mixed_into, logits, chunks, size.sequences))

    def _mixed_into(self, logits: torch.Tensor, chunks: DeviceChunks, sequences: int) -> LogitRows:
        drawn = self.mixed(chunks, sequences, None)
        there = logits[: len(drawn.logits)]
        there.copy_(drawn.logits)
        return replace(drawn, logits=there)

    def _capture(self, size: int | MixedSize, run: Callable[[], LogitRows]) -> None:
        run()  # compiles the kernels of this size
        torch.cuda.synchronize()
        graph, other = torch.cuda.CUDAGraph(), next(iter(self._graphs.values()), None)
        with torch.cuda.graph(graph, pool=None if other is None else other[0].pool()):
            drawn = run()
        self._graphs[size] = graph, drawn

    def _replayed(self, size: int | MixedSize) -> LogitRows:
        graph, drawn = self._graphs[size]
        graph.replay()
        return drawn

    def _fill_with_nobody(self) -> None:
        """What a capture computes changes no slot."""
        self.decode_slots.fill_(self._slots.spare)

    def _captured_decode(self, sequences: int) -> LogitRows:
        return self._decode(sequences)

    def _decode(self, sequences: int) -> LogitRows:
        self._prepare(sequences, 0)
        rows = sequences * self.queries
        logits = self._forward(self._batch(None, sequences), rows, None, None)
        return LogitRows(logits, self.row_slots[:rows], self._positions[:rows] + 1, 0)

    def _prepare(self, sequences: int, first: int) -> None:
        if self.propose is not None:
            self.propose(self.decode_slots[:sequences], self.drafts, self.draft_counts)
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
        attention = CudaAttention(batch, self._pool.layers, self.scratch, written)
        ids, positions = self._ids[:tokens].unsqueeze(0), self._positions[:tokens].unsqueeze(0)
        return forward(self._model, ids, positions, 0 if rows is None else rows, attention)


def _work_for(layers: list[LayerSpec], heads: int, shape: ExecutorShape, device: torch.device) -> DecodeWork:
    rows = max(layer.kv_heads * triton.next_power_of_2(-(-heads // layer.kv_heads) * shape.burst) for layer in layers)
    dim = max(16, triton.next_power_of_2(max(layer.value_dim for layer in layers)))
    sizes = list(range(1, shape.slots + 1))
    return make_work(sizes, rows, max(layer.kv_heads for layer in layers), dim, device)
