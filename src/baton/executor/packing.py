"""Turns the chunks and decodes of one step into one packed row of tokens.

    sequence        A A A A A | B B B | C | D        chunks first, then decodes (one token each)
    query_starts    0           5       8   9   10
    contexts        12          3       40  7         tokens each sequence attends to, this step's included

Position p of a sequence lives in block `tables[s, p // block_size]`, offset `p % block_size`. Arrays are torch tensors over
memory of this step alone; nothing here is changed after it is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from baton.core.plan import Int32s
from baton.executor.slots import SlotTable


class Feed(NamedTuple):
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
    """How many leading sequences are chunks; the rest feed one token each."""

    @property
    def tokens(self) -> int:
        return self.ids.shape[1]


def pack(slots: SlotTable, chunks: list[Feed], decode_slots: Int32s) -> PackedBatch:
    last = slots.known[decode_slots] - 1
    lengths = np.array([feed.end - feed.begin for feed in chunks] + [1] * len(decode_slots), dtype=np.int32)
    rows = np.concatenate([np.array([feed.slot for feed in chunks], dtype=np.int32), decode_slots]).astype(np.int32)
    positions = np.concatenate([*(np.arange(feed.begin, feed.end) for feed in chunks), last]).astype(np.int64)
    contexts = np.concatenate([np.array([feed.end for feed in chunks], dtype=np.int64), last + 1]).astype(np.int32)
    starts = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    row_of_token = np.repeat(rows, lengths)
    size = slots.shape.block_size
    width = int(-(-int(contexts.max()) // size))
    samples = np.array([feed.samples for feed in chunks] + [True] * len(decode_slots), dtype=np.bool_)
    return PackedBatch(
        ids=torch.from_numpy(slots.tokens[row_of_token, positions].astype(np.int64)).unsqueeze(0),
        positions=torch.from_numpy(positions).unsqueeze(0),
        query_starts=torch.from_numpy(starts),
        contexts=torch.from_numpy(contexts),
        tables=torch.from_numpy(np.maximum(slots.table[rows, :width], 0)),
        write_blocks=torch.from_numpy(slots.table[row_of_token, positions // size]),
        write_offsets=torch.from_numpy((positions % size).astype(np.int32)),
        logit_rows=torch.from_numpy((starts[1:][samples] - 1).astype(np.int64)),
        chunk_sequences=len(chunks),
    )
