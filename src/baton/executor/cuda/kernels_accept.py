"""Which drafts stand, decided on the device, where the next step finds the tokens.

    known     … t(n-1)         drafts  d1 d2 d3
    drawn     s0      s1  s2  s3         s0 stands; s1 if d1 = s0; s2 if besides d2 = s1; and so on

With no drafts this appends one drawn token to each sequence. A token that was fed without a block to hold its KV had no
sound logits: nothing drawn from them stands.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def keep_what_stands(
    drawn,
    drafts,
    counts,
    slots,
    limits,
    table,
    tokens,
    known,
    kept,
    table_stride,
    tokens_stride,
    block_size,
    DRAFTS: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program: one row. It has one warp, so what is known is read by all before it is written by one."""
    row = tl.program_id(0)
    lane = tl.arange(0, LANES)
    slot = tl.load(slots + row).to(tl.int64)
    end = tl.load(known + slot)
    limit = tl.load(limits + slot)
    token = tl.load(drawn + row * (DRAFTS + 1) + lane, mask=lane <= DRAFTS, other=0)
    stands = lane < 0
    if DRAFTS > 0:
        draft = tl.load(drafts + row * DRAFTS + lane, mask=lane < DRAFTS, other=0)
        stands = (lane < tl.load(counts + row)) & (lane < DRAFTS) & (draft == token)
    accepted = tl.min(tl.where(stands, LANES, lane), 0)
    block = tl.load(table + slot * table_stride + (end - 1) // block_size, mask=end > 0, other=-1)
    count = tl.where(block >= 0, tl.maximum(tl.minimum(accepted + 1, limit - end), 0), 0)
    tl.store(tokens + slot * tokens_stride + end + lane, token, mask=lane < count)
    tl.store(known + slot, end + count)
    tl.store(kept + row, count)


def accept_drafts(
    drawn: torch.Tensor,
    drafts: torch.Tensor,
    counts: torch.Tensor,
    slots: torch.Tensor,
    limits: torch.Tensor,
    table: torch.Tensor,
    block_size: int,
    tokens: torch.Tensor,
    known: torch.Tensor,
    kept: torch.Tensor,
) -> None:
    """Appends the tokens that stand to their slots' rows of `tokens`, advances `known`, and writes how many into `kept`.

    drawn [rows, 1 + the most drafts], drafts [rows, the most drafts], counts, slots and kept [rows], limits and known
    [slots], table [slots, blocks], tokens [slots, context]: int32 on the device. A slot that is at its limit, or whose last
    token has no block, keeps nothing; only such a slot may be named by several rows.
    """
    most = drafts.shape[1]
    keep_what_stands[(drawn.shape[0],)](
        drawn,
        drafts,
        counts,
        slots,
        limits,
        table,
        tokens,
        known,
        kept,
        table.stride(0),
        tokens.stride(0),
        block_size,
        DRAFTS=most,
        LANES=triton.next_power_of_2(most + 1),
        num_warps=1,
    )
