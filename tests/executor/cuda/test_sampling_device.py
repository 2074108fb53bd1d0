"""The sampler on the device chooses what the sampler of the CPU executor chooses, row for row."""

from __future__ import annotations

import math
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="kernels need Triton, which is not installed here")

import triton
import triton.language as tl
from msgspec.structs import replace

from baton.core.engine.request import Sampling
from baton.core.errors import InvariantViolated
from baton.executor.cuda.kernels_noise import gumbel, hash_of, noise_most, row_key
from baton.executor.cuda.sampling import DeviceSampler, SamplingMode
from baton.executor.gumbel_noise import gumbel as reference_gumbel
from baton.executor.gumbel_noise import hashes, noise_stream, row_keys
from baton.executor.sampling import Sampler

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PROMPT = np.array([1], dtype=np.int32)
GREEDY = Sampling(seed=0, temperature=0)
SMALL_CHUNK = 64

samplings = st.builds(
    Sampling,
    seed=st.integers(-(2**63), 2**64 - 1),
    choice=st.integers(0, 15),
    temperature=st.sampled_from([0.0, 0.2, 0.7, 1.0, 1.5]),
    top_k=st.sampled_from([0, 0, 1, 3, 20, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.2, 0.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
)
shapes = st.sampled_from(["smooth", "tied", "flat", "peaked", "holes", "broken", "hopeless", "infinite", "huge"])


def row_of(shape: str, vocabulary: int, seed: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    row = rng.normal(0, 3, vocabulary)
    match shape:
        case "tied":
            row = np.round(row)
        case "flat":
            row[:] = rng.normal()
        case "peaked":
            row[rng.integers(vocabulary)] += 20
        case "holes":
            row[rng.random(vocabulary) < 0.5] = -math.inf
        case "broken":
            row[rng.random(vocabulary) < 0.1] = math.nan
        case "hopeless":
            row = rng.choice([math.nan, -math.inf], vocabulary)
        case "infinite":
            row[rng.integers(vocabulary, size=3)] = math.inf
        case "huge":
            row *= 1e37
    return torch.from_numpy(row.astype(np.float32))


def on_device(
    logits: torch.Tensor, wishes: list[Sampling], positions: npt.ArrayLike, mode: SamplingMode | None = None
) -> list[int]:
    sampler = DeviceSampler(len(wishes), logits.shape[1], len(wishes), DEVICE)
    for slot, sampling in enumerate(wishes):
        sampler.start(slot, sampling)
    return draw(sampler, logits, range(len(wishes)), positions, mode)


def draw(
    sampler: DeviceSampler,
    logits: torch.Tensor,
    slots: npt.ArrayLike,
    positions: npt.ArrayLike,
    mode: SamplingMode | None = None,
) -> list[int]:
    named = np.asarray(slots, dtype=np.int32)
    at = torch.from_numpy(np.asarray(positions, dtype=np.int32)).to(DEVICE)
    out = torch.empty(len(named), dtype=torch.int32, device=DEVICE)
    # On a GPU arithmetic that overflows says nothing; numpy, which the interpreter computes with, would warn.
    with np.errstate(all="ignore"):
        mode = sampler.mode_of(named) if mode is None else mode
        sampler.draw(logits.to(DEVICE), torch.from_numpy(named).to(DEVICE), at, out, mode)
    return out.tolist()


def on_host(logits: torch.Tensor, wishes: list[Sampling], positions: npt.ArrayLike) -> list[int]:
    sampler = Sampler(len(wishes), logits.shape[1], CPU)
    for slot, sampling in enumerate(wishes):
        sampler.start(slot, PROMPT, 1, sampling)
    slots = np.arange(len(wishes), dtype=np.int32)
    return sampler.sample(logits.to(torch.float32), slots, np.asarray(positions, dtype=np.int64)).tokens.tolist()


def near_a_cut(row: torch.Tensor, sampling: Sampling) -> bool:
    """Whether rounding alone could decide top-p: then two right implementations may differ."""
    if sampling.temperature == 0 or sampling.top_p >= 1:
        return False
    logits = row.double().nan_to_num(nan=-math.inf, posinf=torch.finfo(torch.float32).max, neginf=-math.inf)
    if logits.max() == -math.inf:
        logits = torch.zeros_like(logits)
    values = ((logits - logits.max()) / sampling.temperature).sort(descending=True).values
    weights = values[: sampling.top_k or None].exp()
    return bool(((weights.cumsum(0) / weights.sum() - sampling.top_p).abs() < 1e-5).any())


@pytest.mark.parametrize("batches", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_a_row_is_chosen_as_the_sampler_of_the_host_chooses_it(batches: int) -> None:
    @settings(max_examples=batches, deadline=None)
    @given(
        rows=st.lists(st.tuples(samplings, shapes, st.integers(0, 10**6)), min_size=1, max_size=3),
        vocabulary=st.sampled_from([2, 63, 64, 65, 700]),
        position=st.integers(0, 2**31 - 1),
    )
    def batch(rows: list[tuple[Sampling, str, int]], vocabulary: int, position: int) -> None:
        _are_chosen_alike(rows, vocabulary, position)

    batch()


def _are_chosen_alike(rows: list[tuple[Sampling, str, int]], vocabulary: int, position: int) -> None:
    wishes = [sampling for sampling, _, _ in rows]
    logits = torch.stack([row_of(shape, vocabulary, seed) for _, shape, seed in rows])
    assume(not any(near_a_cut(row, sampling) for row, sampling in zip(logits, wishes, strict=True)))
    positions = np.full(len(rows), position)
    with patch("baton.executor.cuda.sampling.CHUNK", SMALL_CHUNK):
        assert on_device(logits, wishes, positions) == on_host(logits, wishes, positions)


@settings(max_examples=4, deadline=None)
@given(sampling=samplings, shape=shapes, seed=st.integers(0, 10**6), other=samplings)
def test_a_row_alone_is_the_same_row_in_any_batch_and_mode(
    sampling: Sampling, shape: str, seed: int, other: Sampling
) -> None:
    row = row_of(shape, 130, seed)
    neighbours = torch.stack([row_of("smooth", 130, seed + 1), row, row_of("tied", 130, seed + 2)])
    with patch("baton.executor.cuda.sampling.CHUNK", SMALL_CHUNK):
        alone = on_device(row.unsqueeze(0), [sampling], [7])
        assert on_device(neighbours, [other, sampling, other], [3, 7, 7], SamplingMode.CUTS)[1:2] == alone


CUTS: tuple[dict[str, float], ...] = (
    {},
    {"temperature": 0.0},
    {"top_p": 0.9},
    {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
    {"min_p": 0.05},
    {"top_p": 0.2},
    {"top_k": 50},
    {"top_k": 300, "top_p": 0.5},
)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_rows_of_a_real_vocabulary_are_chosen_alike(scale: float) -> None:
    wishes = [replace(Sampling(seed=n), **cut) for n, cut in enumerate(CUTS)]
    logits = torch.randn((len(wishes), 151_936), generator=torch.Generator().manual_seed(3)) * scale
    positions = np.arange(len(wishes)) + 1000
    assert on_device(logits, wishes, positions) == on_host(logits, wishes, positions)


def test_many_draws_of_one_row_are_all_alike() -> None:
    row = row_of("smooth", 130, 1)
    wishes = [Sampling(seed=n, temperature=1.3) for n in range(40)]
    logits = row.repeat(len(wishes), 1)
    with patch("baton.executor.cuda.sampling.CHUNK", SMALL_CHUNK):
        drawn = on_device(logits, wishes, np.zeros(len(wishes)))
    assert drawn == on_host(logits, wishes, np.zeros(len(wishes)))
    assert len(set(drawn)) > 5


@pytest.mark.parametrize("temperature", [1e-9, 1e-5, 1e5, 1e9])
def test_extreme_temperatures_are_bounded_alike(temperature: float) -> None:
    wishes = [Sampling(seed=n, temperature=temperature, top_p=(1.0, 0.505)[n % 2]) for n in range(4)]
    logits = torch.stack([row_of("smooth", 100, n) for n in range(4)])
    assert on_device(logits, wishes, [5] * 4) == on_host(logits, wishes, [5] * 4)


@pytest.mark.slow
def test_of_equal_values_top_k_and_top_p_keep_the_lower_ids() -> None:
    flat = torch.zeros((6, 200))
    for cut in ({"top_k": 3}, {"top_p": 3 / 200}, {"top_k": 6, "top_p": 0.5}):
        wishes = [replace(Sampling(seed=n), **cut) for n in range(len(flat))]
        with patch("baton.executor.cuda.sampling.CHUNK", SMALL_CHUNK):
            drawn = on_device(flat, wishes, np.zeros(len(flat)))
        assert drawn == on_host(flat, wishes, np.zeros(len(flat)))
        assert set(drawn) <= {0, 1, 2}


@pytest.mark.parametrize(
    ("row", "greatest"),
    [
        ([1.0, 3.0, 3.0, 2.0], 1),
        ([-0.0, 0.0, -1.0], 0),
        ([math.nan, 1.0, 2.0], 2),
        ([0.0, math.inf, math.inf], 1),
        ([math.nan, -math.inf, math.nan], 0),
        ([-math.inf, -5.0, -math.inf], 1),
        ([3.4028234663852886e38, math.inf, 0.0], 0),
    ],
)
def test_greedy_takes_the_first_of_the_greatest(row: list[float], greatest: int) -> None:
    for mode in SamplingMode:
        assert on_device(torch.tensor([row]), [GREEDY], [0], mode) == [greatest]


def test_half_precision_counts_as_the_float32_it_stands_for() -> None:
    wishes = [replace(Sampling(seed=n), **cut) for n, cut in enumerate(CUTS[:5])]
    logits = (torch.randn((len(wishes), 500), generator=torch.Generator().manual_seed(1)) * 3).to(torch.bfloat16)
    assert not any(near_a_cut(row, sampling) for row, sampling in zip(logits, wishes, strict=True))
    assert on_device(logits, wishes, [9] * 5) == on_host(logits.float(), wishes, [9] * 5)


def test_columns_past_the_vocabulary_are_not_looked_at() -> None:
    sampler = DeviceSampler(2, 100, 2, DEVICE)
    sampler.start(0, Sampling(seed=1))
    sampler.start(1, GREEDY)
    wide = torch.full((2, 128), 50.0)
    wide[:, :100] = torch.stack([row_of("smooth", 100, n) for n in range(2)])
    assert draw(sampler, wide, [0, 1], [4, 4]) == on_host(wide[:, :100], [Sampling(seed=1), GREEDY], [4, 4])


def test_a_slot_in_use_again_keeps_nothing_of_who_was_there() -> None:
    sampler = DeviceSampler(1, 300, 1, DEVICE)
    logits = row_of("smooth", 300, 5).unsqueeze(0)
    for sampling in (Sampling(seed=1, top_k=2, min_p=0.5, top_p=0.1), Sampling(seed=2), GREEDY, Sampling(seed=2, top_p=0.7)):
        sampler.start(0, sampling)
        assert draw(sampler, logits, [0], [11]) == on_host(logits, [sampling], [11])


def test_rows_of_one_slot_at_several_positions_are_drawn_each_for_its_own() -> None:
    sampler = DeviceSampler(3, 120, 8, DEVICE)
    sampling = Sampling(seed=9, top_p=0.8)
    sampler.start(1, sampling)
    logits = torch.stack([row_of("smooth", 120, n) for n in range(4)])
    together = draw(sampler, logits, [1] * 4, [5, 6, 7, 8])
    assert together == [on_host(logits[[n]], [sampling], [5 + n])[0] for n in range(4)]


def test_rows_that_pad_a_batch_may_name_the_slot_after_the_last() -> None:
    sampler = DeviceSampler(2, 50, 3, DEVICE)
    sampler.start(0, Sampling(seed=4, min_p=0.1))
    logits = torch.stack([row_of("smooth", 50, n) for n in range(3)])
    drawn = draw(sampler, logits, [0, 2, 2], [1, 0, 0])
    assert drawn[1:] == logits[1:].argmax(dim=1).tolist()


def test_the_mode_is_what_the_slot_that_asks_for_most_needs() -> None:
    sampler = DeviceSampler(5, 40, 1, DEVICE)
    asked = (GREEDY, Sampling(seed=0), Sampling(seed=0, top_k=5), Sampling(seed=0, top_k=40), replace(GREEDY, top_p=0.5))
    for slot, sampling in enumerate(asked):
        sampler.start(slot, sampling)
    modes = [sampler.mode_of(np.array([slot], dtype=np.int32)) for slot in range(5)]
    assert modes == [SamplingMode.GREEDY, SamplingMode.ALL, SamplingMode.CUTS, SamplingMode.ALL, SamplingMode.GREEDY]
    assert sampler.mode_of(np.array([0, 2, 1], dtype=np.int32)) is SamplingMode.CUTS
    assert sampler.mode_of(np.empty(0, dtype=np.int32)) is SamplingMode.GREEDY


@pytest.mark.parametrize(
    ("asked", "needs"),
    [
        ({}, False),
        ({"stop_token_ids": (3,)}, False),
        ({"stop_token_ids": (3,), "min_tokens": 2}, True),
        ({"logit_bias": ((1, 2.0),)}, True),
        ({"presence_penalty": 0.5}, True),
        ({"repetition_penalty": 1.2}, True),
        ({"logprobs": 0}, True),
    ],
)
def test_what_shapes_logits_or_reports_them_needs_the_host(asked: dict[str, object], needs: bool) -> None:
    sampler = DeviceSampler(2, 40, 1, DEVICE)
    sampler.start(0, Sampling(seed=0))
    sampler.start(1, Sampling(seed=0, **asked))  # type: ignore[arg-type]
    assert sampler.needs_host(np.array([0, 1], dtype=np.int32)) is needs
    assert not sampler.needs_host(np.array([0], dtype=np.int32))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InvariantViolated, match="can be ranked"):
        DeviceSampler(1, (1 << 20) + 1, 1, DEVICE)
    sampler = DeviceSampler(2, 40, 2, DEVICE)
    for logits in (torch.zeros((3, 40)), torch.zeros((1, 39)), torch.zeros((40, 2)).T):
        with pytest.raises(InvariantViolated, match="there is room for 2 rows"):
            draw(sampler, logits, [0] * len(logits), [0] * len(logits))
    with pytest.raises(InvariantViolated, match="a column"):
        draw(sampler, torch.zeros((2, 40)), [0], [0])


@triton.jit
def noise_table(streams, positions, noise, most, TOKENS: tl.constexpr):
    row = tl.program_id(0)
    token = tl.arange(0, TOKENS)
    slope, offset = row_key(tl.load(streams + row), tl.load(positions + row))
    hashed = hash_of(token, slope, offset)
    tl.store(noise + row * TOKENS + token, gumbel(hashed))
    tl.store(most + row * TOKENS + token, noise_most(hashed))


def test_noise_is_that_of_the_host_bit_for_bit_and_never_above_its_bound() -> None:
    tokens = 4096
    streams = np.array([noise_stream(seed, choice) for seed, choice in ((0, 0), (-1, 3), (2**64 - 5, 15))], dtype=np.uint64)
    positions = np.array([0, 17, 2**31 - 1])
    noise = torch.empty((3, tokens), dtype=torch.float64, device=DEVICE)
    most = torch.empty((3, tokens), device=DEVICE)
    noise_table[(3,)](
        torch.from_numpy(streams.view(np.int64)).to(DEVICE),
        torch.from_numpy(positions.astype(np.int32)).to(DEVICE),
        noise,
        most,
        TOKENS=tokens,
        enable_fp_fusion=False,
    )
    expected = reference_gumbel(hashes(torch.arange(tokens, dtype=torch.int32), row_keys(streams, positions, CPU)))
    assert torch.equal(noise.cpu(), expected)
    assert bool((most.cpu().double() * math.log(2) >= expected - 1e-4).all())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are captured on CUDA only")
@pytest.mark.parametrize("mode", list(SamplingMode))
def test_a_captured_draw_follows_what_slots_ask_for_later(mode: SamplingMode) -> None:
    rows, vocabulary = 16, 32_000
    sampler = DeviceSampler(rows, vocabulary, rows, DEVICE)
    logits = torch.randn((rows, vocabulary), device=DEVICE)
    slots = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    positions, out = torch.zeros_like(slots), torch.zeros_like(slots)
    sampler.draw(logits, slots, positions, out, mode)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler.draw(logits, slots, positions, out, mode)
    cuts: dict[SamplingMode, dict[str, float]] = {
        SamplingMode.GREEDY: {"temperature": 0.0},
        SamplingMode.ALL: {},
        SamplingMode.CUTS: {"top_k": 30},
    }
    for stay in range(3):
        wishes = [replace(Sampling(seed=stay * rows + n), **cuts[mode]) for n in range(rows)]
        for slot, sampling in enumerate(wishes):
            sampler.start(slot, sampling)
        logits.normal_()
        positions.fill_(stay)
        graph.replay()
        assert out.tolist() == on_host(logits.cpu(), wishes, [stay] * rows)
