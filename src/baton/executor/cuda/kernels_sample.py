"""Chooses one token per row in two launches: a survey of the whole vocabulary in chunks, and a choice among few chunks.

    logits of a row  |--chunk--|--chunk--|--chunk--|-chu|      one program of `survey` for each chunk of each row
    of each chunk     its largest logit; an upper bound on its best token's score; its weight
    of each row       one program of `choose`: visits the few chunks that those numbers do not rule out

The choice is that of `executor.token_choice`, with these terms. A *value* is (logit - maximum) / temperature: 0 at the
maximum, below elsewhere. Tokens rank by their *place*, the depth of the value (its bits without the sign, which rise as the
value falls) and then the id, as one number: the least place ranks first. All cuts (top-k, top-p, min-p) keep a prefix of
that order. A draw is the largest value + noise among those kept, computed in float64 as there.

    top-k    the place of the k-th is searched by halving; a chunk whose greatest logit lies deeper is not visited
    top-p    the winner among all that top-k and min-p leave is drawn first; where as much weight as top-p asks for ranks
             before it, it and all after it are out and the draw is repeated among those before it

A row may have a mask, one bit a token: what it forbids has no logit, and what it permits has at least the least finite
one, so that a row always has a token to choose. With MASKED, `survey` reads which mask its row has, if any, and writes the
logits that the mask changes back; `choose`, which may go over a row many times, reads no mask.

Nothing depends on the batch: the numbers of a chunk depend on that chunk, the choice for a row on its chunks. Weights are
e^value in float32 and not rounded to units of 2⁻⁴⁰, so whether a token is inside top-p can differ from
`executor.token_choice` where rounding alone decides; everything else is equal.
"""

import triton
import triton.language as tl

from baton.executor.cuda.kernels_noise import gumbel, hash_of, noise_most, row_key

WISHES: tl.constexpr = tl.constexpr(5)
"""Words of 64 bits a slot: stream, temperature (0 is greedy), top-k (0 is none), top-p (inf is none), floor of values."""
NOTHING: tl.constexpr = tl.constexpr(float("-inf"))
LOGIT_MOST: tl.constexpr = tl.constexpr((2.0 - 2.0**-23) * 2.0**127)
LOGIT_LEAST: tl.constexpr = tl.constexpr(-(2.0 - 2.0**-7) * 2.0**127)
"""The least finite number of bfloat16, which float32 has too."""
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
ID_BITS: tl.constexpr = tl.constexpr(20)
ID_MOST: tl.constexpr = tl.constexpr((1 << 20) - 1)
DEPTH_MOST: tl.constexpr = tl.constexpr(0x7F800000)
"""The depth of -inf."""
PLACE_MOST: tl.constexpr = tl.constexpr((0x7F800000 << 20) + (1 << 20) - 1)
SLACK: tl.constexpr = tl.constexpr(1e-3)
"""Covers the float32 rounding of the bound on a token's score, which is ten times smaller."""
NOISE_MOST: tl.constexpr = tl.constexpr(23.0)
EVERYTHING: tl.constexpr = tl.constexpr(float("inf"))
WEIGHT_LEAST: tl.constexpr = tl.constexpr(2.0**-40)
"""Least weight that top-p keeps; the largest value alone weighs 1."""


@triton.jit
def sound_logits(at, token, vocabulary):
    """float32; NaN counts as -inf, +inf as the greatest finite number, and there is nothing past the vocabulary."""
    logit = tl.load(at + token, mask=token < vocabulary, other=NOTHING).to(tl.float32)
    return tl.minimum(tl.where(logit == logit, logit, NOTHING), LOGIT_MOST)


@triton.jit
def apply_mask(at, token, vocabulary, logit, entry, masks, words):
    """The logits after a mask of the table, written back where it changes them."""
    read = token < vocabulary
    word = tl.load(masks + entry.to(tl.int64) * words + (token >> 5), mask=read, other=0)
    permitted = ((word >> (token & 31)) & 1) > 0
    masked = tl.where(permitted, tl.maximum(logit, LOGIT_LEAST), NOTHING)
    tl.store(at + token, masked.to(at.dtype.element_ty), mask=read & (masked != logit))
    return masked


@triton.jit
def values_of(row, token):
    """What draws go by. `row` is (its logits, the vocabulary, its greatest logit, its temperature). In a row without any
    finite logit all values are equal."""
    at, vocabulary, greatest, temperature = row
    hopeless = greatest == NOTHING
    equal = tl.where(token < vocabulary, 0.0, NOTHING)
    logit = tl.where(hopeless, equal, sound_logits(at, token, vocabulary))
    return tl.div_rn(logit - tl.where(hopeless, 0.0, greatest), temperature)


@triton.jit
def depth_of(value):
    return tl.abs(value).to(tl.int32, bitcast=True)


