"""Asking for memory ahead: while one kernel ends and the next one starts, the weights that come next already travel.

Between two products memory would idle for some microseconds, thirty-six layers long, eight times a layer. A request of this
kind waits for nothing and changes no value; it only brings bytes from memory into the cache that all processors share.
"""

import triton
import triton.language as tl

PIECE_BYTES = 1024
_PIECE: tl.constexpr = tl.constexpr(PIECE_BYTES)


@triton.jit
def reach_ahead(ahead, ahead_bytes, program, programs, LANES: tl.constexpr):
    """This program's share of `ahead_bytes` (whole pieces) from `ahead` on; one lane a thread."""
    pieces = ahead_bytes // _PIECE
    each = (pieces + programs - 1) // programs
    first = program * each
    for start in range(0, each, LANES):
        piece = start + tl.arange(0, LANES)
        wanted = ((piece < each) & (first + piece < pieces)).to(tl.int32)
        address = ahead.to(tl.int64, bitcast=True) + (first + piece).to(tl.int64) * _PIECE
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], 1024; mov.u32 $0, 0; }",
            "=r,l,r",
            [address, wanted],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
