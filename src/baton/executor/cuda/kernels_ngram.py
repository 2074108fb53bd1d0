"""Drafts by n-grams on the device: the tokens that followed an earlier occurrence of the sequence's last n-gram.

The drafts are those of `drafts.NgramProposer`: the longest n-gram of `ngram_min` to `ngram_max` tokens that occurs earlier,
and its latest occurrence (it may overlap the end); the draft is what follows there, as far as it is known. The room of a
slot is not checked.
"""

import torch
import triton
import triton.language as tl

from baton.core.errors import InvariantViolated

PLACES: tl.constexpr = tl.constexpr(1 << 26)
"""Upper bound on the positions of a sequence."""
LENGTHS = 32
"""Upper bound on the length of an n-gram, so that a length and a position fit into 31 bits."""
TILE = 2048


@triton.jit
def find_ngrams(
    tokens,
    known,
    slots,
    drafts,
    counts,
    tokens_stride,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    DRAFTS: tl.constexpr,
    DRAFTS_PADDED: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program: one row. Looks through the sequence backwards, and no further once an end of MOST tokens is found.

    What was found is one number, the length and then where the following begins: the longest counts, then the latest.
    """
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    end = tl.load(known + slot)
    at = tokens + slot * tokens_stride
    found = tl.full([], 0, tl.int32)
    behind = end
    while (behind > 1) & (found < MOST * PLACES):
        place = behind - TILE + tl.arange(0, TILE)
        length = alike_before(at, place, end, MOST, TILE)
        found = tl.maximum(found, tl.max(tl.where(length >= LEAST, length * PLACES + place, 0), 0))
        behind -= TILE
    begin = found % PLACES
    count = tl.where(found > 0, tl.minimum(end - begin, DRAFTS), 0)
    lane = tl.arange(0, DRAFTS_PADDED)
    draft = tl.load(at + begin + lane, mask=lane < count, other=0)
    tl.store(drafts + row * DRAFTS + lane, draft, mask=lane < DRAFTS)
    tl.store(counts + row, count)


@triton.jit
def alike_before(at, place, end, MOST: tl.constexpr, TILE: tl.constexpr):
    """How many tokens before each place equal those before the end, up to MOST."""
    alike = place > 0
    length = tl.zeros([TILE], tl.int32)
    for back in tl.static_range(1, MOST + 1):
        alike = alike & (place >= back)
        last = tl.load(at + end - back, mask=end >= back, other=0)
        alike = alike & (tl.load(at + place - back, mask=alike, other=0) == last)
        length += alike.to(tl.int32)
    return length


def propose_ngrams(
    tokens: torch.Tensor,
    known: torch.Tensor,
    slots: torch.Tensor,
    ngram_min: int,
    ngram_max: int,
    drafts: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Writes `drafts` [rows, the most] and `counts` [rows] for the rows of `slots`; past its count a row of drafts is 0.

    All are int32 tensors on the device: tokens [slots, context], known [slots].
    """
    if ngram_max >= LENGTHS or tokens.shape[1] >= PLACES.value:
        raise InvariantViolated(f"ends of {ngram_max} tokens in sequences of {tokens.shape[1]} are too long to look for")
    rows, most = drafts.shape
    find_ngrams[(rows,)](
        tokens,
        known,
        slots,
        drafts,
        counts,
        tokens.stride(0),
        LEAST=ngram_min,
        MOST=ngram_max,
        DRAFTS=most,
        DRAFTS_PADDED=triton.next_power_of_2(most),
        TILE=TILE,
        num_warps=8,
    )
