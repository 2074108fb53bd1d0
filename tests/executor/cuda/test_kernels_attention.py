"""Attention over blocks, by the kernels, is what a textbook says: for decodes in pieces and for chunks in tiles."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.attending import BLOCK_SIZE, NOTHING, Paged, ints, normed, paged, rotated
from tests.support.quick_sample import one_in

pytest.importorskip("triton", reason="kernels need Triton, which is not installed here")

import triton
from tests.support.interpreted_products import products_row_by_row

from baton.executor.cuda.kernels_decode import ITEM_WORDS, attend_decode
from baton.executor.cuda.kernels_layer import rotate_and_write, write_rows
from baton.executor.cuda.kernels_prefill import attend_chunks
from baton.executor.cuda.kernels_steps import name_items
from baton.executor.kv_pool import LayerSpec

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array"),  # by the interpreter
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a device the executor's tests run the same kernels"),
]

HEADS, DIM, WIDTH = 4, 16, 6
SPEC = LayerSpec(kv_heads=2, key_dim=DIM, value_dim=DIM, scaling=0.25)
KINDS = {
    "plain": SPEC,
    "window": replace(SPEC, window=20),
    "softcap": replace(SPEC, softcap=2.0),
    "window and softcap": replace(SPEC, window=7, softcap=2.0),
    "heads of no power of two": replace(SPEC, key_dim=24, value_dim=12),
}
EPSILON = 1e-6


def randoms(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def differ(given: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((given - wanted).abs().max())


def in_pieces(contexts: list[int], slots: list[int], queries: int, piece: int, idle_items: int = 2) -> torch.Tensor:
    """The records of the items, as a step writes them; some items have nothing to do."""
    counts = [-(-context // piece) for context in contexts]
    firsts = [sum(counts[:at]) for at in range(len(counts))]
    records = torch.full(((sum(counts) + idle_items) * ITEM_WORDS,), -1, dtype=torch.int32)
    positions = ints(*(max(0, context - queries) for context in contexts))
    name_items[(len(contexts),)](
        ints(*slots), ints(*contexts), positions, ints(*firsts), ints(*counts), ints(piece), records, ITEMS=2
    )
    return records


def decode(
    pool: Paged,
    query: torch.Tensor,
    records: torch.Tensor,
    queries: int,
    sinks: torch.Tensor | None = None,
    rotation: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None,
) -> torch.Tensor:
    """[rows, heads, value_dim]; rows that nobody attends for stay NaN."""
    spec, items = pool.spec, len(records) // ITEM_WORDS
    rows = len(query)
    few = triton.next_power_of_2(HEADS // spec.kv_heads * queries)
    padded = triton.next_power_of_2(spec.value_dim)
    nan = float("nan")
    out = torch.full((rows, HEADS, spec.value_dim), nan)
    arrived = torch.zeros(rows * spec.kv_heads, dtype=torch.int32)
    cosines, sines, norms = (NOTHING, NOTHING, None) if rotation is None else rotation
    attend_decode[(spec.kv_heads, items)](
        query, *pool.kv, out, pool.tables, records, torch.full((items * spec.kv_heads * few * padded,), nan),
        torch.full((items * spec.kv_heads * few * 2,), nan), arrived, NOTHING if sinks is None else sinks, cosines, sines,
        NOTHING if norms is None else norms, query.stride(0), *pool.strides, DIM, spec.scaling, spec.softcap or 0.0,
        spec.window or 0, EPSILON, QUERIES=queries, GROUP=HEADS // spec.kv_heads, KV_HEADS=spec.kv_heads,
        KEY_DIM=spec.key_dim, KEY_PADDED=triton.next_power_of_2(spec.key_dim), VALUE_DIM=spec.value_dim,
        VALUE_PADDED=padded, BLOCK_SIZE=BLOCK_SIZE, ROWS=max(16, few), FEW_ROWS=few, TOKENS=16, TOGETHER=2,
        ROTATES=rotation is not None, HAS_NORMS=norms is not None, HAS_SOFTCAP=spec.softcap is not None,
        HAS_WINDOW=spec.window is not None, HAS_SINKS=sinks is not None, PRECISION="ieee", STAGES=2, LETS_BEGIN=False,
    )  # fmt: skip
    assert not arrived.any(), "the next step would wait for pieces that are not there"
    return out


def chunks(
    pool: Paged,
    query: torch.Tensor,
    slots: list[int],
    begins: list[int],
    lengths: list[int],
    sinks: torch.Tensor | None,
    one_way: bool,
) -> torch.Tensor:
    spec, queries = pool.spec, 16
    starts = [sum(lengths[:at]) for at in range(len(lengths) + 1)]
    tiles = [(sequence, row) for sequence, length in enumerate(lengths) for row in range(0, length, queries)]
    contexts = ints(*(begin + length for begin, length in zip(begins, lengths, strict=True)))
    out = torch.full((len(query), HEADS, spec.value_dim), float("nan"))
    attend_chunks[(HEADS, len(tiles))](
        query, *pool.kv, out, pool.tables, ints(*slots), contexts, ints(*begins), ints(*starts),
        ints(*(sequence for sequence, _ in tiles)), ints(*(row for _, row in tiles)), NOTHING if sinks is None else sinks,
        query.stride(0), *pool.strides, spec.scaling, spec.softcap or 0.0, spec.window or 0, HEADS=HEADS,
        GROUP=HEADS // spec.kv_heads, KEY_DIM=spec.key_dim, KEY_PADDED=triton.next_power_of_2(spec.key_dim),
        VALUE_DIM=spec.value_dim, VALUE_PADDED=triton.next_power_of_2(spec.value_dim), BLOCK_SIZE=BLOCK_SIZE,
        QUERIES=queries, TOKENS=16, HAS_SOFTCAP=spec.softcap is not None, HAS_WINDOW=spec.window is not None,
        HAS_SINKS=sinks is not None, ONE_WAY=one_way, PRECISION="ieee", STAGES=2,
    )  # fmt: skip
    return out


@pytest.mark.parametrize(("kind", "queries", "has_sinks"), one_in(3, product(KINDS, (1, 3), (False, True))))
def test_decodes_see_all_of_their_own_context_and_nothing_else(kind: str, queries: int, has_sinks: bool) -> None:
    pool, contexts, slots = paged(KINDS[kind], 3, WIDTH, seed=1), [70, 0, 17], [2, 1, 0]
    query, sinks = randoms(3 * queries, HEADS, pool.spec.key_dim), randoms(HEADS, seed=2) if has_sinks else None
    out = decode(pool, query, in_pieces(contexts, slots, queries, piece=32), queries, sinks)
    for sequence, (context, slot) in enumerate(zip(contexts, slots, strict=True)):
        rows = slice(sequence * queries, (sequence + 1) * queries)
        if context:
            assert differ(out[rows], pool.attended(query[rows], slot, context - queries, sinks)) < 1e-5
        else:
            assert out[rows].isnan().all(), "a row of nobody was written"


@settings(max_examples=8, deadline=None)
@given(
    contexts=st.lists(st.integers(1, WIDTH * BLOCK_SIZE), min_size=1, max_size=3),
    piece=st.sampled_from([16, 48, 64, 128]),
    kind=st.sampled_from(sorted(KINDS)),
)
def test_it_does_not_matter_how_a_context_is_cut_into_pieces(contexts: list[int], piece: int, kind: str) -> None:
    pool, slots = paged(KINDS[kind], len(contexts), WIDTH, seed=3), list(reversed(range(len(contexts))))
    query = randoms(len(contexts), HEADS, pool.spec.key_dim)
    out = decode(pool, query, in_pieces(contexts, slots, 1, piece), 1)
    for row, (context, slot) in enumerate(zip(contexts, slots, strict=True)):
        assert differ(out[row : row + 1], pool.attended(query[row : row + 1], slot, context - 1)) < 1e-5


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("kind", ["plain", "window and softcap"])
@pytest.mark.parametrize("piece", [16, 128])
def test_a_decode_that_rotates_leaves_its_key_and_value_and_attends_to_them(kind: str, has_norms: bool, piece: int) -> None:
    # The last of 33 tokens begins a block and, in pieces of 16, is alone in its own.
    pool, contexts, slots = paged(KINDS[kind], 3, WIDTH, seed=4), [33, 64, 1], [1, 0, 2]
    qkv = randoms(3, (HEADS + 2 * SPEC.kv_heads) * DIM, seed=5)
    cosines, sines, norms = randoms(3, DIM, seed=6), randoms(3, DIM, seed=7), randoms(2, DIM, seed=8).abs()
    before = [part.clone() for part in pool.kv]
    records = in_pieces(contexts, slots, 1, piece)
    out = decode(pool, qkv, records, 1, rotation=(cosines, sines, norms if has_norms else None))
    query, key, value = qkv.view(3, -1, DIM).split([HEADS, SPEC.kv_heads, SPEC.kv_heads], 1)
    if has_norms:
        query, key = normed(query, norms[0], EPSILON), normed(key, norms[1], EPSILON)
    query, key = rotated(query, cosines, sines), rotated(key, cosines, sines)
    for row, (context, slot) in enumerate(zip(contexts, slots, strict=True)):
        block, offset = pool.tables[slot, (context - 1) // BLOCK_SIZE], (context - 1) % BLOCK_SIZE
        assert differ(pool.kv.keys[block, :, offset], key[row]) < 1e-5
        assert torch.equal(pool.kv.values[block, :, offset], value[row])
        assert differ(out[row : row + 1], pool.attended(query[row : row + 1], slot, context - 1)) < 1e-5
        for part, old in zip(pool.kv, before, strict=True):
            old[block, :, offset] = part[block, :, offset]
    assert all(torch.equal(part, old) for part, old in zip(pool.kv, before, strict=True)), "another place was written"


@pytest.mark.parametrize(("kind", "one_way", "has_sinks"), one_in(3, product(KINDS, (False, True), (False, True))))
def test_chunks_see_what_was_cached_and_what_they_bring(kind: str, one_way: bool, has_sinks: bool) -> None:
    pool, slots, begins, lengths = paged(KINDS[kind], 3, WIDTH, seed=9), [2, 0, 1], [41, 0, 90], [33, 16, 1]
    query, sinks = randoms(sum(lengths), HEADS, pool.spec.key_dim), randoms(HEADS, seed=2) if has_sinks else None
    out, first = chunks(pool, query, slots, begins, lengths, sinks, one_way), 0
    for slot, begin, length in zip(slots, begins, lengths, strict=True):
        rows = slice(first, first + length)
        assert differ(out[rows], pool.attended(query[rows], slot, begin, sinks)) < 1e-5, f"slot {slot}"
        first += length


@settings(max_examples=8, deadline=None)
@given(
    begin=st.integers(0, 50),
    length=st.integers(1, 40),
    cut=st.integers(0, 39),
    kind=st.sampled_from(sorted(KINDS)),
    one_way=st.booleans(),
)
def test_it_does_not_matter_how_a_prompt_is_cut_into_chunks(
    begin: int, length: int, cut: int, kind: str, one_way: bool
) -> None:
    pool = paged(KINDS[kind], 1, WIDTH, seed=10)
    query, cut = randoms(length, HEADS, pool.spec.key_dim), min(cut, length - 1)
    with products_row_by_row():
        whole = chunks(pool, query, [0], [begin], [length], None, one_way)
        parts = [chunks(pool, query[cut:], [0], [begin + cut], [length - cut], None, one_way)]
        if cut:
            parts.insert(0, chunks(pool, query[:cut], [0], [begin], [cut], None, one_way))
    # By the same sums in the same order: in the interpreter, which rounds each of them, to the last bit.
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("each", [1, 2])
def test_heads_are_rotated_and_keys_and_values_go_into_their_blocks(has_norms: bool, each: int) -> None:
    pool, tokens = paged(SPEC, 1, WIDTH, seed=11), 4
    qkv = randoms(tokens, (HEADS + 2 * SPEC.kv_heads) * DIM, seed=5)
    cosines, sines, norms = randoms(tokens, DIM, seed=6), randoms(tokens, DIM, seed=7), randoms(2, DIM, seed=8).abs()
    blocks, offsets = ints(3, 5, -1, 3), ints(0, 3, 1, 15)
    query, wanted = torch.full((tokens, HEADS, DIM), float("nan")), [part.clone() for part in pool.kv]
    rotate_and_write[(tokens, (HEADS + 2 * SPEC.kv_heads) // each)](
        qkv, query, *pool.kv, cosines, sines, norms, blocks, offsets, EPSILON, qkv.stride(0), DIM,
        pool.kv.keys.stride(0), pool.kv.keys.stride(1), HEADS=HEADS, KV_HEADS=SPEC.kv_heads, DIM=DIM, HALF=DIM // 2,
        HEADS_EACH=each, HAS_NORMS=has_norms,
    )  # fmt: skip
    own, key, value = qkv.view(tokens, -1, DIM).split([HEADS, SPEC.kv_heads, SPEC.kv_heads], 1)
    if has_norms:
        own, key = normed(own, norms[0], EPSILON), normed(key, norms[1], EPSILON)
    assert differ(query, rotated(own, cosines, sines)) < 1e-5
    for token in (0, 1, 3):
        wanted[0][blocks[token], :, offsets[token]] = rotated(key, cosines, sines)[token]
        wanted[1][blocks[token], :, offsets[token]] = value[token]
    assert differ(pool.kv.keys, wanted[0]) < 1e-5
    assert torch.equal(pool.kv.values, wanted[1])


def test_rows_of_a_layer_that_rotates_by_itself_are_written_as_they_are() -> None:
    spec = KINDS["heads of no power of two"]
    pool, blocks, offsets = paged(spec, 1, WIDTH, seed=12), ints(2, -1, 4), ints(7, 0, 15)
    key, value = randoms(2, 3, 24, seed=1), randoms(2, 3, 12, seed=2)
    wanted = [part.clone() for part in pool.kv]
    write_rows[(3, 2)](
        key, value, *pool.kv, blocks, offsets, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        *pool.strides[:4], KEY_DIM=24, KEY_PADDED=32, VALUE_DIM=12, VALUE_PADDED=16,
    )  # fmt: skip
    for token in (0, 2):
        wanted[0][blocks[token], :, offsets[token]] = key[:, token]
        wanted[1][blocks[token], :, offsets[token]] = value[:, token]
    assert torch.equal(pool.kv.keys, wanted[0])
    assert torch.equal(pool.kv.values, wanted[1])
