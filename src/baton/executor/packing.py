"""Turns the chunks and decodes of one step into one packed row of tokens.

    sequence        A A A A A | B B B | C | D D D    chunks first, then decodes: the last known token, drafts behind it
    query_starts    0           5       8   9       12
    contexts        12          3       40  9         tokens each sequence attends to, this step's included

Position p of a sequence lives in block `tables[s, p // block_size]`, offset `p % block_size`. Arrays are torch tensors over
memory of this step alone; nothing here is changed after it is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from baton.core.engine.plan import Int32s
from baton.executor.slot_table import SlotTable


class FeedRange(NamedTuple):
    """Tokens [begin, end) of a slot go through the model; the last one's logits are drawn from when `samples`."""

    slot: int
    begin: int
    end: int
    samples: bool


@dataclass(frozen=True, slots=True)
class PackedBatch:
    ids: torch.Tensor
    """[1, tokens]"""
    positions: torch.Tensor
    """[1, tokens]"""
    query_starts: torch.Tensor
    """[sequences + 1] int32"""
    contexts: torch.Tensor
    """[sequences] int32"""
    tables: torch.Tensor
    """[sequences, blocks of the longest] int32; entries past a sequence's own blocks are 0 and never read as KV"""
    write_blocks: torch.Tensor
    """[tokens] int32: where each token's KV goes"""
    write_offsets: torch.Tensor
    """[tokens] int32"""
    logit_rows: torch.Tensor
    """[sampled] int64: the tokens whose logits are wanted"""
    chunk_sequences: int
    """How many leading sequences are chunks; the rest feed one token each, or a few with drafts."""

    @property
    def tokens(self) -> int:
        return self.ids.shape[1]


def pack(slots: SlotTable, chunks: list[FeedRange], decode_slots: Int32s, drafted: Int32s | None = None) -> PackedBatch:
    """`drafted`: how many of the tokens behind the last known one each decode feeds too; None where no decode does.

    Logits are wanted of the last token of a chunk that samples, and of every token of a decode.
    """
    chunk_lengths = np.array([feed.end - feed.begin for feed in chunks], dtype=np.int64)
    decode_lengths = np.ones(len(decode_slots), dtype=np.int64) if drafted is None else 1 + drafted.astype(np.int64)
    lengths = np.concatenate([chunk_lengths, decode_lengths])
    rows = np.concatenate([np.array([feed.slot for feed in chunks], dtype=np.int32), decode_slots]).astype(np.int32)
    begins = np.concatenate([np.array([feed.begin for feed in chunks], dtype=np.int64), slots.known[decode_slots] - 1])
    starts = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    positions = np.arange(starts[-1]) + np.repeat(begins - starts[:-1], lengths)
    contexts = (begins + lengths).astype(np.int32)
    row_of_token = np.repeat(rows, lengths)
    size = slots.shape.block_size
    width = int(-(-int(contexts.max()) // size))
    samples = np.array([feed.samples for feed in chunks], dtype=np.bool_)
    ends = starts[1 : len(chunks) + 1][samples] - 1
    return PackedBatch(
        ids=torch.from_numpy(slots.tokens[row_of_token, positions].astype(np.int64)).unsqueeze(0),
        positions=torch.from_numpy(positions).unsqueeze(0),
        query_starts=torch.from_numpy(starts),
        contexts=torch.from_numpy(contexts),
        tables=torch.from_numpy(np.maximum(slots.table[rows, :width], 0)),
        write_blocks=torch.from_numpy(slots.table[row_of_token, positions // size]),
        write_offsets=torch.from_numpy((positions % size).astype(np.int32)),
        logit_rows=torch.from_numpy(np.concatenate([ends, np.arange(starts[len(chunks)], starts[-1])]).astype(np.int64)),
        chunk_sequences=len(chunks),
    )
