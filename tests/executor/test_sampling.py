"""What the sampler chooses, held against plain references: slow, obvious, one row at a time."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from baton.core.engine.request import Sampling, Tokens
from baton.core.errors import InvariantViolated
from baton.executor.penalties import SlotPenalties
from baton.executor.sampling import LOGPROB_LEAST, SampledTokens, Sampler

CPU = torch.device("cpu")
GREEDY = Sampling(seed=0, temperature=0)
Floats = npt.NDArray[np.float64]
MASK32, MASK64 = (1 << 32) - 1, (1 << 64) - 1


def reference_noise(seed: int, choice: int, position: int, token: int) -> float:
    """The hash in Python's own integers and the noise in `math`: shares no line with the code under test."""

    def mix64(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
        return x ^ (x >> 31)

    def fold(x: int, bits: int) -> int:
        signed = x - (1 << 32) if x >> 31 else x
        return (x ^ (signed >> bits)) & MASK32

    golden = 0x9E3779B97F4A7C15
    stream = mix64((mix64(seed & MASK64) + golden * (choice + 1)) & MASK64)
    key = mix64((stream + golden * (position + 1)) & MASK64)
    x = (((key & MASK32) | 1) * token + (key >> 32)) & MASK32
    x = (fold(x, 16) * 0x7FEB352D) & MASK32
    x = (fold(x, 15) * 0x6C8E9CF5) & MASK32
    return -math.log(-math.log1p(-(fold(x, 16) + 0.5) / 2**31))


def ranked(values: Floats) -> list[int]:
    return sorted(range(len(values)), key=lambda token: (-values[token], token))


def reference_survivors(values: Floats, sampling: Sampling) -> list[int]:
    kept = ranked(values)[: sampling.top_k or None]
    weights = [math.exp(values[token]) for token in kept]
    before = 0.0
    inside: list[int] = []
    for token, weight in zip(kept, weights, strict=True):
        if not inside or sampling.top_p >= 1 or before / math.fsum(weights) < sampling.top_p:
            inside.append(token)
        before += weight
    return [token for token in inside if math.exp(values[token] - max(values)) >= sampling.min_p * (1 - 1e-12)]


def reference_draw(logits: Floats, sampling: Sampling, position: int) -> int:
    values = (logits - logits.max()) / sampling.temperature
    survivors = reference_survivors(values, sampling)
    noise = {token: reference_noise(sampling.seed, sampling.choice, position, token) for token in survivors}
    return max(survivors, key=lambda token: (values[token] + noise[token], -token))


def near_a_cut(logits: Floats, sampling: Sampling) -> bool:
    """Whether rounding alone could decide top-p: then two right implementations may differ."""
    values = (logits - logits.max()) / sampling.temperature
    weights = np.exp([values[token] for token in ranked(values)[: sampling.top_k or None]])
    return bool((np.abs(np.cumsum(weights) / weights.sum() - sampling.top_p) < 1e-5).any())


def tokens_of(*ids: int) -> Tokens:
    return np.array(ids, dtype=np.int32)


def sample_one(
    logits: npt.ArrayLike, sampling: Sampling, position: int = 1, tokens: Tokens | None = None, prompt_tokens: int = 1
) -> SampledTokens:
    table = torch.tensor(np.asarray(logits, dtype=np.float64)).unsqueeze(0)
    sampler = Sampler(1, table.shape[1], CPU)
    sampler.start(0, tokens_of(0) if tokens is None else tokens, prompt_tokens, sampling)
    return sampler.sample(table, np.zeros(1, dtype=np.int32), np.array([position]))


def choose(logits: npt.ArrayLike, sampling: Sampling, position: int = 1) -> int:
    return int(sample_one(logits, sampling, position).tokens[0])


samplings = st.builds(
    Sampling,
    seed=st.integers(-(2**63), 2**64 - 1),
    choice=st.integers(0, 15),
    temperature=st.sampled_from([0.2, 0.7, 1.0, 1.5]),
    top_k=st.sampled_from([0, 0, 1, 3, 20, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.2, 0.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
)


@settings(max_examples=150, deadline=None)
@given(
    sampling=samplings, vocabulary=st.sampled_from([1, 2, 63, 64, 65, 300]), ties=st.booleans(), data=st.integers(0, 10**6)
)
def test_a_draw_is_the_best_of_the_reference_survivors(sampling: Sampling, vocabulary: int, ties: bool, data: int) -> None:
    rng = np.random.default_rng(data)
    logits = rng.normal(0, 3, vocabulary)
    if ties:
        logits = np.round(logits)
    assume(not near_a_cut(logits, sampling))
    position = int(rng.integers(1, 10**6))
    assert choose(logits, sampling, position) == reference_draw(logits, sampling, position)


@pytest.mark.parametrize("seed", range(10))
def test_survivors_are_those_of_transformers(seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, 500)
    sampling = Sampling(seed=seed, temperature=0.8, top_k=60, top_p=0.9, min_p=0.02)
    warped = torch.tensor(logits).unsqueeze(0) / 0.8
    for warper in (TopKLogitsWarper(60), TopPLogitsWarper(0.9), MinPLogitsWarper(0.02)):
        warped = warper(None, warped)
    theirs = set(warped[0].isfinite().nonzero().flatten().tolist())
    drawn = {choose(logits, sampling, position) for position in range(1, 60)}
    assert drawn <= theirs
    assert set(reference_survivors((logits - logits.max()) / 0.8, sampling)) == theirs


def test_top_p_after_top_k_counts_what_top_k_kept() -> None:
    # Of all, the first token has 0.4; of the two that top-k keeps, 0.5: it alone reaches p only in the second case.
    logits = np.log([0.4, 0.4, 0.1, 0.1])
    assert {choose(logits, Sampling(seed=1, top_k=2, top_p=0.45), p) for p in range(60)} == {0}
    assert {choose(logits, Sampling(seed=1, top_p=0.45), p) for p in range(60)} == {0, 1}


def test_among_equal_values_top_k_and_top_p_keep_the_lower_ids() -> None:
    flat = np.zeros(200)
    assert {choose(flat, Sampling(seed=1, top_k=3), p) for p in range(100)} == {0, 1, 2}
    assert {choose(flat, Sampling(seed=1, top_p=0.0101), p) for p in range(100)} == {0, 1, 2}
    flat[150] = 1.0
    assert {choose(flat, Sampling(seed=1, top_k=3), p) for p in range(100)} == {0, 1, 150}


@pytest.mark.parametrize("top_k", [0, 4])
def test_top_p_stops_at_the_token_that_reaches_it(top_k: int) -> None:
    quarters = np.array([0.0, 0.0, 0.0, 0.0, -np.inf])
    assert {choose(quarters, Sampling(seed=1, top_k=top_k, top_p=0.5), p) for p in range(40)} == {0, 1}
    assert {choose(quarters, Sampling(seed=1, top_k=top_k, top_p=0.501), p) for p in range(40)} == {0, 1, 2}


@pytest.mark.parametrize("cut", [{"top_p": 0.0}, {"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-12, "top_k": 5}])
def test_the_strictest_cut_leaves_the_greatest(cut: dict[str, float]) -> None:
    logits = np.random.default_rng(3).normal(size=100)
    assert {choose(logits, replace(Sampling(seed=5), **cut), p) for p in range(20)} == {int(logits.argmax())}


@pytest.mark.parametrize("vocabulary", [1, 7, 64, 100, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_greedy_takes_the_greatest_and_among_equals_the_lowest_id(vocabulary: int, dtype: torch.dtype) -> None:
    logits = torch.randint(0, 5, (50, vocabulary), generator=torch.Generator().manual_seed(1)).to(dtype)
    sampler = Sampler(1, vocabulary, CPU)
    sampler.start(0, tokens_of(0), 1, GREEDY)
    tokens = sampler.sample(logits, np.zeros(50, dtype=np.int32), np.arange(1, 51)).tokens
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert tokens.tolist() == expected
    assert tokens.dtype == np.int32


@pytest.mark.parametrize("penalty", [1.3, 0.7, 2.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    rng = np.random.default_rng(int(penalty * 10))
    tokens = rng.integers(0, 30, 25).astype(np.int32)
    for _ in range(30):
        logits = rng.normal(0, 1, 30)
        theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.from_numpy(tokens).long()[None], torch.tensor(logits)[None])
        ours = sample_one(logits, replace(GREEDY, repetition_penalty=penalty), 25, tokens, prompt_tokens=10)
        assert ours.tokens[0] == theirs[0].argmax()


def test_presence_and_frequency_count_outputs_but_not_the_prompt() -> None:
    rng = np.random.default_rng(4)
    tokens = rng.integers(0, 12, 40).astype(np.int32)
    counts = np.bincount(tokens[15:], minlength=12)
    sampling = replace(GREEDY, presence_penalty=0.4, frequency_penalty=0.15)
    for _ in range(50):
        logits = rng.normal(0, 0.5, 12)
        expected = logits - 0.4 * (counts > 0) - 0.15 * counts
        assert sample_one(logits, sampling, 40, tokens, prompt_tokens=15).tokens[0] == expected.argmax()


def test_all_penalties_together_follow_a_sequence_as_it_grows() -> None:
    rng = np.random.default_rng(8)
    sampling = replace(GREEDY, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.02)
    sequence = rng.integers(0, 20, 5).tolist()
    sampler = Sampler(1, 20, CPU)
    sampler.start(0, tokens_of(*sequence), 5, sampling)
    for _ in range(600):
        logits = rng.normal(0, 1, 20)
        seen = np.isin(np.arange(20), sequence)
        counts = np.bincount(sequence[5:], minlength=20)
        expected = np.where(seen, np.where(logits < 0, logits * 1.2, logits / 1.2), logits)
        expected = expected - 0.3 * (counts > 0) - 0.02 * counts
        sampled = sampler.sample(torch.tensor(logits)[None], np.zeros(1, dtype=np.int32), np.array([len(sequence)]))
        assert sampled.tokens[0] == expected.argmax()
        sequence.append(int(expected.argmax()))


def test_a_bias_of_100_forces_and_of_minus_100_forbids() -> None:
    logits = np.random.default_rng(2).normal(size=50)
    forced = Sampling(seed=3, logit_bias=((0, 100.0),))
    forbidden = Sampling(seed=3, logit_bias=tuple((token, -100.0) for token in range(1, 50)))
    assert {choose(logits, forced, p) for p in range(30)} == {0}
    assert {choose(logits, forbidden, p) for p in range(30)} == {0}
    assert choose(logits, replace(GREEDY, logit_bias=((int(logits.argmax()), -100.0),))) == ranked(logits)[1]


def test_stop_tokens_wait_for_min_tokens_and_not_longer() -> None:
    logits = np.zeros(6)
    logits[[2, 4]] = 50.0
    for sampling in (GREEDY, Sampling(seed=9)):
        waiting = replace(sampling, stop_token_ids=(2, 4), min_tokens=3)
        drawn = [int(sample_one(logits, waiting, p, tokens_of(*[0] * 10), 10).tokens[0]) for p in range(10, 16)]
        assert all(token not in (2, 4) for token in drawn[:3])
        assert all(token in (2, 4) for token in drawn[3:])
    assert choose(logits, replace(GREEDY, stop_token_ids=(2, 4))) == 2


def test_min_tokens_counts_outputs_of_an_earlier_stay() -> None:
    logits = [0.0, 9.0]
    sampling = replace(GREEDY, stop_token_ids=(1,), min_tokens=2)
    assert sample_one(logits, sampling, 4, tokens_of(0, 0, 0, 0), prompt_tokens=3).tokens[0] == 0
    assert sample_one(logits, sampling, 5, tokens_of(0, 0, 0, 0, 0), prompt_tokens=3).tokens[0] == 1


def test_logprobs_are_of_the_raw_logits_and_aligned_with_their_rows() -> None:
    logits = torch.randn((5, 40), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = torch.log_softmax(logits, -1).numpy()
    sampler = Sampler(4, 40, CPU)
    shaped = Sampling(seed=1, temperature=0.5, top_k=5, logit_bias=((3, 5.0),), repetition_penalty=1.5)
    for slot, logprobs in enumerate((None, 0, 3, 20)):
        sampler.start(slot, tokens_of(1, 2, 3), 3, replace(shaped, logprobs=logprobs))
    slots = np.array([3, 0, 2, 1, 2], dtype=np.int32)
    sampled = sampler.sample(logits, slots, np.array([3, 3, 3, 3, 4]))
    assert [line.row for line in sampled.logprobs] == [0, 2, 3, 4]
    for line in sampled.logprobs:
        count = (0, 0, 3, 20)[slots[line.row]]
        row = expected[line.row]
        assert line.chosen.shape == (1,)
        assert line.top.shape == line.top_ids.shape == (1, count)
        assert (line.chosen.dtype, line.top.dtype, line.top_ids.dtype) == (np.float32, np.float32, np.int32)
        np.testing.assert_allclose(line.chosen, row[sampled.tokens[line.row]], rtol=1e-6)
        assert line.top_ids[0].tolist() == ranked(row)[:count]
        np.testing.assert_allclose(line.top[0], row[line.top_ids[0]], rtol=1e-6)


def test_equally_likely_alternatives_are_listed_by_id() -> None:
    line = sample_one(np.zeros(300), replace(GREEDY, logprobs=5)).logprobs[0]
    assert line.top_ids.tolist() == [[0, 1, 2, 3, 4]]


def test_logprobs_of_impossible_tokens_are_finite() -> None:
    line = sample_one([0.0, -np.inf, -np.inf], replace(GREEDY, logprobs=20)).logprobs[0]
    assert line.top_ids.tolist() == [[0, 1, 2]]
    assert line.top.tolist() == [[0.0, LOGPROB_LEAST, LOGPROB_LEAST]]


BROKEN = [
    ([np.nan, 1.0, 2.0], {2, 1}, 2),
    ([np.nan, -np.inf, 2.0], {2}, 2),
    ([1.0, np.inf, 2.0, np.inf], {1, 3}, 1),
    ([-np.inf] * 3, {0, 1, 2}, 0),
    ([np.nan] * 3, {0, 1, 2}, 0),
    ([np.inf] * 3, {0, 1, 2}, 0),
    ([np.nan, -np.inf, np.inf], {2}, 2),
]


@pytest.mark.parametrize(("logits", "possible", "greedy"), BROKEN)
def test_broken_logits_choose_all_the_same(logits: list[float], possible: set[int], greedy: int) -> None:
    assert choose(logits, GREEDY) == greedy
    for cut in ({}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.2}, {"temperature": 1e-9}):
        sampling = replace(Sampling(seed=1, logprobs=2), **cut)
        drawn = [sample_one(logits, sampling) for _ in range(2)]
        assert int(drawn[0].tokens[0]) in possible
        assert drawn[0].tokens[0] == drawn[1].tokens[0]
        assert np.isfinite(drawn[0].logprobs[0].chosen).all()
        assert np.isfinite(drawn[0].logprobs[0].top).all()


def test_a_broken_row_leaves_its_neighbours_alone() -> None:
    logits = torch.randn((3, 90), generator=torch.Generator().manual_seed(3))
    sampler = Sampler(3, 90, CPU)
    for slot in range(3):
        sampler.start(slot, tokens_of(1), 1, Sampling(seed=slot, top_p=0.9))
    slots, positions = np.arange(3, dtype=np.int32), np.full(3, 1)
    sound = sampler.sample(logits, slots, positions).tokens
    broken = logits.clone()
    broken[1] = np.nan
    assert sampler.sample(broken, slots, positions).tokens[[0, 2]].tolist() == sound[[0, 2]].tolist()


def test_all_banned_and_masked_still_yields_a_token() -> None:
    assert choose([0.0, 0.0], replace(GREEDY, stop_token_ids=(0, 1), min_tokens=5)) == 0


def test_the_given_logits_are_not_changed() -> None:
    logits = torch.randn((2, 70), generator=torch.Generator().manual_seed(5))
    before = logits.clone()
    sampler = Sampler(2, 70, CPU)
    everything = Sampling(
        seed=1, top_p=0.8, min_p=0.01, repetition_penalty=1.3, presence_penalty=1.0, logit_bias=((1, 2.0),), logprobs=3
    )
    sampler.start(0, tokens_of(1, 2), 2, replace(everything, stop_token_ids=(3,), min_tokens=4))
    sampler.start(1, tokens_of(1, 2), 2, GREEDY)
    sampler.sample(logits, np.array([0, 1], dtype=np.int32), np.array([2, 2]))
    assert torch.equal(logits, before)


def test_no_rows_yield_nothing_and_empty_slots_are_refused() -> None:
    sampler = Sampler(2, 10, CPU)
    assert sampler.sample(torch.empty(0, 10), np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64)).tokens.shape == (0,)
    with pytest.raises(InvariantViolated):
        sampler.sample(torch.zeros(1, 10), np.array([1], dtype=np.int32), np.array([1]))


def test_penalties_take_memory_only_for_slots_that_use_them() -> None:
    penalties = SlotPenalties(1024, 1000, CPU)
    assert penalties.rows == 0
    for slot in range(3):
        penalties.start(slot, tokens_of(1), 1, replace(GREEDY, presence_penalty=0.5))
    assert penalties.rows == 4
    for slot in range(100):
        penalties.start(3 + slot, tokens_of(1), 1, replace(GREEDY, presence_penalty=0.5))
        penalties.stop(3 + slot)
    assert penalties.rows == 4


def test_a_gap_in_the_outputs_of_a_penalised_slot_is_a_bug_and_says_so() -> None:
    with pytest.raises(InvariantViolated):
        sample_one(np.zeros(5), replace(GREEDY, presence_penalty=0.5), position=3)
