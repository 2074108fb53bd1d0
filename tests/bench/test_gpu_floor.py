"""Floors: known shapes give known numbers, and more work never has a lower floor."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.gpu_floor import (
    Experts,
    GpuRates,
    Operation,
    decode_operations,
    floor_s,
    flop_of,
    pairs_of,
    prefill_operations,
    sizes_of,
)
from baton.executor.model_shapes import SHAPES

H200 = GpuRates(4.34e12, 790e12)
QWEN = sizes_of(SHAPES["qwen3-8b"])
NAMES = st.sampled_from(sorted(SHAPES))


def test_sizes_of_a_known_shape() -> None:
    assert QWEN.weight_bytes == pytest.approx(15.14e9, rel=0.001)
    assert QWEN.kv_bytes_per_token == 147_456
    assert QWEN.token_flop == pytest.approx(13.89e9, rel=0.001)
    assert QWEN.pair_flop == 589_824


@pytest.mark.parametrize(("batch", "ms"), [(1, 3.52), (32, 4.60), (128, 7.94)])
def test_where_memory_is_the_limit_the_floor_is_weights_and_kv(batch: int, ms: float) -> None:
    assert floor_s(decode_operations(QWEN, batch, 1024), H200) * 1e3 == pytest.approx(ms, rel=0.01)


def test_where_arithmetic_is_the_limit_it_counts_instead() -> None:
    assert floor_s(decode_operations(QWEN, 256, 1024), H200) * 1e3 == pytest.approx(13.8, rel=0.01)


def test_an_operation_takes_the_longer_of_its_two_times() -> None:
    rates = GpuRates(100.0, 10.0)
    assert Operation("a", 50.0, 1.0).least_s(rates) == 0.5
    assert Operation("a", 5.0, 20.0).least_s(rates) == 2.0
    assert floor_s([Operation("a", 50.0, 1.0), Operation("b", 5.0, 20.0)], rates) == 2.5


def test_a_prefill_multiplies_every_parameter_for_every_token() -> None:
    flop = flop_of(prefill_operations(QWEN, 1, 8192))
    assert flop == pytest.approx(8192 * QWEN.token_flop + QWEN.pair_flop * 8192 * 8193 / 2 + 2 * 151_936 * 4096)


def test_layers_with_a_window_read_no_more_than_it() -> None:
    mistral, gemma = sizes_of(SHAPES["mistral-7b"]), sizes_of(SHAPES["gemma2-9b"])

    def read(sizes: object, context: int) -> float:
        operations = decode_operations(sizes, 4, context)  # type: ignore[arg-type]
        return sum(operation.bytes for operation in operations if operation.name == "attention")

    assert read(mistral, 4096) == read(mistral, 32_768)
    assert read(gemma, 8192) == pytest.approx(1.5 * read(gemma, 4096))


def test_experts_are_read_as_far_as_a_batch_is_expected_to_choose_them() -> None:
    experts = Experts(128, 8, 1000)
    assert experts.touched(1) == pytest.approx(8)
    assert experts.touched(2) == pytest.approx(15.5)
    assert experts.touched(4096) == pytest.approx(128)


@given(NAMES, st.integers(1, 300), st.integers(1, 5000), st.integers(0, 300), st.integers(0, 5000))
def test_more_work_never_has_a_lower_floor(name: str, batch: int, context: int, rows: int, further: int) -> None:
    sizes = sizes_of(SHAPES[name])
    less, more = decode_operations(sizes, batch, context), decode_operations(sizes, batch + rows, context + further)
    assert floor_s(less, H200) <= floor_s(more, H200)


@given(st.integers(1, 40), st.integers(0, 40), st.none() | st.integers(1, 50))
def test_pairs_are_counted_as_one_by_one(tokens: int, begin: int, window: int | None) -> None:
    seen = [position + 1 if window is None else min(position + 1, window) for position in range(begin, begin + tokens)]
    assert pairs_of(tokens, begin, window) == sum(seen)


@given(NAMES, st.integers(1, 64), st.integers(1, 512))
def test_a_prefill_of_one_token_is_a_decode(name: str, sequences: int, context: int) -> None:
    sizes = sizes_of(SHAPES[name])
    one, other = prefill_operations(sizes, sequences, 1, context - 1), decode_operations(sizes, sequences, context)
    assert flop_of(one) == pytest.approx(flop_of(other))