@triton.jit
def place_of(value, token):
    return (depth_of(value).to(tl.int64) << ID_BITS) + token


@triton.jit
def real_wish(wishes, slot, word):
    return tl.load(wishes + slot * WISHES + word).to(tl.float64, bitcast=True)


@triton.jit
def survey(
    logits,
    wishes,
    slots,
    positions,
    peaks,
    bounds,
    weights,
    masks,
    mask_rows,
    words,
    vocabulary,
    stride,
    CHUNK: tl.constexpr,
    DRAWS: tl.constexpr,
    CUTS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One program: one chunk of one row. Bounds are log2 of what e^(value + noise) can be, weights sums of e^value; both
    count values from the chunk's own greatest, since the row's is not known yet."""
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    cell = row * tl.num_programs(0) + chunk
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    at = logits + row.to(tl.int64) * stride
    logit = sound_logits(at, token, vocabulary)
    if MASKED:
        entry = tl.load(mask_rows + row)
        if entry >= 0:
            logit = apply_mask(at, token, vocabulary, logit, entry, masks, words)
    peak = tl.max(logit, 0)
    tl.store(peaks + cell, peak)
    if DRAWS:
        slot = tl.load(slots + row)
        temperature = real_wish(wishes, slot, 1).to(tl.float32)
        if temperature > 0:
            slope, offset = row_key(tl.load(wishes + slot * WISHES), tl.load(positions + row))
            value = (logit - tl.where(peak == NOTHING, 0.0, peak)) * ((1.0 / temperature) * LOG2_E)
            tl.store(bounds + cell, tl.max(value + noise_most(hash_of(token, slope, offset)), 0))
            if CUTS:
                tl.store(weights + cell, tl.sum(tl.exp2(value), 0))


@triton.jit
def choose(
    logits,
    wishes,
    slots,
    positions,
    peaks,
    bounds,
    weights,
    lists,
    out,
    vocabulary,
    stride,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    DRAWS: tl.constexpr,
    CUTS: tl.constexpr,
):
    """One program: one row. CHUNKS is the least power of two that is not below `chunks`."""
    number = tl.program_id(0)
    lane = tl.arange(0, CHUNKS)
    there = lane < chunks
    cell = number * chunks + lane
    at = logits + number.to(tl.int64) * stride
    peak = tl.load(peaks + cell, mask=there, other=NOTHING)
    greatest = tl.max(peak, 0)
    if DRAWS:
        slot = tl.load(slots + number)
        temperature = real_wish(wishes, slot, 1).to(tl.float32)
        if temperature > 0:
            row = (at, vocabulary, greatest, temperature)
            key = row_key(tl.load(wishes + slot * WISHES), tl.load(positions + number))
            bound = score_most(row, peak, tl.load(bounds + cell, mask=there, other=NOTHING), there)
            if CUTS:
                total = total_of(row, peak, tl.load(weights + cell, mask=there, other=0.0))
                listed = lists + number * CHUNKS
                token = draw_inside_cuts(row, key, wishes, slot, listed, peak, bound, total, CHUNK, CHUNKS, GROUP)
            else:
                token = race(row, key, bound, NOTHING, PLACE_MOST, CHUNK, CHUNKS)
        else:
            token = first_greatest(at, peak, greatest, vocabulary, CHUNK)
    else:
        token = first_greatest(at, peak, greatest, vocabulary, CHUNK)
    tl.store(out + number, token)


@triton.jit
def first_greatest(at, peak, greatest, vocabulary, CHUNK: tl.constexpr):
    token = tl.argmax(peak, 0) * CHUNK + tl.arange(0, CHUNK)
    logit = sound_logits(at, token, vocabulary)
    return tl.min(tl.where(logit == greatest, token, ID_MOST), 0)


@triton.jit
def score_most(row, peak, bound, there):
    """What the best token of each chunk can score at most, but for SLACK; -inf where it has none."""
    hopeless = row[2] == NOTHING
    most = (peak - tl.where(hopeless, 0.0, row[2])) / row[3] + bound * LN_2
    return tl.where(hopeless, tl.where(there, NOISE_MOST, NOTHING), most)


@triton.jit
def total_of(row, peak, weight):
    """The weight of the whole vocabulary, in float64."""
    hopeless = row[2] == NOTHING
    scale = tl.exp2((peak - tl.where(hopeless, 0.0, row[2])) * ((1.0 / row[3]) * LOG2_E))
    return tl.where(hopeless, row[1], tl.sum(weight.to(tl.float64) * scale.to(tl.float64), 0))


@triton.jit
def race(row, key, bound, floor, last, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """The token with the greatest value + noise among those at places up to `last` whose value is not below the floor.

    Chunks are visited by falling bound until none can hold a better one. At least one token must be in the race.
    """
    slope, offset = key
    lane = tl.arange(0, CHUNKS)
    best = tl.full([], NOTHING, tl.float64)
    winner = tl.full([], ID_MOST, tl.int32)
    most = tl.max(bound, 0)
    while (most > NOTHING) & (most + SLACK >= best):
        chunk = tl.argmax(bound, 0)
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        value = values_of(row, token)
        runs = (place_of(value, token) <= last) & (value >= floor) & (value > NOTHING)
        score = tl.where(runs, value.to(tl.float64) + gumbel(hash_of(token, slope, offset)), NOTHING)
        top = tl.max(score, 0)
        first = tl.min(tl.where(score == top, token, ID_MOST), 0)
        winner = tl.where((top > best) | ((top == best) & (first < winner)), first, winner)
        best = tl.maximum(best, top)
        bound = tl.where(lane == chunk, NOTHING, bound)
        most = tl.max(bound, 0)
    return winner


@triton.jit
def draw_inside_cuts(
    row,
    key,
    wishes,
    slot,
    listed,
    peak,
    bound,
    total,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
):
    top_k = tl.load(wishes + slot * WISHES + 2).to(tl.int32)
    top_p = real_wish(wishes, slot, 3)
    floor = real_wish(wishes, slot, 4).to(tl.float32)
    hopeless = row[2] == NOTHING
    peak_depth = depth_of(tl.div_rn(tl.where(hopeless, 0.0, peak - tl.where(hopeless, 0.0, row[2])), row[3]))
    last = tl.full([], PLACE_MOST, tl.int64)
    if top_k > 0:
        last = kth_place(row, listed, peak_depth, top_k, CHUNK, CHUNKS, GROUP)
        if top_p < EVERYTHING:
            total = ranked_before(row, listed, peak_depth, last + 1, CHUNK, CHUNKS, GROUP)[1]
    needed = tl.maximum(top_p * total, WEIGHT_LEAST)
    before = needed
    token = tl.full([], 0, tl.int32)
    while before >= needed:
        token = race(row, key, bound, floor, last, CHUNK, CHUNKS)
        place = place_of(values_of(row, token), token)
        before = tl.full([], 0.0, tl.float64)
        if top_p < EVERYTHING:
            before = ranked_before(row, listed, peak_depth, place, CHUNK, CHUNKS, GROUP)[1]
        last = place - 1
    return token


@triton.jit
def ranked_before(
    row,
    listed,
    peak_depth,
    place,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """(how many tokens have a lesser place, their weight). Visits the chunks whose greatest value is not deeper."""
    depth = (place >> ID_BITS).to(tl.int32)
    own = (place & ID_MOST).to(tl.int32)
    near = (peak_depth <= depth).to(tl.int32)
    # The list is written and read by all threads of the program: none may write while another still reads the last one.
    tl.debug_barrier()
    tl.store(listed + tl.cumsum(near, 0) - 1, tl.arange(0, CHUNKS), mask=near > 0)
    tl.debug_barrier()
    chunks = tl.sum(near, 0)
    count = tl.zeros([CHUNK], tl.int32)
    weight = tl.zeros([CHUNK], tl.float32)
    begin = tl.full([], 0, tl.int32)
    while begin < chunks:
        entry = begin + tl.arange(0, GROUP)
        chunk = tl.load(listed + entry, mask=entry < chunks, other=CHUNKS)
        token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        value = values_of(row, token)
        ahead = (depth_of(value) < depth) | ((depth_of(value) == depth) & (token < own))
        count += tl.sum(ahead.to(tl.int32), 0)
        weight += tl.sum(tl.where(ahead, tl.exp2(value * LOG2_E), 0.0), 0)
        begin += GROUP
    return tl.sum(count, 0), tl.sum(weight.to(tl.float64), 0)


@triton.jit
def kth_place(
    row,
    listed,
    peak_depth,
    top_k,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A place that exactly `top_k` tokens do not pass. There are more than `top_k` in the vocabulary."""
    low = tl.full([], -1, tl.int64)
    high = (kth_peak(peak_depth, top_k).to(tl.int64) << ID_BITS) + ID_MOST
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        count = ranked_before(row, listed, peak_depth, middle + 1, CHUNK, CHUNKS, GROUP)[0]
        low = tl.where(count < top_k, middle, tl.where(count == top_k, middle - 1, low))
        high = tl.where(count < top_k, high, middle)
    return high


@triton.jit
def kth_peak(peak_depth, top_k):
    """A depth that the greatest values of at least `top_k` chunks do not pass, so that as many tokens do not: where to
    begin. The depth of -inf where there are fewer chunks."""
    low = tl.full([], -1, tl.int32)
    high = tl.full([], DEPTH_MOST, tl.int32)
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        count = tl.sum((peak_depth <= middle).to(tl.int32), 0)
        low = tl.where(count < top_k, middle, tl.where(count == top_k, middle - 1, low))
        high = tl.where(count < top_k, high, middle)
    return high
