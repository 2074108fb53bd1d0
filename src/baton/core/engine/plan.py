"""The whole contract with an executor: a StepPlan goes in, a StepResult comes out, one for one and in order.

A plan is a *delta*. The executor keeps each slot's tokens, block table, lengths and sampling state on its device; a plan
says what changes and which slots compute. Arrays in a plan are read-only and never change: the scheduler plans step k+1
while step k computes, so nothing live may be shared. Plans with the same decodes may name them by the same arrays.

Order inside a plan: stops, copies, starts, grows, then the chunks and decodes are computed as one batch.

Block layout of a slot: position p of the sequence lives in block `table[p // block_size]` at offset `p % block_size`.

    tokens known    t0 t1 t2 ... t(n-1)           n = `known`
    KV computed     k0 k1 k2 ... k(n-2)           the last sampled token has no KV until the next step feeds it

A chunk feeds tokens [begin, end) and writes their KV; the one with `samples` set ends at the last known token and yields
the next. Where the slot's sampling asks for log-probabilities of the prompt, a chunk reports those of the prompt tokens at
positions (begin, end]. A decode feeds the last known token (which may still be on the device only) and yields 1..burst
tokens: an executor may feed up to burst - 1 drafts behind it, guesses of its own, and yields those that prove right. Blocks
for all of them are there; what is written to them for a draft that proves wrong is no KV. Tokens past a slot's `limit` are
never yielded. A decode with a constraint may sit a step out, so that rows without one do not wait for its mask: it yields
nothing, and the next step draws the same token.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from baton.core.engine.request import PromptLogprobs, Sampling, Tokens

Int8s = npt.NDArray[np.int8]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]

NO_INT32S: Int32s = np.empty(0, dtype=np.int32)
NO_INT64S: Int64s = np.empty(0, dtype=np.int64)


class Stop(NamedTuple):
    """Release a slot. The executor answers PREEMPTED with the number of tokens it knows of."""

    slot: int
    epoch: int


class Copy(NamedTuple):
    """Copy the KV of one whole block to another, all layers."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Start:
    """Put a request into an empty slot."""

    slot: int
    epoch: int
    tokens: Tokens
    """Prompt, then outputs delivered so far (on a restart)."""
    prompt_tokens: int
    computed: int
    """Leading positions that already have KV in `blocks`."""
    limit: int
    """Upper bound of `known`."""
    sampling: Sampling
    blocks: Int32s
    """The first blocks of its table; more come as grows."""


class Chunk(NamedTuple):
    """Feed tokens [begin, end) of a slot; `samples` when `end` is all that is known."""

    slot: int
    epoch: int
    begin: int
    end: int
    samples: bool


class StepPlan(Struct, frozen=True, gc=False):
    step: int
    base_step: int
    """The step that this delta builds on; an executor that last ran another step must refuse it."""
    stops: tuple[Stop, ...] = ()
    copies: tuple[Copy, ...] = ()
    starts: tuple[Start, ...] = ()
    grow_slots: Int32s = NO_INT32S
    """Row i: entry `grow_at[i]` of the table of `grow_slots[i]` becomes `grow_blocks[i]`."""
    grow_at: Int32s = NO_INT32S
    grow_blocks: Int32s = NO_INT32S
    chunks: tuple[Chunk, ...] = ()
    decode_slots: Int32s = NO_INT32S
    decode_epochs: Int64s = NO_INT64S

    @property
    def tokens(self) -> int:
        """Tokens that the step feeds, without drafts."""
        decodes = len(self.decode_slots)
        return decodes + sum(chunk.end - chunk.begin for chunk in self.chunks) if self.chunks else decodes


class RowOutcome(IntEnum):
    """The outcome of one slot in one step."""

    TOKENS = 0
    NOTHING_CHUNK_UNFINISHED = 1
    NOTHING_EMPTY_SLOT = 2
    NOTHING_OUT_OF_BLOCKS = 3
    PREEMPTED = 4
    CONSTRAINT_FAILED = 5
    """No token can be drawn that its constraint, allowed tokens and bad words all permit, or its matcher gave up."""
    SAT_OUT = 6
    """Of a decode with a constraint: its mask was not there in time."""


class Logprobs(Struct, array_like=True, frozen=True, forbid_unknown_fields=True, eq=False, gc=False):
    """Log-probabilities of the sampled tokens of one row, one line per token, alternatives by falling probability."""

    row: int
    """Index into the result's rows."""
    chosen: Float32s
    """[tokens]"""
    top_ids: Int32s
    """[tokens, alternatives]"""
    top: Float32s
    """[tokens, alternatives]"""


class StepResult(Struct, frozen=True, gc=False):
    """One row for each stop, chunk and decode of the plan, in that order."""

    step: int
    slots: Int32s
    epochs: Int64s
    outcomes: Int8s
    counts: Int32s
    """Tokens that each row yields; 0 unless the outcome is TOKENS."""
    tokens: Tokens
    """All yielded tokens, row after row."""
    known: Int64s
    """Tokens that the executor knows for the slot after this step; the scheduler checks that it agrees."""
    logprobs: tuple[Logprobs, ...] = ()
    drafted: Int32s = NO_INT32S
    """Drafts fed for each row; empty from an executor without drafts."""
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    """Of the chunks whose slot asks for them."""

    @property
    def drafts(self) -> int:
        """Drafts fed in all."""
        return int(self.drafted.sum()) if len(self.drafted) else 0
